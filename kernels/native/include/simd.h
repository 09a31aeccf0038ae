// A 16-lane float type with the same results on every instruction set.
//
// A translation unit defines exactly one AEGIS_ISA_* macro. Everything lives in a namespace named
// after it and is static, so the linker can never merge code compiled for different processors.
// NaN rule of max and min is that of x86: a NaN in either argument yields the second one.
#pragma once

#include <stdint.h>
#include <string.h>

#define AEGIS_INLINE static inline __attribute__((always_inline))

#if defined(AEGIS_ISA_AVX512)
#define AEGIS_ISA avx512
#include "simd_avx512.h"
#elif defined(AEGIS_ISA_AVX2)
#define AEGIS_ISA avx2
#include "simd_avx2.h"
#elif defined(AEGIS_ISA_NEON)
#define AEGIS_ISA neon
#include "simd_neon.h"
#elif defined(AEGIS_ISA_SCALAR)
#define AEGIS_ISA scalar
#include "simd_scalar.h"
#else
#error "define one of AEGIS_ISA_AVX512, AEGIS_ISA_AVX2, AEGIS_ISA_NEON, AEGIS_ISA_SCALAR"
#endif

namespace aegis::AEGIS_ISA {

AEGIS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
AEGIS_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }  // no nearer than L2

AEGIS_INLINE float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

AEGIS_INLINE float float_of_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

AEGIS_INLINE uint32_t bits_of_float(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

// Sum of the lanes by the one tree: lane i with i+8, then i+4, i+2, i+1.
AEGIS_INLINE float reduce_add(f32x16 v) {
  float t[16];
  store(t, v);
  for (int step = 8; step > 0; step >>= 1)
    for (int i = 0; i < step; ++i) t[i] = t[i] + t[i + step];
  return t[0];
}

AEGIS_INLINE float reduce_max(f32x16 v) {
  float t[16];
  store(t, v);
  for (int step = 8; step > 0; step >>= 1)
    for (int i = 0; i < step; ++i) t[i] = t[i] > t[i + step] ? t[i] : t[i + step];
  return t[0];
}

}  // namespace aegis::AEGIS_ISA
