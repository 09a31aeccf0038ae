// exp, sigmoid, silu, softplus, sine and cosine from IEEE operations only: the same bits on every processor,
// which libm does not promise.
#pragma once

#include "simd.h"

namespace aegis::AEGIS_ISA {

// 2^n for n in [-126, 127], from n's two's complement bits.
AEGIS_INLINE f32x16 pow2(i32x16 n) { return as_float(ishl<23>(iadd(n, iset1(127)))); }

// e^x within 1.1 ulp. +inf gives +inf, -inf gives 0, NaN stays NaN, denormal results are kept.
AEGIS_INLINE f32x16 exp(f32x16 x) {
  // Constants come first in max and min, so a NaN in x passes through.
  x = min(set1(89.0f), max(set1(-104.0f), x));
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
  const f32x16 magic = set1(12582912.0f);
  const f32x16 shifted = fma(x, set1(1.44269504088896341f), magic);
  const f32x16 n = sub(shifted, magic);
  const i32x16 exponent = isub(bits(shifted), bits(magic));
  f32x16 r = fnma(n, set1(0.693145751953125f), x);
  r = fnma(n, set1(1.42860682030941723e-6f), r);
  f32x16 p = set1(1.98412698e-4f);
  p = fma(p, r, set1(1.38888889e-3f));
  p = fma(p, r, set1(8.33333333e-3f));
  p = fma(p, r, set1(4.16666667e-2f));
  p = fma(p, r, set1(1.66666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  // Two factors, so that results from denormal to infinite round once and correctly.
  const i32x16 half = isar<1>(exponent);
  return mul(mul(p, pow2(half)), pow2(isub(exponent, half)));
}

AEGIS_INLINE float exp1(float x) {
  float t[16];
  store(t, exp(set1(x)));
  return t[0];
}

// 1 / (1 + e^-x)
AEGIS_INLINE f32x16 sigmoid(f32x16 x) {
  const f32x16 one = set1(1.0f);
  return div(one, add(one, exp(neg(x))));
}

AEGIS_INLINE float sigmoid1(float x) {
  float t[16];
  store(t, sigmoid(set1(x)));
  return t[0];
}

// x / (1 + e^-x); -inf gives -0, its limit, because the dividend is kept finite.
AEGIS_INLINE f32x16 silu(f32x16 x) {
  const f32x16 dividend = max(set1(-3.40282347e38f), x);
  return div(dividend, add(set1(1.0f), exp(neg(x))));
}

AEGIS_INLINE float silu1(float x) {
  float t[16];
  store(t, silu(set1(x)));
  return t[0];
}

// log(1 + e^x) within 1.5 ulp: log(1 + u) of u <= 1 is 2 atanh(u / (2 + u)), whose series is summed in
// double.
AEGIS_INLINE float softplus1(float x) {
  const double u = (double)exp1(x > 0.0f ? -x : x);
  const double s = u / (2.0 + u);
  const double z = s * s;
  double p = 1.0 / 21.0;
  p = __builtin_fma(p, z, 1.0 / 19.0);
  p = __builtin_fma(p, z, 1.0 / 17.0);
  p = __builtin_fma(p, z, 1.0 / 15.0);
  p = __builtin_fma(p, z, 1.0 / 13.0);
  p = __builtin_fma(p, z, 1.0 / 11.0);
  p = __builtin_fma(p, z, 1.0 / 9.0);
  p = __builtin_fma(p, z, 1.0 / 7.0);
  p = __builtin_fma(p, z, 1.0 / 5.0);
  p = __builtin_fma(p, z, 1.0 / 3.0);
  p = __builtin_fma(p, z, 1.0);
  return (float)((x > 0.0f ? (double)x : 0.0) + 2.0 * s * p);
}

// Sine and cosine of a float, reduced and evaluated in double: below 1 ulp for |x| < 2^30.
AEGIS_INLINE void sincos1(float x, float* sine, float* cosine) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: rounds to integer, kept in the low bits
  const double shifted = __builtin_fma((double)x, 0.63661977236758134308, magic);
  const double n = shifted - magic;
  double r = __builtin_fma(-n, 1.57079632679489655800, (double)x);
  r = __builtin_fma(-n, 6.12323399573676603587e-17, r);
  const double z = r * r;
  double s = -2.50507602534068634195e-8;
  s = __builtin_fma(s, z, 2.75573137070700676789e-6);
  s = __builtin_fma(s, z, -1.98412698298579493134e-4);
  s = __builtin_fma(s, z, 8.33333333332248946124e-3);
  s = __builtin_fma(s, z, -1.66666666666666324348e-1);
  s = __builtin_fma(s * z, r, r);
  double c = 2.08757232129817482790e-9;
  c = __builtin_fma(c, z, -2.75573143513906633035e-7);
  c = __builtin_fma(c, z, 2.48015872894767294178e-5);
  c = __builtin_fma(c, z, -1.38888888888741095749e-3);
  c = __builtin_fma(c, z, 4.16666666666666019037e-2);
  c = __builtin_fma(c, z, -0.5);
  c = __builtin_fma(c, z, 1.0);
  uint64_t quadrant;
  memcpy(&quadrant, &shifted, 8);
  const float sf = (float)s;
  const float cf = (float)c;
  *sine = quadrant & 1 ? cf : sf;
  *cosine = quadrant & 1 ? sf : cf;
  if (quadrant & 2) *sine = -*sine;
  if ((quadrant + 1) & 2) *cosine = -*cosine;
}

}  // namespace aegis::AEGIS_ISA
