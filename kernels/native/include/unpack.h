// Turning the codes of one il16 block into floats, exactly; how is up to each instruction set.
//
// A policy W has `template <class F> codes(block, f)`, which calls f(k, a, b) for k = 0..31 with
// the codes of inputs k and 32 + k, 16 rows each. Inputs k and 32 + k belong to the two chains of
// the canonical sum, so a kernel that uses them as they come has two independent chains.
#pragma once

#include "linear.h"
#include "simd.h"

#define AEGIS_LAMBDA __attribute__((always_inline))

namespace aegis::AEGIS_ISA {

// Codes by lookup where one permute does it, else by conversion; both are exact.
struct CodeTable {
#if defined(AEGIS_ISA_AVX512)
  f32x16 values;
  AEGIS_INLINE CodeTable make(int mask) {
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = (float)(i & mask);
    return {load(t)};
  }
  template <int SHIFT>
  __attribute__((always_inline)) f32x16 get(i32x16 word, int) const {
    return lookup16(values, ishr<SHIFT>(word));
  }
  __attribute__((always_inline)) f32x16 get0(i32x16 word, int) const {
    return lookup16(values, word);
  }
#else
  AEGIS_INLINE CodeTable make(int) { return {}; }
  template <int SHIFT>
  __attribute__((always_inline)) f32x16 get(i32x16 word, int mask) const {
    return to_float(iand(ishr<SHIFT>(word), iset1(mask)));
  }
  __attribute__((always_inline)) f32x16 get0(i32x16 word, int mask) const {
    return to_float(iand(word, iset1(mask)));
  }
#endif
};

AEGIS_INLINE f32x16 load_number(const uint8_t* p, DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return load_bf16((const uint16_t*)p);
    case DType::f16:
      return load_f16((const uint16_t*)p);
    default:
      return load((const float*)p);
  }
}

struct Affine4 {
  static constexpr bool affine = true;
  CodeTable table = CodeTable::make(15);

  template <class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, F f) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const i32x16 a = iload(words + 64 * j);
      const i32x16 b = iload(words + 64 * (j + 4));
      const int k = 8 * j;
      f(k, table.get0(a, 15), table.get0(b, 15));
      f(k + 1, table.get<4>(a, 15), table.get<4>(b, 15));
      f(k + 2, table.get<8>(a, 15), table.get<8>(b, 15));
      f(k + 3, table.get<12>(a, 15), table.get<12>(b, 15));
      f(k + 4, table.get<16>(a, 15), table.get<16>(b, 15));
      f(k + 5, table.get<20>(a, 15), table.get<20>(b, 15));
      f(k + 6, table.get<24>(a, 15), table.get<24>(b, 15));
      f(k + 7, table.get<28>(a, 15), table.get<28>(b, 15));
    }
  }
};

struct Affine3 {
  static constexpr bool affine = true;
  CodeTable table = CodeTable::make(7);

  // Bit 0 from bit FIRST of x, bit 1 from SECOND of y, bit 2 from THIRD of z.
  template <int FIRST, int SECOND, int THIRD>
  __attribute__((always_inline)) f32x16 spare(i32x16 x, i32x16 y, i32x16 z) const {
    const i32x16 low = iand(ishr<FIRST>(x), iset1(1));
    const i32x16 middle = iand(ishr<SECOND - 1>(y), iset1(2));
    const i32x16 high = iand(ishr<THIRD - 2>(z), iset1(4));
    return table.get0(ior(ior(low, middle), high), 7);
  }

  template <class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, F f) const {
    i32x16 a[3], b[3];
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) {
      a[j] = iload(words + 64 * j);
      b[j] = iload(words + 64 * (j + 3));
      const int k = 10 * j;
      f(k, table.get0(a[j], 7), table.get0(b[j], 7));
      f(k + 1, table.get<3>(a[j], 7), table.get<3>(b[j], 7));
      f(k + 2, table.get<6>(a[j], 7), table.get<6>(b[j], 7));
      f(k + 3, table.get<9>(a[j], 7), table.get<9>(b[j], 7));
      f(k + 4, table.get<12>(a[j], 7), table.get<12>(b[j], 7));
      f(k + 5, table.get<16>(a[j], 7), table.get<16>(b[j], 7));
      f(k + 6, table.get<19>(a[j], 7), table.get<19>(b[j], 7));
      f(k + 7, table.get<22>(a[j], 7), table.get<22>(b[j], 7));
      f(k + 8, table.get<25>(a[j], 7), table.get<25>(b[j], 7));
      f(k + 9, table.get<28>(a[j], 7), table.get<28>(b[j], 7));
    }
    f(30, spare<15, 31, 15>(a[0], a[0], a[1]), spare<15, 31, 15>(b[0], b[0], b[1]));
    f(31, spare<31, 15, 31>(a[1], a[2], a[2]), spare<31, 15, 31>(b[1], b[2], b[2]));
  }
};

struct Affine8 {
  static constexpr bool affine = true;

  template <int SHIFT>
  AEGIS_INLINE f32x16 byte(i32x16 word) {
    return to_float(iand(ishr<SHIFT>(word), iset1(255)));
  }

  template <class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, F f) const {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const i32x16 a = iload(words + 64 * j);
      const i32x16 b = iload(words + 64 * (j + 8));
      const int k = 4 * j;
      f(k, to_float(iand(a, iset1(255))), to_float(iand(b, iset1(255))));
      f(k + 1, byte<8>(a), byte<8>(b));
      f(k + 2, byte<16>(a), byte<16>(b));
      f(k + 3, to_float(ishr<24>(a)), to_float(ishr<24>(b)));
    }
  }
};

template <DType D>
struct Dense {
  static constexpr bool affine = false;
  static constexpr int row = D == DType::f32 ? 64 : 32;

  template <class F>
  __attribute__((always_inline)) void codes(const uint8_t* numbers, F f) const {
#pragma GCC unroll 8
    for (int k = 0; k < 32; ++k)
      f(k, load_number(numbers + row * k, D), load_number(numbers + row * (k + 32), D));
  }
};

}  // namespace aegis::AEGIS_ISA
