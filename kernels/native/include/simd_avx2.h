// f32x16 as two ymm registers.
#pragma once

#include <immintrin.h>

namespace aegis::avx2 {

struct f32x16 {
  __m256 lo, hi;
};
struct i32x16 {
  __m256i lo, hi;
};
struct mask16 {
  __m256 lo, hi;
};

AEGIS_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
AEGIS_INLINE f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
AEGIS_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
AEGIS_INLINE void store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
AEGIS_INLINE mask16 mask_first(int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i lo = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  const __m256i hi = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
  return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}
AEGIS_INLINE f32x16 load_first(const float* p, int n) {
  const mask16 m = mask_first(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)),
          _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
AEGIS_INLINE void store_first(float* p, f32x16 a, int n) {
  const mask16 m = mask_first(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), a.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), a.hi);
}
AEGIS_INLINE __m256 widen_bf16(const uint16_t* p) {
  const __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
AEGIS_INLINE f32x16 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
AEGIS_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}

AEGIS_INLINE f32x16 add(f32x16 a, f32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
AEGIS_INLINE f32x16 sub(f32x16 a, f32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
AEGIS_INLINE f32x16 mul(f32x16 a, f32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
AEGIS_INLINE f32x16 div(f32x16 a, f32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
AEGIS_INLINE f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
AEGIS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
AEGIS_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
AEGIS_INLINE f32x16 max(f32x16 a, f32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
AEGIS_INLINE f32x16 min(f32x16 a, f32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}

AEGIS_INLINE mask16 cmp_lt(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
AEGIS_INLINE mask16 cmp_le(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
}
AEGIS_INLINE mask16 cmp_gt(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)};
}
AEGIS_INLINE mask16 cmp_eq(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
AEGIS_INLINE mask16 cmp_unord(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q)};
}
AEGIS_INLINE uint32_t mask_bits(mask16 m) {
  return (uint32_t)_mm256_movemask_ps(m.lo) | ((uint32_t)_mm256_movemask_ps(m.hi) << 8);
}
AEGIS_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}

AEGIS_INLINE i32x16 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
AEGIS_INLINE i32x16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
AEGIS_INLINE i32x16 load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
AEGIS_INLINE i32x16 iload(const void* p) {
  const __m256i* q = (const __m256i*)p;
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
AEGIS_INLINE void istore(void* p, i32x16 a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)p + 1, a.hi);
}
AEGIS_INLINE i32x16 iadd(i32x16 a, i32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
AEGIS_INLINE i32x16 isub(i32x16 a, i32x16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
AEGIS_INLINE i32x16 iand(i32x16 a, i32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
AEGIS_INLINE i32x16 ior(i32x16 a, i32x16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
AEGIS_INLINE i32x16 ixor(i32x16 a, i32x16 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
template <int N>
AEGIS_INLINE i32x16 ishl(i32x16 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
AEGIS_INLINE i32x16 ishr(i32x16 a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
AEGIS_INLINE i32x16 isar(i32x16 a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
AEGIS_INLINE mask16 icmp_eq(i32x16 a, i32x16 b) {
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi))};
}
AEGIS_INLINE mask16 icmp_gt(i32x16 a, i32x16 b) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.lo, b.lo)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.hi, b.hi))};
}

AEGIS_INLINE i32x16 bits(f32x16 a) {
  return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
AEGIS_INLINE f32x16 as_float(i32x16 a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
AEGIS_INLINE i32x16 select(mask16 m, i32x16 a, i32x16 b) {
  return bits(select(m, as_float(a), as_float(b)));
}
AEGIS_INLINE f32x16 to_float(i32x16 a) {
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
AEGIS_INLINE f32x16 neg(f32x16 a) { return as_float(ixor(bits(a), iset1(INT32_MIN))); }
AEGIS_INLINE f32x16 abs(f32x16 a) { return as_float(iand(bits(a), iset1(INT32_MAX))); }
// vpermps reads 3 bits of the index; bit 3 chooses the half (blendv looks at the sign bit).
AEGIS_INLINE __m256 lookup16_half(f32x16 table, __m256i index) {
  const __m256 low = _mm256_permutevar8x32_ps(table.lo, index);
  const __m256 high = _mm256_permutevar8x32_ps(table.hi, index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
AEGIS_INLINE f32x16 lookup16(f32x16 table, i32x16 index) {
  return {lookup16_half(table, index.lo), lookup16_half(table, index.hi)};
}
AEGIS_INLINE f32x16 lookup8(f32x16 table, i32x16 index) {
  return {_mm256_permutevar8x32_ps(table.lo, index.lo),
          _mm256_permutevar8x32_ps(table.lo, index.hi)};
}

}  // namespace aegis::avx2
