// Turning the codes of il16 blocks into floats, exactly; how is up to each instruction set.
//
// A policy has `template <int N, class F> codes(words, stride, half, f)`. It calls f(k, a, b) for
// k = 0..31 with the codes of inputs k and 32 + k, 16 rows each, of N times 64 inputs that lie
// `stride` bytes apart; those of 32 + k lie `half` bytes behind those of k. Both belong to 2 N
// independent chains of the canonical sum: one chain waits for its last multiply-add, four keep the
// units busy.
#pragma once

#include "linear.h"
#include "simd.h"

#define AEGIS_LAMBDA __attribute__((always_inline))

namespace aegis::AEGIS_ISA {

template <int N>
struct Codes {
  f32x16 v[N];
};
template <int N>
struct Words {
  i32x16 v[N];
};

template <int N>
AEGIS_INLINE Words<N> load_words(const uint8_t* p, int64_t stride) {
  Words<N> w;
  for (int n = 0; n < N; ++n) {
    w.v[n] = iload(p + n * stride);
#if defined(AEGIS_ISA_AVX512)
    __asm__("" : "+v"(w.v[n].v));  // else g++ loads the word again for every shift
#endif
  }
  return w;
}

// Codes of BITS bits from bit SHIFT on: by one lookup where a permute does it (no mask, no
// conversion), else by conversion. Both are exact.
template <int BITS>
struct CodeTable {
#if defined(AEGIS_ISA_AVX512)
  f32x16 values;
  f32x16 halves;  // the same as 32 numbers of bf16, which is exact up to 8 bits
  AEGIS_INLINE CodeTable make() {
    float t[16];
    uint16_t h[32];
    for (int i = 0; i < 32; ++i) {
      const float code = (float)(i & ((1 << BITS) - 1));
      if (i < 16) t[i] = code;
      h[i] = (uint16_t)(__builtin_bit_cast(uint32_t, code) >> 16);
    }
    f32x16 v = load(t), w = load((const float*)h);
    __asm__("" : "+v"(v.v), "+v"(w.v));  // else g++ reads the tables from memory for every lookup
    return {v, w};
  }
#elif defined(AEGIS_ISA_AVX2)
  __m256 values;
  AEGIS_INLINE CodeTable make() {
    constexpr int most = (1 << BITS) - 1;
    __m256 v = _mm256_setr_ps(0, 1, 2, 3, 4 & most, 5 & most, 6 & most, 7 & most);
    __asm__("" : "+x"(v));
    return {v};
  }
#else
  AEGIS_INLINE CodeTable make() { return {}; }
#endif

  template <int SHIFT>
  __attribute__((always_inline)) f32x16 one(i32x16 word) const {
    const i32x16 low = SHIFT ? ishr<SHIFT>(word) : word;
#if defined(AEGIS_ISA_AVX512)
    if (BITS <= 4) return lookup16(values, low);
    if constexpr (BITS == 5) {
      if constexpr (SHIFT < 16) return lookup_high16(halves, ishl<16 - SHIFT>(word));
      return lookup_high16(halves, ishr<(SHIFT > 16 ? SHIFT - 16 : 0)>(word));
    }
#elif defined(AEGIS_ISA_AVX2)
    if (BITS <= 3)
      return {_mm256_permutevar8x32_ps(values, low.lo), _mm256_permutevar8x32_ps(values, low.hi)};
#endif
    return to_float(SHIFT + BITS == 32 ? low : iand(low, iset1((1 << BITS) - 1)));
  }

  template <int SHIFT, int N>
  __attribute__((always_inline)) Codes<N> get(Words<N> w) const {
    Codes<N> c;
    for (int n = 0; n < N; ++n) c.v[n] = one<SHIFT>(w.v[n]);
    return c;
  }

  // The code in the low bits of each half of a word. The high one needs no shift: a lookup of 16-bit
  // numbers leaves bf16 in the high half and zeros below, which is the f32.
  template <int N>
  __attribute__((always_inline)) Codes<N> low(Words<N> w) const {
    return get<0>(w);
  }
  template <int N>
  __attribute__((always_inline)) Codes<N> high(Words<N> w) const {
#if defined(AEGIS_ISA_AVX512)
    Codes<N> c;
    for (int n = 0; n < N; ++n) c.v[n] = lookup_high16(halves, w.v[n]);
    return c;
#else
    return get<16>(w);
#endif
  }
};

// Every word moved right.
template <int SHIFT, int N>
AEGIS_INLINE Words<N> shifted(Words<N> w) {
  Words<N> s;
  for (int n = 0; n < N; ++n) s.v[n] = SHIFT ? ishr<SHIFT>(w.v[n]) : w.v[n];
  return s;
}

// The bits of MASK from a, the others from b.
template <int MASK>
AEGIS_INLINE i32x16 pick(i32x16 a, i32x16 b) {
#if defined(AEGIS_ISA_AVX512)
  return {_mm512_ternarylogic_epi32(a.v, b.v, _mm512_set1_epi32(MASK), 0xE4)};
#else
  return ior(iand(a, iset1(MASK)), iand(b, iset1(~MASK)));
#endif
}

// Powers of two by their exponents plus 127; the least is a denormal float.
AEGIS_INLINE f32x16 load_e8m0(const uint8_t* p) {
  const i32x16 exponent = load_u8(p);
  return as_float(select(icmp_eq(exponent, izero()), iset1(1 << 22), ishl<23>(exponent)));
}

AEGIS_INLINE f32x16 load_number(const uint8_t* p, DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return load_bf16((const uint16_t*)p);
    case DType::f16:
      return load_f16((const uint16_t*)p);
    case DType::e8m0:
      return load_e8m0(p);
    default:
      return load((const float*)p);
  }
}

#if defined(AEGIS_ISA_AVX512)
constexpr int kGroupsAtOnce = 2;
#else
constexpr int kGroupsAtOnce = 1;  // a row block is two or four registers: chains enough
#endif

template <class Table>
struct Nibbles {
  static constexpr bool affine = true, scaled = false, sized = false;
  static constexpr int groups_at_once = kGroupsAtOnce;
  Table table = Table::make();

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, int64_t half,
                                            F f) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Words<N> a0 = load_words<N>(words + 64 * j, stride);
      const Words<N> b0 = load_words<N>(words + half + 64 * j, stride);
      const Words<N> a1 = shifted<4>(a0), b1 = shifted<4>(b0);
      const Words<N> a2 = shifted<8>(a0), b2 = shifted<8>(b0);
      const Words<N> a3 = shifted<12>(a0), b3 = shifted<12>(b0);
      f(8 * j + 0, table.low(a0), table.low(b0));
      f(8 * j + 1, table.low(a1), table.low(b1));
      f(8 * j + 2, table.low(a2), table.low(b2));
      f(8 * j + 3, table.low(a3), table.low(b3));
      f(8 * j + 4, table.high(a0), table.high(b0));
      f(8 * j + 5, table.high(a1), table.high(b1));
      f(8 * j + 6, table.high(a2), table.high(b2));
      f(8 * j + 7, table.high(a3), table.high(b3));
    }
  }
};
using Affine4 = Nibbles<CodeTable<4>>;

// Bits 15 of the three words as one code, bits 31 as another.
template <int N>
AEGIS_INLINE Words<N> spare3(const uint8_t* words, int64_t stride) {
  const Words<N> x = load_words<N>(words, stride);
  const Words<N> y = load_words<N>(words + 64, stride);
  const Words<N> z = load_words<N>(words + 128, stride);
  Words<N> w;
  for (int n = 0; n < N; ++n) {
    const i32x16 two = pick<0x10001>(ishr<15>(x.v[n]), ishr<14>(y.v[n]));
    w.v[n] = pick<0x40004>(ishr<13>(z.v[n]), two);
  }
  return w;
}

// Three words hold 30 codes, five to a 16-bit half, and in their bits 15 and 31 the last two.
struct Affine3 {
  static constexpr bool affine = true, scaled = false, sized = false;
  static constexpr int groups_at_once = kGroupsAtOnce;
  CodeTable<3> table = CodeTable<3>::make();

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, int64_t half,
                                            F f) const {
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) {
      const Words<N> a0 = load_words<N>(words + 64 * j, stride);
      const Words<N> b0 = load_words<N>(words + half + 64 * j, stride);
      const Words<N> a1 = shifted<3>(a0), b1 = shifted<3>(b0);
      const Words<N> a2 = shifted<6>(a0), b2 = shifted<6>(b0);
      const Words<N> a3 = shifted<9>(a0), b3 = shifted<9>(b0);
      const Words<N> a4 = shifted<12>(a0), b4 = shifted<12>(b0);
      f(10 * j + 0, table.low(a0), table.low(b0));
      f(10 * j + 1, table.low(a1), table.low(b1));
      f(10 * j + 2, table.low(a2), table.low(b2));
      f(10 * j + 3, table.low(a3), table.low(b3));
      f(10 * j + 4, table.low(a4), table.low(b4));
      f(10 * j + 5, table.high(a0), table.high(b0));
      f(10 * j + 6, table.high(a1), table.high(b1));
      f(10 * j + 7, table.high(a2), table.high(b2));
      f(10 * j + 8, table.high(a3), table.high(b3));
      f(10 * j + 9, table.high(a4), table.high(b4));
    }
    const Words<N> a = spare3<N>(words, stride), b = spare3<N>(words + half, stride);
    f(30, table.low(a), table.low(b));
    f(31, table.high(a), table.high(b));
  }
};

struct Affine8 {
  static constexpr bool affine = true, scaled = false, sized = false;
  static constexpr int groups_at_once = 1;
  CodeTable<8> table = CodeTable<8>::make();

  template <int SHIFT, int N, class F>
  __attribute__((always_inline)) void step(int k, Words<N> a, Words<N> b, F f) const {
    f(k + SHIFT / 8, table.get<SHIFT>(a), table.get<SHIFT>(b));
  }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, int64_t half,
                                            F f) const {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const Words<N> a = load_words<N>(words + 64 * j, stride);
      const Words<N> b = load_words<N>(words + half + 64 * j, stride);
      step<0>(4 * j, a, b, f);
      step<8>(4 * j, a, b, f);
      step<16>(4 * j, a, b, f);
      step<24>(4 * j, a, b, f);
    }
  }
};

template <DType D>
struct Dense {
  static constexpr bool affine = false, scaled = false, sized = false;
  static constexpr int groups_at_once = 1;
  static constexpr int row = D == DType::f32 ? 64 : 32;

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* numbers, int64_t stride, int64_t,
                                            F f) const {
#pragma GCC unroll 8
    for (int k = 0; k < 32; ++k) {
      Codes<N> a, b;
      for (int n = 0; n < N; ++n) {
        a.v[n] = load_number(numbers + n * stride + row * k, D);
        b.v[n] = load_number(numbers + n * stride + row * (k + 32), D);
      }
      f(k, a, b);
    }
  }
};

}  // namespace aegis::AEGIS_ISA
