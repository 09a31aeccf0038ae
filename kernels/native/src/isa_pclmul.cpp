// CRC-32 by carry-less multiplication. A block of 16 bytes that d bits follow is worth itself times
// x^d; modulo the polynomial that is again 16 bytes, which are added to the block d bits further on.
#include "crc32.h"

#include <immintrin.h>

namespace aegis {

namespace {

// Bits are reflected, so the low half of a block holds the higher powers, and the product of two
// reflected halves comes out one power too high.
__m128i factors(std::uint32_t low_half, std::uint32_t high_half) {
    return _mm_set_epi64x(static_cast<long long>(std::uint64_t{high_half} << 32),
                          static_cast<long long>(std::uint64_t{low_half} << 32));
}

__m128i fold(__m128i block, __m128i by, __m128i onto) {
    const __m128i low = _mm_clmulepi64_si128(block, by, 0x00);
    const __m128i high = _mm_clmulepi64_si128(block, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

__m128i load(const unsigned char* data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

}  // namespace

std::uint32_t crc32_pclmul(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    if (nbytes < 64) return crc32_table(crc, data, nbytes);
    constexpr std::uint32_t far_low = crc32_power(512 + 63), far_high = crc32_power(512 - 1);
    constexpr std::uint32_t near_low = crc32_power(128 + 63), near_high = crc32_power(128 - 1);
    const __m128i by_512 = factors(far_low, far_high), by_128 = factors(near_low, near_high);

    // The state so far is added to the first four bytes.
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(~crc)));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
    for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64) {
        a = fold(a, by_512, load(data));
        b = fold(b, by_512, load(data + 16));
        c = fold(c, by_512, load(data + 32));
        d = fold(d, by_512, load(data + 48));
    }
    a = fold(fold(fold(a, by_128, b), by_128, c), by_128, d);
    for (; nbytes >= 16; data += 16, nbytes -= 16) a = fold(a, by_128, load(data));

    // What is left is a message of 16 bytes with the same CRC, from a state of zero.
    alignas(16) unsigned char rest[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(rest), a);
    return crc32_table(crc32_table(~0u, rest, sizeof rest), data, nbytes);
}

}  // namespace aegis
