// What Python hands over is refused where the kernels could not read it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

namespace aegis {

constexpr uintptr_t kAlign = 4;  // of floats, int32 and the words that codes lie in

inline void check_address(const char* what, uintptr_t address) {
    if (address % kAlign == 0) return;
    throw nanobind::value_error((std::string(what) + " lies " + std::to_string(address % kAlign) +
                                 " bytes behind a multiple of 4: use memory that is aligned, as a copy is")
                                    .c_str());
}

// An address that Python passed as a number.
template <class T>
T* at(const char* what, uintptr_t address) {
    check_address(what, address);
    return reinterpret_cast<T*>(address);
}

// numpy makes arrays at any address, of any part of a buffer.
template <class... Args>
void check_array(const char* what, const nanobind::ndarray<Args...>& array) {
    check_address(what, reinterpret_cast<uintptr_t>(array.data()));
}

template <class... Args>
auto* data_of(const char* what, const nanobind::ndarray<Args...>& array) {
    check_array(what, array);
    return array.data();
}

}  // namespace aegis
