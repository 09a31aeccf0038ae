// The portable CRC-32, and the choice between it and the processor's own ways.
#include "crc32.h"

#include <array>

#if defined(AEGIS_HAVE_ARMCRC) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace aegis {

namespace {

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// table[k][b]: what a byte b does to the CRC when k more bytes follow it.
constexpr Table make_table() {
    Table table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320u : 0u);
        table[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = table[k - 1][byte];
            table[k][byte] = (before >> 8) ^ table[0][before & 255];
        }
    }
    return table;
}

constexpr Table kTable = make_table();

std::uint32_t little_endian(const unsigned char* data) {
    return data[0] | std::uint32_t{data[1]} << 8 | std::uint32_t{data[2]} << 16 |
           std::uint32_t{data[3]} << 24;
}

#if defined(AEGIS_HAVE_PCLMUL)
bool has_pclmul() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
#elif defined(AEGIS_HAVE_ARMCRC) && defined(__linux__)
constexpr unsigned long kHwcapCrc32 = 1 << 7;

bool has_armcrc() { return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0; }
#elif defined(AEGIS_HAVE_ARMCRC)
bool has_armcrc() { return true; }  // every Apple processor
#endif

}  // namespace

std::uint32_t crc32_table(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    crc = ~crc;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        const std::uint32_t low = crc ^ little_endian(data), high = little_endian(data + 4);
        crc = kTable[7][low & 255] ^ kTable[6][low >> 8 & 255] ^ kTable[5][low >> 16 & 255] ^
              kTable[4][low >> 24] ^ kTable[3][high & 255] ^ kTable[2][high >> 8 & 255] ^
              kTable[1][high >> 16 & 255] ^ kTable[0][high >> 24];
    }
    for (; nbytes > 0; ++data, --nbytes) crc = (crc >> 8) ^ kTable[0][(crc ^ *data) & 255];
    return ~crc;
}

const Crc32Method* crc32_method(int n) {
    static const Crc32Method table{"table", crc32_table};
#if defined(AEGIS_HAVE_PCLMUL)
    static const Crc32Method pclmul{"pclmul", crc32_pclmul};
    if (has_pclmul() && n-- == 0) return &pclmul;
#elif defined(AEGIS_HAVE_ARMCRC)
    static const Crc32Method armcrc{"armcrc", crc32_armcrc};
    if (has_armcrc() && n-- == 0) return &armcrc;
#endif
    return n == 0 ? &table : nullptr;
}

}  // namespace aegis
