// What the Gated DeltaNet block, and attention's output gate, need from each instruction set.
#pragma once

#include <cstdint>

namespace aegis {

constexpr int kMaxTaps = 16;  // of a convolution

// One head's channels of a causal convolution. Inputs of the taps - 1 tokens before row 0 lie at
// inputs + i * ld_inputs, oldest first, and taps, oldest first, at taps + i * ld_taps.
struct ConvolutionUnit {
  float* x;  // [rows][channels], `ld` apart: becomes silu of the convolution
  int64_t ld;
  int64_t rows;
  int64_t channels;  // a multiple of 16
  float* inputs;     // becomes what the next token needs
  int64_t ld_inputs;
  const float* taps;
  int64_t ld_taps;
  int count;  // of taps, at most kMaxTaps
};

// Rows of one value head in token order, for some of its channels. The state lies in pairs of panels
// of 16 channels, [key_dim][32]; a last one without a partner is [key_dim][16].
struct DeltaUnit {
  const float* q;  // rows of q, k and v lie `ld` apart
  const float* k;
  const float* v;
  int64_t ld;
  const float* decay;
  const float* beta;
  int64_t ld_gates;
  float* state;
  float* out;
  int64_t ld_out;
  int64_t rows;
  int64_t key_dim;  // even
  int64_t panels;
};

struct DeltaTable {
  void (*convolve)(const ConvolutionUnit& unit);
  // x = x / sqrt(sum(x^2) + 1e-6) * scale; n is a multiple of 16.
  void (*to_unit)(float* x, int64_t n, float scale);
  // a = e^(-e^A_log log(1 + e^(a + dt_bias))) and b = sigmoid(b), of n heads.
  void (*gates)(float* a, float* b, const float* a_log, const float* dt_bias, int64_t n);
  // For each row: S *= decay; S += k (beta (v - S^T k))^T; out = S^T q.
  void (*recur)(const DeltaUnit& unit);
  // x = rms_norm(x) * silu(z); n is a multiple of 16.
  void (*gated_norm)(float* x, const float* w, float eps, const float* z, int64_t n);
  // x *= sigmoid(gate); n is a multiple of 16.
  void (*sigmoid_mul)(float* x, const float* gate, int64_t n);
};

}  // namespace aegis
