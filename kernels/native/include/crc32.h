// CRC-32 as in zlib (polynomial 0xEDB88320, bits reflected): the checksum of expert records.
#pragma once

#include <cstddef>
#include <cstdint>

namespace aegis {

// Runs on from the CRC of what came before; 0 to begin with.
using Crc32 = std::uint32_t (*)(std::uint32_t crc, const unsigned char* data, std::size_t nbytes);

struct Crc32Method {
    const char* name;
    Crc32 run;
};

// The n-th way that this processor has, the fastest first; nullptr after the last.
const Crc32Method* crc32_method(int n);

// The fastest way.
inline std::uint32_t crc32(const unsigned char* data, std::size_t nbytes) {
    static const Crc32 run = crc32_method(0)->run;
    return run(0, data, nbytes);
}

std::uint32_t crc32_table(std::uint32_t crc, const unsigned char* data, std::size_t nbytes);
std::uint32_t crc32_armcrc(std::uint32_t crc, const unsigned char* data, std::size_t nbytes);
std::uint32_t crc32_pclmul(std::uint32_t crc, const unsigned char* data, std::size_t nbytes);

// x^n modulo the polynomial; the coefficient of x^d is bit 31 - d.
constexpr std::uint32_t crc32_power(int n) {
    std::uint32_t power = 0x80000000u;
    for (; n > 0; --n) power = (power >> 1) ^ (power & 1 ? 0xEDB88320u : 0u);
    return power;
}

}  // namespace aegis
