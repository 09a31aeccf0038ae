// f32x16 as an array: slow, obvious, for tests on any machine.
#pragma once

namespace aegis::scalar {

struct f32x16 {
  float v[16];
};
struct i32x16 {
  int32_t v[16];
};
struct mask16 {
  uint32_t v;
};

#define AEGIS_LANES(EXPRESSION)                            \
  f32x16 r;                                                \
  for (int i = 0; i < 16; ++i) r.v[i] = (EXPRESSION);      \
  return r
#define AEGIS_ILANES(EXPRESSION)                           \
  i32x16 r;                                                \
  for (int i = 0; i < 16; ++i) r.v[i] = (int32_t)(EXPRESSION); \
  return r
#define AEGIS_MASK(CONDITION)                              \
  mask16 r = {0};                                          \
  for (int i = 0; i < 16; ++i) r.v |= (CONDITION) ? 1u << i : 0u; \
  return r

AEGIS_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7FFFu;
  uint32_t u;
  if (magnitude >= 0x7C00u) {
    u = 0x7F800000u | (magnitude & 0x3FFu) << 13 | (magnitude > 0x7C00u ? 0x400000u : 0u);
  } else if (magnitude >= 0x400u) {
    u = (magnitude << 13) + 0x38000000u;
  } else {
    const float f = (float)magnitude * 0x1p-24f;
    memcpy(&u, &f, 4);
  }
  u |= sign;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

AEGIS_INLINE f32x16 set1(float x) { AEGIS_LANES(x); }
AEGIS_INLINE f32x16 zero() { return set1(0.0f); }
AEGIS_INLINE f32x16 load(const float* p) { AEGIS_LANES(p[i]); }
AEGIS_INLINE void store(float* p, f32x16 a) { memcpy(p, a.v, sizeof a.v); }
AEGIS_INLINE mask16 mask_first(int n) { AEGIS_MASK(i < n); }
AEGIS_INLINE f32x16 load_first(const float* p, int n) { AEGIS_LANES(i < n ? p[i] : 0.0f); }
AEGIS_INLINE void store_first(float* p, f32x16 a, int n) {
  for (int i = 0; i < 16 && i < n; ++i) p[i] = a.v[i];
}
AEGIS_INLINE f32x16 load_bf16(const uint16_t* p) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t u = (uint32_t)p[i] << 16;
    memcpy(&r.v[i], &u, 4);
  }
  return r;
}
AEGIS_INLINE f32x16 load_f16(const uint16_t* p) { AEGIS_LANES(half_to_float(p[i])); }

AEGIS_INLINE f32x16 add(f32x16 a, f32x16 b) { AEGIS_LANES(a.v[i] + b.v[i]); }
AEGIS_INLINE f32x16 sub(f32x16 a, f32x16 b) { AEGIS_LANES(a.v[i] - b.v[i]); }
AEGIS_INLINE f32x16 mul(f32x16 a, f32x16 b) { AEGIS_LANES(a.v[i] * b.v[i]); }
AEGIS_INLINE f32x16 div(f32x16 a, f32x16 b) { AEGIS_LANES(a.v[i] / b.v[i]); }
AEGIS_INLINE f32x16 sqrt(f32x16 a) { AEGIS_LANES(__builtin_sqrtf(a.v[i])); }
AEGIS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  AEGIS_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i]));
}
AEGIS_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  AEGIS_LANES(__builtin_fmaf(-a.v[i], b.v[i], c.v[i]));
}
AEGIS_INLINE f32x16 max(f32x16 a, f32x16 b) { AEGIS_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
AEGIS_INLINE f32x16 min(f32x16 a, f32x16 b) { AEGIS_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }

AEGIS_INLINE mask16 cmp_lt(f32x16 a, f32x16 b) { AEGIS_MASK(a.v[i] < b.v[i]); }
AEGIS_INLINE mask16 cmp_le(f32x16 a, f32x16 b) { AEGIS_MASK(a.v[i] <= b.v[i]); }
AEGIS_INLINE mask16 cmp_gt(f32x16 a, f32x16 b) { AEGIS_MASK(a.v[i] > b.v[i]); }
AEGIS_INLINE mask16 cmp_eq(f32x16 a, f32x16 b) { AEGIS_MASK(a.v[i] == b.v[i]); }
AEGIS_INLINE mask16 cmp_unord(f32x16 a, f32x16 b) {
  AEGIS_MASK(a.v[i] != a.v[i] || b.v[i] != b.v[i]);
}
AEGIS_INLINE uint32_t mask_bits(mask16 m) { return m.v; }
AEGIS_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  AEGIS_LANES(m.v >> i & 1u ? a.v[i] : b.v[i]);
}

AEGIS_INLINE i32x16 iset1(int32_t x) { AEGIS_ILANES(x); }
AEGIS_INLINE i32x16 izero() { return iset1(0); }
AEGIS_INLINE i32x16 load_u8(const uint8_t* p) { AEGIS_ILANES(p[i]); }
AEGIS_INLINE i32x16 iload(const void* p) {
  i32x16 r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
AEGIS_INLINE void istore(void* p, i32x16 a) { memcpy(p, a.v, sizeof a.v); }
AEGIS_INLINE i32x16 iadd(i32x16 a, i32x16 b) {
  AEGIS_ILANES((uint32_t)a.v[i] + (uint32_t)b.v[i]);
}
AEGIS_INLINE i32x16 isub(i32x16 a, i32x16 b) {
  AEGIS_ILANES((uint32_t)a.v[i] - (uint32_t)b.v[i]);
}
AEGIS_INLINE i32x16 iand(i32x16 a, i32x16 b) { AEGIS_ILANES(a.v[i] & b.v[i]); }
AEGIS_INLINE i32x16 ior(i32x16 a, i32x16 b) { AEGIS_ILANES(a.v[i] | b.v[i]); }
AEGIS_INLINE i32x16 ixor(i32x16 a, i32x16 b) { AEGIS_ILANES(a.v[i] ^ b.v[i]); }
template <int N>
AEGIS_INLINE i32x16 ishl(i32x16 a) {
  AEGIS_ILANES((uint32_t)a.v[i] << N);
}
template <int N>
AEGIS_INLINE i32x16 ishr(i32x16 a) {
  AEGIS_ILANES((uint32_t)a.v[i] >> N);
}
template <int N>
AEGIS_INLINE i32x16 isar(i32x16 a) {
  AEGIS_ILANES(a.v[i] >> N);
}
AEGIS_INLINE mask16 icmp_eq(i32x16 a, i32x16 b) { AEGIS_MASK(a.v[i] == b.v[i]); }
AEGIS_INLINE mask16 icmp_gt(i32x16 a, i32x16 b) { AEGIS_MASK(a.v[i] > b.v[i]); }
AEGIS_INLINE i32x16 select(mask16 m, i32x16 a, i32x16 b) {
  AEGIS_ILANES(m.v >> i & 1u ? a.v[i] : b.v[i]);
}

AEGIS_INLINE i32x16 bits(f32x16 a) { return iload(a.v); }
AEGIS_INLINE f32x16 as_float(i32x16 a) {
  f32x16 r;
  memcpy(r.v, a.v, sizeof r.v);
  return r;
}
AEGIS_INLINE f32x16 to_float(i32x16 a) { AEGIS_LANES((float)a.v[i]); }
AEGIS_INLINE f32x16 neg(f32x16 a) { return as_float(ixor(bits(a), iset1(INT32_MIN))); }
AEGIS_INLINE f32x16 abs(f32x16 a) { return as_float(iand(bits(a), iset1(INT32_MAX))); }
AEGIS_INLINE f32x16 lookup16(f32x16 table, i32x16 index) {
  AEGIS_LANES(table.v[index.v[i] & 15]);
}
AEGIS_INLINE f32x16 lookup8(f32x16 table, i32x16 index) { AEGIS_LANES(table.v[index.v[i] & 7]); }

#undef AEGIS_LANES
#undef AEGIS_ILANES
#undef AEGIS_MASK

}  // namespace aegis::scalar
