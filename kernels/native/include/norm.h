// RMS norm and rotary positions of single rows.
#pragma once

#include "vmath.h"

namespace aegis::AEGIS_ISA {

static void rms_norm(const float* x, const float* w, float eps, int64_t n, float* y) {
  // Four chains of 16 lanes hide the FMA's latency; their order is part of the definition.
  f32x16 acc[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < n; i += 64)
    for (int c = 0; c < 4; ++c) {
      const f32x16 v = load(x + i + 16 * c);
      acc[c] = fma(v, v, acc[c]);
    }
  const float sum = reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
  const f32x16 inverse = set1(1.0f / __builtin_sqrtf(sum / (float)n + eps));
  for (int64_t i = 0; i < n; i += 16)
    store(y + i, mul(load(w + i), mul(load(x + i), inverse)));
}

static void rotary_angles(int64_t position, const float* inv_freq, int64_t half, float* cosine,
                          float* sine) {
  for (int64_t i = 0; i < half; ++i) sincos1((float)position * inv_freq[i], sine + i, cosine + i);
}

static void rotate(const float* x, const float* cosine, const float* sine, int64_t half,
                   int64_t dim, float scale, float* y) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = x[i];
    const float high = x[half + i];
    y[i] = (low * cosine[i] - high * sine[i]) * scale;
    y[half + i] = (high * cosine[i] + low * sine[i]) * scale;
  }
  for (int64_t i = 2 * half; i < dim; ++i) y[i] = x[i] * scale;
}

}  // namespace aegis::AEGIS_ISA
