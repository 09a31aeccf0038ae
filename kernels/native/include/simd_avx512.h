// f32x16 as one zmm register.
#pragma once

#include <immintrin.h>

namespace aegis::avx512 {

struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};
struct mask16 {
  __mmask16 v;
};

AEGIS_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
AEGIS_INLINE f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
AEGIS_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
AEGIS_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
AEGIS_INLINE mask16 mask_first(int n) {
  return {(__mmask16)(n >= 16 ? 0xFFFFu : n <= 0 ? 0u : (1u << n) - 1u)};
}
AEGIS_INLINE f32x16 load_first(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(mask_first(n).v, p)};
}
AEGIS_INLINE void store_first(float* p, f32x16 a, int n) {
  _mm512_mask_storeu_ps(p, mask_first(n).v, a.v);
}
AEGIS_INLINE f32x16 load_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256((const __m256i*)p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
AEGIS_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}

AEGIS_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
AEGIS_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
AEGIS_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
AEGIS_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
AEGIS_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
AEGIS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
AEGIS_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
AEGIS_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
AEGIS_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }

AEGIS_INLINE mask16 cmp_lt(f32x16 a, f32x16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
}
AEGIS_INLINE mask16 cmp_le(f32x16 a, f32x16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)};
}
AEGIS_INLINE mask16 cmp_gt(f32x16 a, f32x16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)};
}
AEGIS_INLINE mask16 cmp_eq(f32x16 a, f32x16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)};
}
AEGIS_INLINE mask16 cmp_unord(f32x16 a, f32x16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)};
}
AEGIS_INLINE uint32_t mask_bits(mask16 m) { return m.v; }
AEGIS_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm512_mask_blend_ps(m.v, b.v, a.v)};
}

AEGIS_INLINE i32x16 izero() { return {_mm512_setzero_si512()}; }
AEGIS_INLINE i32x16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
AEGIS_INLINE i32x16 load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))};
}
AEGIS_INLINE i32x16 iload(const void* p) { return {_mm512_loadu_si512(p)}; }
AEGIS_INLINE void istore(void* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
AEGIS_INLINE i32x16 iadd(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
AEGIS_INLINE i32x16 isub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
AEGIS_INLINE i32x16 iand(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
AEGIS_INLINE i32x16 ior(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
AEGIS_INLINE i32x16 ixor(i32x16 a, i32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
AEGIS_INLINE i32x16 ishl(i32x16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
AEGIS_INLINE i32x16 ishr(i32x16 a) {
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
AEGIS_INLINE i32x16 isar(i32x16 a) {
  return {_mm512_srai_epi32(a.v, N)};
}
AEGIS_INLINE mask16 icmp_eq(i32x16 a, i32x16 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
AEGIS_INLINE mask16 icmp_gt(i32x16 a, i32x16 b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
AEGIS_INLINE i32x16 select(mask16 m, i32x16 a, i32x16 b) {
  return {_mm512_mask_blend_epi32(m.v, b.v, a.v)};
}

AEGIS_INLINE i32x16 bits(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
AEGIS_INLINE f32x16 as_float(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
AEGIS_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
AEGIS_INLINE f32x16 neg(f32x16 a) { return as_float(ixor(bits(a), iset1(INT32_MIN))); }
AEGIS_INLINE f32x16 abs(f32x16 a) { return as_float(iand(bits(a), iset1(INT32_MAX))); }
AEGIS_INLINE f32x16 lookup16(f32x16 table, i32x16 index) {
  return {_mm512_permutexvar_ps(index.v, table.v)};
}
// Of a table of 32 numbers of 16 bits, those that the low five bits of each lane's high half name,
// in the high half over zeros.
AEGIS_INLINE f32x16 lookup_high16(f32x16 table, i32x16 index) {
  return as_float({_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, index.v, bits(table).v)});
}
AEGIS_INLINE f32x16 lookup8(f32x16 table, i32x16 index) { return lookup16(table, index); }

}  // namespace aegis::avx512
