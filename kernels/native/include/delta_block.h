// Gated DeltaNet over the kernel table: one call, one dispatch of the pool.
#pragma once

#include <cstdint>

#include "attention_blocks.h"

namespace aegis {

// One layer's state behind a sequence: heads [value_heads][value_dim / 32][key_dim][32], as DeltaUnit
// has them, and the convolution's latest inputs [taps - 1][channels], oldest first.
struct DeltaState {
  float* heads;
  float* inputs;
  int64_t numbers;  // of both together, which follow each other
};

// x += out_proj(gated_norm(delta_rule(silu(conv(qkv(rms_norm(x))))))), the state moved on.
class DeltaBlock {
 public:
  struct Spec {
    int64_t hidden, key_heads, value_heads, key_dim, value_dim, taps, max_tokens;
    float eps;
    const float *norm, *conv, *a_log, *dt_bias, *out_norm;
    LinearDesc qkv, z, a, b, out;

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }
    int64_t head_numbers() const { return value_heads * key_dim * value_dim; }
    int64_t state_numbers() const { return head_numbers() + (taps - 1) * channels(); }
  };

  DeltaBlock(Pool& pool, Spec spec, Scratch scratch);

  int64_t hidden() const { return spec_.hidden; }
  int64_t max_tokens() const { return spec_.max_tokens; }
  bool fits(const DeltaState& state) const { return state.numbers == spec_.state_numbers(); }
  // x [tokens, hidden], contiguous, behind the state's tokens; in place.
  void run(float* x, int64_t tokens, const DeltaState& state) const;

 private:
  struct Call;

  void project(Team& team, const Call& call) const;
  void mix(Team& team, const Call& call) const;
  void convolve_head(const Call& call, int64_t head) const;
  void recur(Team& team, const Call& call) const;
  void leave(Team& team, const Call& call) const;
  int64_t ld_mixed() const { return padded_ld(spec_.channels()); }
  int64_t ld_gates() const { return padded_ld(spec_.value_heads); }
  int64_t ld_z() const { return padded_ld(spec_.values()); }

  Pool& pool_;
  Spec spec_;
  int64_t rows_;     // of one tile
  int64_t ld_wide_;  // of normed rows, and later of what heads read
  int64_t ld_sums_;
  float *wide_, *sums_, *mixed_, *z_, *a_, *b_;
};

}  // namespace aegis
