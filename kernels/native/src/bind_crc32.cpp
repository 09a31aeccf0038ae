#include "crc32.h"

#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace aegis;

void bind_crc32(nb::module_& m) {
    m.def("crc32_methods", [] {
        std::vector<std::string> names;
        for (int n = 0; crc32_method(n) != nullptr; ++n) names.emplace_back(crc32_method(n)->name);
        return names;
    });
    m.def(
        "crc32",
        [](std::uintptr_t address, std::size_t nbytes, const std::string& method) {
            for (int n = 0; const auto* way = crc32_method(n); ++n) {
                if (!method.empty() && method != way->name) continue;
                return way->run(0, reinterpret_cast<const unsigned char*>(address), nbytes);
            }
            throw nb::value_error("no such method on this processor; crc32_methods lists them");
        },
        nb::arg("address"), nb::arg("nbytes"), nb::arg("method") = "",
        nb::call_guard<nb::gil_scoped_release>());
}
