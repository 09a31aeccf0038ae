// Codes used where they are in their word: masked, they are denormal floats, code * 2^(bit - 149).
//
// The input of that code is scaled by 2^(85 - bit) beforehand, so every product is the true one times
// 2^-64, and one multiplication per group takes that back. A code costs one AND, which any unit of
// the processor does, where a shift and a lookup keep those busy that multiply. Measured on Zen 4,
// from cache: 26 GB/s of 4-bit blocks instead of 20, 19 GB/s of 3-bit ones instead of 15.
//
// The bits are those of the canonical sum. Scaling by powers of two is exact, and so is every rounding
// as long as nothing leaves the range of normal floats: each input is zero or within [2^-62, 2^43), so
// scaled ones are finite, and partial sums are multiples of 2^-149 (they are of the smallest input's
// last place, 2^-85, times 2^-64). scale_inputs checks it; inputs outside take the other way.
#pragma once

#include "unpack.h"

namespace aegis::AEGIS_ISA {

constexpr float kUnscale = 0x1p64f;

template <int BIT, int BITS, int N>
AEGIS_INLINE Codes<N> masked(Words<N> w) {
  Codes<N> c;
  for (int n = 0; n < N; ++n) c.v[n] = as_float(iand(w.v[n], iset1(((1 << BITS) - 1) << BIT)));
  return c;
}

// The type of the scales is part of these: one group is so little work that looking it up shows.
template <int BITS, DType D>
struct Masked {
  static constexpr bool affine = true, scaled = true, sized = true;
  static constexpr int groups_at_once = kGroupsAtOnce;
  static constexpr int64_t param_nbytes = kLanes * (D == DType::f32 ? 4 : 2);
  static constexpr int64_t block_nbytes = 2 * param_nbytes + kLanes * kGroup * BITS / 8;
  static constexpr DType dtype = D;
};

// A code that does not lie in the 23 bits of a mantissa is moved down with its neighbours.
template <DType D>
struct Masked4 : Masked<4, D> {

  static int bit(int k) { return k % 8 < 5 ? 4 * (k % 8) : 4 * (k % 8 - 5); }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, int64_t half,
                                            F f) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Words<N> a = load_words<N>(words + 64 * j, stride);
      const Words<N> b = load_words<N>(words + half + 64 * j, stride);
      const Words<N> top_a = shifted<20>(a), top_b = shifted<20>(b);
      f(8 * j + 0, masked<0, 4>(a), masked<0, 4>(b));
      f(8 * j + 1, masked<4, 4>(a), masked<4, 4>(b));
      f(8 * j + 2, masked<8, 4>(a), masked<8, 4>(b));
      f(8 * j + 3, masked<12, 4>(a), masked<12, 4>(b));
      f(8 * j + 4, masked<16, 4>(a), masked<16, 4>(b));
      f(8 * j + 5, masked<0, 4>(top_a), masked<0, 4>(top_b));
      f(8 * j + 6, masked<4, 4>(top_a), masked<4, 4>(top_b));
      f(8 * j + 7, masked<8, 4>(top_a), masked<8, 4>(top_b));
    }
  }
};

template <DType D>
struct Masked3 : Masked<3, D> {

  static int bit(int k) {
    if (k % 32 >= 30) return k % 32 == 30 ? 0 : 16;
    const int i = k % 32 % 10;
    return i < 5 ? 3 * i : i < 7 ? 3 * i + 1 : 3 * (i - 7);
  }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, int64_t half,
                                            F f) const {
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) {
      const Words<N> a = load_words<N>(words + 64 * j, stride);
      const Words<N> b = load_words<N>(words + half + 64 * j, stride);
      const Words<N> top_a = shifted<22>(a), top_b = shifted<22>(b);
      f(10 * j + 0, masked<0, 3>(a), masked<0, 3>(b));
      f(10 * j + 1, masked<3, 3>(a), masked<3, 3>(b));
      f(10 * j + 2, masked<6, 3>(a), masked<6, 3>(b));
      f(10 * j + 3, masked<9, 3>(a), masked<9, 3>(b));
      f(10 * j + 4, masked<12, 3>(a), masked<12, 3>(b));
      f(10 * j + 5, masked<16, 3>(a), masked<16, 3>(b));
      f(10 * j + 6, masked<19, 3>(a), masked<19, 3>(b));
      f(10 * j + 7, masked<0, 3>(top_a), masked<0, 3>(top_b));
      f(10 * j + 8, masked<3, 3>(top_a), masked<3, 3>(top_b));
      f(10 * j + 9, masked<6, 3>(top_a), masked<6, 3>(top_b));
    }
    const Words<N> a = spare3<N>(words, stride), b = spare3<N>(words + half, stride);
    f(30, masked<0, 3>(a), masked<0, 3>(b));
    f(31, masked<16, 3>(a), masked<16, 3>(b));
  }
};

// out = x scaled for the codes of W; false if an input is outside the range that keeps the bits.
template <class W>
static bool scale_for(const float* x, int64_t n, float* out) {
  float factors[kGroup];
  for (int k = 0; k < kGroup; ++k)
    factors[k] = __builtin_bit_cast(float, (int32_t)(127 + 85 - W::bit(k)) << 23);
  const i32x16 least = iset1((127 - 62) << 23), most = iset1(((127 + 43) << 23) - 1);
  i32x16 outside = izero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 v = load(x + i);
    const i32x16 size = bits(abs(v));
    const i32x16 small = select(icmp_gt(least, size), size, izero());  // zero is not
    outside = ior(outside, select(icmp_gt(size, most), size, small));
    store(out + i, mul(v, load(factors + i % kGroup)));
  }
  return mask_bits(icmp_eq(outside, izero())) == 0xFFFF;
}

}  // namespace aegis::AEGIS_ISA
