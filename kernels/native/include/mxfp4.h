// Codes of mxfp4, floats of 2 exponent bits and 1 mantissa bit, by one lookup.
#pragma once

#include "unpack.h"

namespace aegis::AEGIS_ISA {

alignas(64) static constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// What CodeTable is for whole numbers; only the low four bits of a word or half word count.
struct E2M1Table {
  f32x16 values;
#if defined(AEGIS_ISA_AVX512)
  f32x16 halves;  // twice the same as numbers of bf16, which is exact
#endif

  AEGIS_INLINE E2M1Table make() {
    f32x16 v = load(kE2M1);
#if defined(AEGIS_ISA_AVX512)
    uint16_t h[32];
    for (int i = 0; i < 32; ++i) h[i] = (uint16_t)(bits_of_float(kE2M1[i % 16]) >> 16);
    f32x16 w = load((const float*)h);
    __asm__("" : "+v"(v.v), "+v"(w.v));  // else g++ reads the tables from memory for every lookup
    return {v, w};
#else
    return {v};
#endif
  }

  template <int N>
  __attribute__((always_inline)) Codes<N> low(Words<N> w) const {
    Codes<N> c;
    for (int n = 0; n < N; ++n) c.v[n] = lookup16(values, w.v[n]);
    return c;
  }
  template <int N>
  __attribute__((always_inline)) Codes<N> high(Words<N> w) const {
#if defined(AEGIS_ISA_AVX512)
    Codes<N> c;
    for (int n = 0; n < N; ++n) c.v[n] = lookup_high16(halves, w.v[n]);
    return c;
#else
    return low(shifted<16>(w));
#endif
  }
};

using Mxfp4 = Nibbles<E2M1Table>;

// Whether each of a block's two chains has a scale of its own, and there is no bias.
template <class W>
constexpr bool kScalePerChain = false;
template <>
constexpr bool kScalePerChain<Mxfp4> = true;

}  // namespace aegis::AEGIS_ISA
