// RMS norm, rotary positions and elementary functions of single rows.
#pragma once

#include "attention.h"
#include "vmath.h"

namespace aegis::AEGIS_ISA {

// Four chains of 16 lanes hide the FMA's latency; their order is part of the definition.
AEGIS_INLINE float sum_squares(const float* x, int64_t n) {
  f32x16 acc[4] = {zero(), zero(), zero(), zero()};
  const int64_t whole = n / 64 * 64;
  for (int64_t i = 0; i < whole; i += 64)
    for (int c = 0; c < 4; ++c) {
      const f32x16 v = load(x + i + 16 * c);
      acc[c] = fma(v, v, acc[c]);
    }
  // A head may end within a round of the chains.
  for (int c = 0; c < 3; ++c)
    if (whole + 16 * c < n) {
      const f32x16 v = load(x + whole + 16 * c);
      acc[c] = fma(v, v, acc[c]);
    }
  return reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

static void rms_norm(const float* x, const float* w, float eps, int64_t n, float* y) {
  const float sum = sum_squares(x, n);
  const f32x16 inverse = set1(1.0f / __builtin_sqrtf(sum / (float)n + eps));
  for (int64_t i = 0; i < n; i += 16)
    store(y + i, mul(load(w + i), mul(load(x + i), inverse)));
}

static void rotary_angles(int64_t position, const float* inv_freq, int64_t half, float* cosine,
                          float* sine) {
  for (int64_t i = 0; i < half; ++i) sincos1((float)position * inv_freq[i], sine + i, cosine + i);
}

// One product and one rounding at a time, as it is usually computed; y may be x.
static void rotate(const float* x, const float* cosine, const float* sine, int64_t half,
                   int64_t dim, float scale, float* y) {
  const f32x16 factor = set1(scale);
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 low = load(x + i), high = load(x + half + i);
    const f32x16 c = load(cosine + i), s = load(sine + i);
    store(y + i, mul(sub(mul(low, c), mul(high, s)), factor));
    store(y + half + i, mul(add(mul(high, c), mul(low, s)), factor));
  }
  for (; i < half; ++i) {
    const float low = x[i], high = x[half + i];
    y[i] = (low * cosine[i] - high * sine[i]) * scale;
    y[half + i] = (high * cosine[i] + low * sine[i]) * scale;
  }
  for (i = 2 * half; i < dim; ++i) y[i] = x[i] * scale;
}

static void elementwise(Elementwise f, const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    float sine, cosine;
    switch (f) {
      case Elementwise::exp:
        y[i] = exp1(x[i]);
        break;
      case Elementwise::sigmoid:
        y[i] = sigmoid1(x[i]);
        break;
      case Elementwise::silu:
        y[i] = silu1(x[i]);
        break;
      case Elementwise::softplus:
        y[i] = softplus1(x[i]);
        break;
      default:
        sincos1(x[i], &sine, &cosine);
        y[i] = f == Elementwise::sin ? sine : cosine;
    }
  }
}

}  // namespace aegis::AEGIS_ISA
