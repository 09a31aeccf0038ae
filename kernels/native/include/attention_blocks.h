// Whole model blocks over the kernel table: one call, one dispatch of the pool.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attend.h"
#include "kernel_table.h"

namespace aegis {

// Hands out consecutive pieces of a scratch, each on a cache line; throws where it is too small.
class Scratch {
 public:
  Scratch(float* data, int64_t nbytes) : data_(data), left_(nbytes / 4) {}
  float* take(int64_t floats);

 private:
  float* data_;
  int64_t left_;
};

// Throws where a weight has another shape.
void check_linear(const char* name, const LinearDesc& w, int64_t rows, int64_t in_features);

// What queries and keys are normed by ahead of the rotation; null: not at all.
struct QKNorm {
  const float* q = nullptr;
  const float* k = nullptr;
  bool per_head = false;  // else over all heads together
};

// x += residual * o_proj(attention(rope(qk_norm(qkv(rms_norm(x)))))), keys and values appended to a
// cache. The last sum is fma(residual, out, x).
class AttentionBlock {
 public:
  struct Spec {
    int64_t hidden, heads, kv_heads, dim, max_tokens, context;
    float eps;
    std::vector<float> inv_freq;
    const float* norm;
    LinearDesc q, k, v, o;
    QKNorm qk_norm;
    std::optional<float> scale;  // of scores; else 1 / sqrt(dim)
    float residual = 1.0f;
    bool output_gate = false;  // behind each head's query; heads' outputs times its sigmoid
    float rotary_scale = 1.0f;     // of rotated channels
    int64_t window = 0;            // how many positions a row sees; 0: all up to its own
    const float* sinks = nullptr;  // [heads], each a score more in its head's softmax; or null
  };

  AttentionBlock(Pool& pool, Spec spec, Scratch scratch);

  int64_t hidden() const { return spec_.hidden; }
  int64_t max_positions() const { return blocks_ * kPositionBlock; }
  bool fits(const KVView& cache) const {
    return cache.kv_heads == spec_.kv_heads && cache.dim == spec_.dim &&
           cache.value_dim == spec_.dim;
  }
  // x [tokens, hidden], contiguous, at positions start..; in place.
  void run(float* x, int64_t tokens, const KVView& cache, int64_t start) const;

 private:
  struct Call;

  void project(Team& team, const Call& call) const;
  void norm_projections(Team& team, const Call& call) const;
  void place(Team& team, const Call& call) const;
  void place_head(const Call& call, int64_t row, int64_t head) const;
  void turn(float* head, int64_t row, float scale) const;
  void attend_one(Team& team, const Call& call) const;
  Attended attended() const;
  void gate_head(int64_t row, int64_t head) const;
  void sum_rows(Team& team, const Call& call) const;
  void finish(Team& team, const Call& call) const;
  int64_t group() const { return spec_.heads / spec_.kv_heads; }
  int64_t q_dim() const { return spec_.heads * spec_.dim; }
  int64_t q_stride() const { return spec_.output_gate ? 2 * spec_.dim : spec_.dim; }
  int64_t ld_q() const { return padded_ld(spec_.heads * q_stride()); }
  int64_t kv_dim() const { return spec_.kv_heads * spec_.dim; }

  Pool& pool_;
  Spec spec_;
  int64_t rows_;      // of one tile
  int64_t blocks_;    // of positions, at most
  int64_t ld_wide_;   // of normed and later attended rows
  int64_t ld_sums_;
  float *wide_, *sums_, *q_, *k_, *v_, *angles_, *partials_;
};

// x += residual * down(silu(gate) * up) of normed rows, in a layer without experts. The last sum is
// fma(residual, out, x).
class MlpBlock {
 public:
  struct Spec {
    int64_t max_tokens;
    float eps;
    const float* norm;
    LinearDesc gate, up, down;
    float residual = 1.0f;
  };

  MlpBlock(Pool& pool, const Spec& spec, Scratch scratch);

  int64_t hidden() const { return spec_.gate.in_features; }
  // x [tokens, hidden], contiguous; in place.
  void run(float* x, int64_t tokens) const;

 private:
  void run_tile(Team& team, float* x, int64_t tokens) const;
  int64_t inner() const { return spec_.gate.rows; }

  Pool& pool_;
  Spec spec_;
  int64_t rows_;  // of one tile
  float *normed_, *sums_, *gate_, *up_, *act_sums_;
};

// Norm, router, top-k; and the same of the next layer, as a guess.
class RouterBlock {
 public:
  struct Layer {
    const float* norm;
    LinearDesc gate;
    float eps;
    int k;
    RouterRule rule = {};
  };
  struct Outputs {
    float* normed;
    int32_t* experts;
    float* weights;
    int32_t* guess;
  };

  RouterBlock(Pool& pool, int64_t hidden, int64_t max_tokens, Layer layer,
              std::optional<Layer> next, Outputs outputs, Scratch scratch);

  int64_t hidden() const { return hidden_; }
  int64_t max_tokens() const { return max_tokens_; }
  // Fills the outputs for x [tokens, hidden]; returns how many experts it guessed.
  int run(const float* x, int64_t tokens, int candidates) const;

 private:
  struct Call;

  void normalise_rows(Team& team, const Call& call) const;
  void multiply(Team& team, const Call& call) const;
  void choose(Team& team, const Call& call) const;
  void count(const Call& call) const;
  int rank() const;

  Pool& pool_;
  int64_t hidden_, max_tokens_, rows_;
  Layer layer_;
  std::optional<Layer> next_;
  Outputs out_;
  float *sums_, *logits_, *next_normed_, *next_sums_, *next_logits_;
  int32_t* counts_;
};

// Final norm and the projection to the vocabulary, whose results are divided by `scaling`.
class HeadBlock {
 public:
  HeadBlock(Pool& pool, const float* norm, float eps, LinearDesc lm_head, int64_t max_rows,
            Scratch scratch, float scaling = 1.0f);

  const LinearDesc& lm_head() const { return lm_head_; }
  int64_t max_rows() const { return max_rows_; }
  void run(const float* x, int64_t rows, float* logits) const;

 private:
  Pool& pool_;
  const float* norm_;
  float eps_;
  LinearDesc lm_head_;
  int64_t max_rows_;
  float scaling_;
  float *normed_, *sums_;
};

// Rows of one tile of every block: it bounds scratch, not results.
constexpr int64_t kRowTile = 128;

// Runs a body on the whole pool, or on the caller alone where its weights and cache, once per row,
// are read faster than other threads are woken.
template <class F>
void run_shared(Pool& pool, int64_t nbytes, F&& body) {
  if (nbytes < (64 << 10))
    Pool::run_inline(body);
  else
    pool.run(body);
}

}  // namespace aegis
