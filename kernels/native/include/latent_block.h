// Latent attention over the kernel table.
#pragma once

#include "attention_blocks.h"

namespace aegis {

// x += o_proj(unembed(attention(embed(queries), latents))): heads share one key per position, whose
// first channels, the latent, are the value. Every head's query is mapped to the latents' space and
// what it attended to back, also for many rows: another order of sums would be other bits.
class LatentBlock {
 public:
  struct Spec {
    int64_t hidden, heads, rank, nope, rope, value, max_tokens, context;
    float eps, lora_eps;
    std::vector<float> inv_freq;
    float scale;         // of scores
    float rotary_scale;  // of rotated channels
    const float* norm;
    LinearDesc q;                   // behind the norm
    const float* q_norm = nullptr;  // if given, of what q makes, ahead of q_b
    LinearDesc q_b;
    LinearDesc kv;
    const float* kv_norm;
    LinearDesc embed, unembed;  // one head behind the other
    LinearDesc o;
  };

  LatentBlock(Pool& pool, Spec spec, Scratch scratch);

  int64_t hidden() const { return spec_.hidden; }
  int64_t max_positions() const { return blocks_ * kPositionBlock; }
  bool fits(const KVView& cache) const {
    return cache.kv_heads == 1 && cache.dim == key_dim() && cache.value_dim == spec_.rank;
  }
  // x [tokens, hidden], contiguous, at positions start..; in place.
  void run(float* x, int64_t tokens, const KVView& cache, int64_t start) const;

 private:
  struct Call;

  void project(Team& team, const Call& call) const;
  void place(Team& team, const Call& call) const;
  void place_row(const Call& call, int64_t row) const;
  void turn(const float* pairs, int64_t row, float scale, float* out) const;
  void prepare_queries(Team& team, const Call& call) const;
  void by_head(Team& team, const LinearDesc& all, Rows in, int64_t head_in, float* out,
               int64_t ld_out, int64_t head_out, int64_t tokens) const;
  void attend(Team& team, const Call& call) const;
  void finish(Team& team, const Call& call) const;
  int64_t key_dim() const { return spec_.rank + spec_.rope; }
  int64_t query_dim() const { return spec_.nope + spec_.rope; }
  int64_t queries() const { return spec_.heads * query_dim(); }
  int64_t low() const { return spec_.q_norm ? spec_.q.rows : 0; }

  Pool& pool_;
  Spec spec_;
  int64_t rows_;     // of one tile
  int64_t blocks_;   // of positions, at most
  int64_t ld_wide_;  // of normed rows and later of the heads' values
  int64_t ld_sums_;
  int64_t ld_latent_;  // of queries over latents and later of what they attended to
  float *wide_, *sums_, *low_, *low_sums_, *q_, *q_sums_, *kv_, *angles_, *latent_, *latent_sums_;
  float* partials_;
};

}  // namespace aegis
