// Gated DeltaNet with a channel per lane: every lane is a chain of operations in token order, so the
// rows of a call, the panels that pass together and the threads are free to differ.
#pragma once

#include "delta.h"
#include "norm.h"
#include "vmath.h"

namespace aegis::AEGIS_ISA {

// A row is written over its own input, which the rows behind it have used already.
static void convolve(const ConvolutionUnit& unit) {
  const int before = unit.count - 1;
  for (int64_t c = 0; c < unit.channels; c += 16) {
    const auto input = [&](int64_t row) {
      return load(row < 0 ? unit.inputs + (before + row) * unit.ld_inputs + c
                          : unit.x + row * unit.ld + c);
    };
    float latest[kMaxTaps * 16];
    for (int i = 0; i < before; ++i) store(latest + 16 * i, input(unit.rows - before + i));
    for (int64_t row = unit.rows - 1; row >= 0; --row) {
      f32x16 sum = zero();
      for (int i = 0; i < unit.count; ++i)
        sum = fma(load(unit.taps + i * unit.ld_taps + c), input(row - before + i), sum);
      store(unit.x + row * unit.ld + c, silu(sum));
    }
    for (int i = 0; i < before; ++i) store(unit.inputs + i * unit.ld_inputs + c, load(latest + 16 * i));
  }
}

static void to_unit(float* x, int64_t n, float scale) {
  const f32x16 inverse = set1(1.0f / __builtin_sqrtf(sum_squares(x, n) + 1e-6f));
  for (int64_t i = 0; i < n; i += 16) store(x + i, mul(mul(load(x + i), inverse), set1(scale)));
}

static void gates(float* a, float* b, const float* a_log, const float* dt_bias, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int count = (int)(n - i < 16 ? n - i : 16);
    float rate[16];
    store(rate, add(load_first(a + i, count), load_first(dt_bias + i, count)));
    for (int lane = 0; lane < 16; ++lane) rate[lane] = softplus1(rate[lane]);
    const f32x16 decay = exp(neg(mul(exp(load_first(a_log + i, count)), load(rate))));
    store_first(a + i, decay, count);
    store_first(b + i, sigmoid(load_first(b + i, count)), count);
  }
}

// Two chains over the keys' even and odd channels hide the latency of one. Panels lie beside each
// other: a multiple of 4 KiB apart, stores to one held up loads from the next.
template <int PANELS>
static void recur_panels(const DeltaUnit& unit, int64_t first) {
  const int64_t dim = unit.key_dim;
  float* const state = unit.state + first * dim * 16;
  for (int64_t row = 0; row < unit.rows; ++row) {
    const float *q = unit.q + row * unit.ld, *k = unit.k + row * unit.ld;
    const float* v = unit.v + row * unit.ld + first * 16;
    const f32x16 decay = set1(unit.decay[row * unit.ld_gates]);
    const f32x16 beta = set1(unit.beta[row * unit.ld_gates]);
    f32x16 even[PANELS], odd[PANELS], correction[PANELS];
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) even[p] = odd[p] = zero();
    for (int64_t d = 0; d < dim; d += 2) {
      const f32x16 key = set1(k[d]), next = set1(k[d + 1]);
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; ++p) {
        const float* s = state + (d * PANELS + p) * 16;
        even[p] = fma(mul(load(s), decay), key, even[p]);
        odd[p] = fma(mul(load(s + PANELS * 16), decay), next, odd[p]);
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) {
      correction[p] = mul(sub(load(v + 16 * p), add(even[p], odd[p])), beta);
      even[p] = odd[p] = zero();
    }
    for (int64_t d = 0; d < dim; d += 2) {
      const f32x16 key = set1(k[d]), next = set1(k[d + 1]);
      const f32x16 query = set1(q[d]), query_next = set1(q[d + 1]);
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; ++p) {
        float* s = state + (d * PANELS + p) * 16;
        const f32x16 a = fma(key, correction[p], mul(load(s), decay));
        const f32x16 b = fma(next, correction[p], mul(load(s + PANELS * 16), decay));
        store(s, a);
        store(s + PANELS * 16, b);
        even[p] = fma(a, query, even[p]);
        odd[p] = fma(b, query_next, odd[p]);
      }
    }
    float* out = unit.out + row * unit.ld_out + first * 16;
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) store(out + 16 * p, add(even[p], odd[p]));
  }
}

static void recur(const DeltaUnit& unit) {
  int64_t panel = 0;
  for (; panel + 2 <= unit.panels; panel += 2) recur_panels<2>(unit, panel);
  if (panel < unit.panels) recur_panels<1>(unit, panel);
}

static void gated_norm(float* x, const float* w, float eps, const float* z, int64_t n) {
  rms_norm(x, w, eps, n, x);
  for (int64_t i = 0; i < n; i += 16) store(x + i, mul(load(x + i), silu(load(z + i))));
}

static void sigmoid_mul(float* x, const float* gate, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store(x + i, mul(load(x + i), sigmoid(load(gate + i))));
}

static inline DeltaTable delta_table() {
  DeltaTable t;
  t.convolve = convolve;
  t.to_unit = to_unit;
  t.gates = gates;
  t.recur = recur;
  t.gated_norm = gated_norm;
  t.sigmoid_mul = sigmoid_mul;
  return t;
}

}  // namespace aegis::AEGIS_ISA
