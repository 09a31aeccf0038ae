// Turning the codes of il16 blocks into floats, exactly; how is up to each instruction set.
//
// A policy has `template <int N, class F> codes(words, stride, f)`. It calls f(k, a, b) for
// k = 0..31 with the codes of inputs k and 32 + k of N blocks that lie `stride` bytes apart, 16 rows
// each. Inputs k and 32 + k of each block belong to 2 N independent chains of the canonical sum: one
// chain waits for its last multiply-add, four keep the units busy.
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
  AEGIS_INLINE CodeTable make() {
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = (float)(i & ((1 << BITS) - 1));
    f32x16 v = load(t);
    __asm__("" : "+v"(v.v));  // else g++ reads the table from memory for every lookup
    return {v};
  }
#elif defined(AEGIS_ISA_AVX2)
  __m256 values;
  AEGIS_INLINE CodeTable make() {
    __m256 v = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
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
#elif defined(AEGIS_ISA_AVX2)
    if (BITS == 3)
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
};

// The bits of MASK from a, the others from b.
template <int MASK>
AEGIS_INLINE i32x16 pick(i32x16 a, i32x16 b) {
#if defined(AEGIS_ISA_AVX512)
  return {_mm512_ternarylogic_epi32(a.v, b.v, _mm512_set1_epi32(MASK), 0xE4)};
#else
  return ior(iand(a, iset1(MASK)), iand(b, iset1(~MASK)));
#endif
}

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

#if defined(AEGIS_ISA_AVX512)
constexpr int kGroupsAtOnce = 2;
#else
constexpr int kGroupsAtOnce = 1;  // a row block is two or four registers: chains enough
#endif

struct Affine4 {
  static constexpr bool affine = true;
  static constexpr int groups_at_once = kGroupsAtOnce;
  CodeTable<4> table = CodeTable<4>::make();

  template <int SHIFT, int N, class F>
  __attribute__((always_inline)) void step(int k, Words<N> a, Words<N> b, F f) const {
    f(k + SHIFT / 4, table.get<SHIFT>(a), table.get<SHIFT>(b));
  }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, F f) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Words<N> a = load_words<N>(words + 64 * j, stride);
      const Words<N> b = load_words<N>(words + 64 * (j + 4), stride);
      step<0>(8 * j, a, b, f);
      step<4>(8 * j, a, b, f);
      step<8>(8 * j, a, b, f);
      step<12>(8 * j, a, b, f);
      step<16>(8 * j, a, b, f);
      step<20>(8 * j, a, b, f);
      step<24>(8 * j, a, b, f);
      step<28>(8 * j, a, b, f);
    }
  }
};

// Three words hold 30 codes, five to a 16-bit half, and in their bits 15 and 31 the last two.
struct Affine3 {
  static constexpr bool affine = true;
  static constexpr int groups_at_once = kGroupsAtOnce;
  CodeTable<3> table = CodeTable<3>::make();

  template <int SHIFT, int N, class F>
  __attribute__((always_inline)) void step(int k, Words<N> a, Words<N> b, F f) const {
    f(k + (SHIFT < 16 ? SHIFT / 3 : 5 + (SHIFT - 16) / 3), table.get<SHIFT>(a), table.get<SHIFT>(b));
  }

  // Bit 0 from bit FIRST of x, bit 1 from SECOND of y, bit 2 from THIRD of z.
  template <int FIRST, int SECOND, int THIRD, int N>
  __attribute__((always_inline)) Codes<N> spare(Words<N> x, Words<N> y, Words<N> z) const {
    Words<N> w;
    for (int n = 0; n < N; ++n) {
      const i32x16 low = pick<1>(ishr<FIRST>(x.v[n]), ishr<SECOND - 1>(y.v[n]));
      w.v[n] = pick<4>(ishr<THIRD - 2>(z.v[n]), low);
    }
    return table.get<0>(w);
  }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, F f) const {
    Words<N> a[3], b[3];
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) {
      a[j] = load_words<N>(words + 64 * j, stride);
      b[j] = load_words<N>(words + 64 * (j + 3), stride);
      step<0>(10 * j, a[j], b[j], f);
      step<3>(10 * j, a[j], b[j], f);
      step<6>(10 * j, a[j], b[j], f);
      step<9>(10 * j, a[j], b[j], f);
      step<12>(10 * j, a[j], b[j], f);
      step<16>(10 * j, a[j], b[j], f);
      step<19>(10 * j, a[j], b[j], f);
      step<22>(10 * j, a[j], b[j], f);
      step<25>(10 * j, a[j], b[j], f);
      step<28>(10 * j, a[j], b[j], f);
    }
    f(30, spare<15, 31, 15>(a[0], a[0], a[1]), spare<15, 31, 15>(b[0], b[0], b[1]));
    f(31, spare<31, 15, 31>(a[1], a[2], a[2]), spare<31, 15, 31>(b[1], b[2], b[2]));
  }
};

struct Affine8 {
  static constexpr bool affine = true;
  static constexpr int groups_at_once = 1;
  CodeTable<8> table = CodeTable<8>::make();

  template <int SHIFT, int N, class F>
  __attribute__((always_inline)) void step(int k, Words<N> a, Words<N> b, F f) const {
    f(k + SHIFT / 8, table.get<SHIFT>(a), table.get<SHIFT>(b));
  }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, F f) const {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const Words<N> a = load_words<N>(words + 64 * j, stride);
      const Words<N> b = load_words<N>(words + 64 * (j + 8), stride);
      step<0>(4 * j, a, b, f);
      step<8>(4 * j, a, b, f);
      step<16>(4 * j, a, b, f);
      step<24>(4 * j, a, b, f);
    }
  }
};

template <DType D>
struct Dense {
  static constexpr bool affine = false;
  static constexpr int groups_at_once = 1;
  static constexpr int row = D == DType::f32 ? 64 : 32;

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* numbers, int64_t stride, F f) const {
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
