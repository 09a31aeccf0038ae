// f32x16 as four 128-bit registers.
#pragma once

#include <arm_neon.h>

namespace aegis::neon {

struct f32x16 {
  float32x4_t v[4];
};
struct i32x16 {
  int32x4_t v[4];
};
struct mask16 {
  uint32x4_t v[4];
};

#define AEGIS_QUADS(TYPE, EXPRESSION)                \
  TYPE r;                                            \
  for (int q = 0; q < 4; ++q) r.v[q] = (EXPRESSION); \
  return r

AEGIS_INLINE f32x16 zero() { AEGIS_QUADS(f32x16, vdupq_n_f32(0.0f)); }
AEGIS_INLINE f32x16 set1(float x) { AEGIS_QUADS(f32x16, vdupq_n_f32(x)); }
AEGIS_INLINE f32x16 load(const float* p) { AEGIS_QUADS(f32x16, vld1q_f32(p + 4 * q)); }
AEGIS_INLINE void store(float* p, f32x16 a) {
  for (int q = 0; q < 4; ++q) vst1q_f32(p + 4 * q, a.v[q]);
}
AEGIS_INLINE mask16 mask_first(int n) {
  const int32_t lanes[4] = {0, 1, 2, 3};
  const int32x4_t lane = vld1q_s32(lanes);
  AEGIS_QUADS(mask16, vcgtq_s32(vdupq_n_s32(n - 4 * q), lane));
}
AEGIS_INLINE f32x16 load_first(const float* p, int n) {
  float t[16] = {0};
  for (int i = 0; i < 16 && i < n; ++i) t[i] = p[i];
  return load(t);
}
AEGIS_INLINE void store_first(float* p, f32x16 a, int n) {
  float t[16];
  store(t, a);
  for (int i = 0; i < 16 && i < n; ++i) p[i] = t[i];
}
AEGIS_INLINE f32x16 load_bf16(const uint16_t* p) {
  AEGIS_QUADS(f32x16, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * q), 16)));
}
AEGIS_INLINE f32x16 load_f16(const uint16_t* p) {
  AEGIS_QUADS(f32x16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * q))));
}

AEGIS_INLINE f32x16 add(f32x16 a, f32x16 b) { AEGIS_QUADS(f32x16, vaddq_f32(a.v[q], b.v[q])); }
AEGIS_INLINE f32x16 sub(f32x16 a, f32x16 b) { AEGIS_QUADS(f32x16, vsubq_f32(a.v[q], b.v[q])); }
AEGIS_INLINE f32x16 mul(f32x16 a, f32x16 b) { AEGIS_QUADS(f32x16, vmulq_f32(a.v[q], b.v[q])); }
AEGIS_INLINE f32x16 div(f32x16 a, f32x16 b) { AEGIS_QUADS(f32x16, vdivq_f32(a.v[q], b.v[q])); }
AEGIS_INLINE f32x16 sqrt(f32x16 a) { AEGIS_QUADS(f32x16, vsqrtq_f32(a.v[q])); }
AEGIS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  AEGIS_QUADS(f32x16, vfmaq_f32(c.v[q], a.v[q], b.v[q]));
}
AEGIS_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  AEGIS_QUADS(f32x16, vfmsq_f32(c.v[q], a.v[q], b.v[q]));
}
// Not vmaxq: its NaN rule differs from x86's.
AEGIS_INLINE f32x16 max(f32x16 a, f32x16 b) {
  AEGIS_QUADS(f32x16, vbslq_f32(vcgtq_f32(a.v[q], b.v[q]), a.v[q], b.v[q]));
}
AEGIS_INLINE f32x16 min(f32x16 a, f32x16 b) {
  AEGIS_QUADS(f32x16, vbslq_f32(vcltq_f32(a.v[q], b.v[q]), a.v[q], b.v[q]));
}

AEGIS_INLINE mask16 cmp_lt(f32x16 a, f32x16 b) {
  AEGIS_QUADS(mask16, vcltq_f32(a.v[q], b.v[q]));
}
AEGIS_INLINE mask16 cmp_le(f32x16 a, f32x16 b) {
  AEGIS_QUADS(mask16, vcleq_f32(a.v[q], b.v[q]));
}
AEGIS_INLINE mask16 cmp_gt(f32x16 a, f32x16 b) {
  AEGIS_QUADS(mask16, vcgtq_f32(a.v[q], b.v[q]));
}
AEGIS_INLINE mask16 cmp_eq(f32x16 a, f32x16 b) {
  AEGIS_QUADS(mask16, vceqq_f32(a.v[q], b.v[q]));
}
AEGIS_INLINE mask16 cmp_unord(f32x16 a, f32x16 b) {
  AEGIS_QUADS(mask16, vmvnq_u32(vandq_u32(vceqq_f32(a.v[q], a.v[q]), vceqq_f32(b.v[q], b.v[q]))));
}
AEGIS_INLINE uint32_t mask_bits(mask16 m) {
  const uint32_t weights[4] = {1, 2, 4, 8};
  uint32_t r = 0;
  for (int q = 0; q < 4; ++q) r |= vaddvq_u32(vandq_u32(m.v[q], vld1q_u32(weights))) << (4 * q);
  return r;
}
AEGIS_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  AEGIS_QUADS(f32x16, vbslq_f32(m.v[q], a.v[q], b.v[q]));
}

AEGIS_INLINE i32x16 izero() { AEGIS_QUADS(i32x16, vdupq_n_s32(0)); }
AEGIS_INLINE i32x16 iset1(int32_t x) { AEGIS_QUADS(i32x16, vdupq_n_s32(x)); }
AEGIS_INLINE i32x16 load_u8(const uint8_t* p) {
  const uint8x16_t b = vld1q_u8(p);
  const uint16x8_t h[2] = {vmovl_u8(vget_low_u8(b)), vmovl_u8(vget_high_u8(b))};
  AEGIS_QUADS(i32x16, vreinterpretq_s32_u32(vmovl_u16(q % 2 ? vget_high_u16(h[q / 2])
                                                            : vget_low_u16(h[q / 2]))));
}
AEGIS_INLINE i32x16 iload(const void* p) {
  AEGIS_QUADS(i32x16, vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p + 16 * q)));
}
AEGIS_INLINE void istore(void* p, i32x16 a) {
  for (int q = 0; q < 4; ++q) vst1q_u8((uint8_t*)p + 16 * q, vreinterpretq_u8_s32(a.v[q]));
}
AEGIS_INLINE i32x16 iadd(i32x16 a, i32x16 b) { AEGIS_QUADS(i32x16, vaddq_s32(a.v[q], b.v[q])); }
AEGIS_INLINE i32x16 isub(i32x16 a, i32x16 b) { AEGIS_QUADS(i32x16, vsubq_s32(a.v[q], b.v[q])); }
AEGIS_INLINE i32x16 iand(i32x16 a, i32x16 b) { AEGIS_QUADS(i32x16, vandq_s32(a.v[q], b.v[q])); }
AEGIS_INLINE i32x16 ior(i32x16 a, i32x16 b) { AEGIS_QUADS(i32x16, vorrq_s32(a.v[q], b.v[q])); }
AEGIS_INLINE i32x16 ixor(i32x16 a, i32x16 b) { AEGIS_QUADS(i32x16, veorq_s32(a.v[q], b.v[q])); }
// Shifts by a register: the immediate forms refuse a count of 0.
template <int N>
AEGIS_INLINE i32x16 ishl(i32x16 a) {
  AEGIS_QUADS(i32x16, vshlq_s32(a.v[q], vdupq_n_s32(N)));
}
template <int N>
AEGIS_INLINE i32x16 ishr(i32x16 a) {
  AEGIS_QUADS(i32x16, vreinterpretq_s32_u32(
                          vshlq_u32(vreinterpretq_u32_s32(a.v[q]), vdupq_n_s32(-N))));
}
template <int N>
AEGIS_INLINE i32x16 isar(i32x16 a) {
  AEGIS_QUADS(i32x16, vshlq_s32(a.v[q], vdupq_n_s32(-N)));
}
AEGIS_INLINE mask16 icmp_eq(i32x16 a, i32x16 b) {
  AEGIS_QUADS(mask16, vceqq_s32(a.v[q], b.v[q]));
}
AEGIS_INLINE mask16 icmp_gt(i32x16 a, i32x16 b) {
  AEGIS_QUADS(mask16, vcgtq_s32(a.v[q], b.v[q]));
}
AEGIS_INLINE i32x16 select(mask16 m, i32x16 a, i32x16 b) {
  AEGIS_QUADS(i32x16, vbslq_s32(m.v[q], a.v[q], b.v[q]));
}

AEGIS_INLINE i32x16 bits(f32x16 a) { AEGIS_QUADS(i32x16, vreinterpretq_s32_f32(a.v[q])); }
AEGIS_INLINE f32x16 as_float(i32x16 a) { AEGIS_QUADS(f32x16, vreinterpretq_f32_s32(a.v[q])); }
AEGIS_INLINE f32x16 to_float(i32x16 a) { AEGIS_QUADS(f32x16, vcvtq_f32_s32(a.v[q])); }
AEGIS_INLINE f32x16 neg(f32x16 a) { AEGIS_QUADS(f32x16, vnegq_f32(a.v[q])); }
AEGIS_INLINE f32x16 abs(f32x16 a) { AEGIS_QUADS(f32x16, vabsq_f32(a.v[q])); }
// A byte table: index i becomes the bytes 4i, 4i+1, 4i+2, 4i+3.
AEGIS_INLINE f32x16 lookup_bytes(f32x16 table, i32x16 index, int32_t mask) {
  uint8x16x4_t bytes;
  for (int q = 0; q < 4; ++q) bytes.val[q] = vreinterpretq_u8_f32(table.v[q]);
  f32x16 r;
  for (int q = 0; q < 4; ++q) {
    const int32x4_t entry = vandq_s32(index.v[q], vdupq_n_s32(mask));
    const int32x4_t first = vmulq_n_s32(entry, 0x04040404);
    const uint8x16_t at = vreinterpretq_u8_s32(vaddq_s32(first, vdupq_n_s32(0x03020100)));
    r.v[q] = vreinterpretq_f32_u8(vqtbl4q_u8(bytes, at));
  }
  return r;
}
AEGIS_INLINE f32x16 lookup16(f32x16 table, i32x16 index) { return lookup_bytes(table, index, 15); }
AEGIS_INLINE f32x16 lookup8(f32x16 table, i32x16 index) { return lookup_bytes(table, index, 7); }

#undef AEGIS_QUADS

}  // namespace aegis::neon
