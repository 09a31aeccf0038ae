// One row of a table stored in il16 blocks, as floats.
#pragma once

#include "attention.h"
#include "mxfp4.h"
#include "vmath.h"

namespace aegis::AEGIS_ISA {

AEGIS_INLINE uint32_t lane_word(const uint8_t* words, int j, int lane) {
  uint32_t w;
  memcpy(&w, words + (16 * j + lane) * 4, 4);
  return w;
}

// The number of lane `lane` in 16 stored numbers.
AEGIS_INLINE float lane_number(const uint8_t* numbers, int lane, DType dtype) {
  float t[16];
  store(t, load_number(numbers, dtype));
  return t[lane];
}

// The first `count` codes of a row's stream of bits.
template <int BITS>
AEGIS_INLINE void lane_codes(const uint8_t* words, int lane, int count, float* codes) {
  for (int k = 0; k < count; ++k) {
    const int word = BITS * k / 32, shift = BITS * k % 32;
    uint32_t code = lane_word(words, word, lane) >> shift;
    if (shift + BITS > 32) code |= lane_word(words, word + 1, lane) << (32 - shift);
    codes[k] = (float)(int32_t)(code & ((1u << BITS) - 1));
  }
}

// 32 codes of 3 bits at a time: five in each 16-bit half word, the last two of 32 in the spare bits, one over
// the low halves of three words, one over the high halves.
AEGIS_INLINE void lane_codes3(const uint8_t* words, int lane, int count, float* codes) {
  for (int h = 0; h < count / 32; ++h) {
    uint32_t spare = 0;
    for (int half = 0; half < 6; ++half) {
      const uint32_t bits16 = lane_word(words, 3 * h + half / 2, lane) >> (16 * (half % 2));
      for (int i = 0; i < 5; ++i)
        codes[32 * h + 5 * half + i] = (float)(int32_t)(bits16 >> (3 * i) & 7);
      spare |= (bits16 >> 15 & 1) << (3 * (half % 2) + half / 2);
    }
    codes[32 * h + 30] = (float)(int32_t)(spare & 7);
    codes[32 * h + 31] = (float)(int32_t)(spare >> 3);
  }
}

AEGIS_INLINE void lane_codes_of(Kind kind, const uint8_t* words, int lane, int count, float* codes) {
  switch (kind) {
    case Kind::affine2:
      return lane_codes<2>(words, lane, count, codes);
    case Kind::affine3:
      return lane_codes3(words, lane, count, codes);
    case Kind::affine4:
    case Kind::mxfp4:
      return lane_codes<4>(words, lane, count, codes);
    case Kind::affine5:
      return lane_codes<5>(words, lane, count, codes);
    case Kind::affine6:
      return lane_codes<6>(words, lane, count, codes);
    case Kind::affine8:
      return lane_codes<8>(words, lane, count, codes);
    case Kind::dense:
      break;
  }
}

static void table_row(const LinearDesc& format, const uint8_t* row_block, int lane, float* out) {
  const int64_t number = format.number_nbytes(), blocks = format.in_features / format.group_size;
  const int width = (int)format.group_size;
  for (int64_t g = 0; g < blocks; ++g, out += width) {
    const uint8_t* block = row_block + g * format.block_nbytes();
    if (format.kind == Kind::dense) {
      for (int k = 0; k < width; ++k)
        out[k] = lane_number(block + k * kLanes * number, lane, format.dtype);
      continue;
    }
    float codes[kMostGroup];
    lane_codes_of(format.kind, block + 2 * kLanes * number, lane, width, codes);
    const f32x16 scale = set1(lane_number(block, lane, format.dtype));
    const f32x16 second = set1(lane_number(block + kLanes * number, lane, format.dtype));
    if (format.kind == Kind::mxfp4) {
      for (int k = 0; k < width; ++k) codes[k] = kE2M1[(int)codes[k]];
      for (int k = 0; k < width; k += 16)
        store(out + k, mul(k < width / 2 ? scale : second, load(codes + k)));
      continue;
    }
    for (int k = 0; k < width; k += 16) store(out + k, fma(scale, load(codes + k), second));
  }
}

}  // namespace aegis::AEGIS_ISA
