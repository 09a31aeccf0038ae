// CRC-32 with Arm's instructions for it.
#include "crc32.h"

#include <arm_acle.h>
#include <cstring>

namespace aegis {

std::uint32_t crc32_armcrc(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    crc = ~crc;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, data, sizeof word);
        crc = __crc32d(crc, word);
    }
    for (; nbytes > 0; ++data, --nbytes) crc = __crc32b(crc, *data);
    return ~crc;
}

}  // namespace aegis
