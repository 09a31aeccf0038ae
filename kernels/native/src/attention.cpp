#include "attention_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace aegis {

void check_linear(const char* name, const LinearDesc& w, int64_t rows, int64_t in_features) {
  if (w.rows == rows && w.in_features == in_features) return;
  throw std::invalid_argument(std::string(name) + " has shape [" + std::to_string(w.rows) + ", " +
                              std::to_string(w.in_features) + "] but this layer needs [" +
                              std::to_string(rows) + ", " + std::to_string(in_features) + "]");
}

namespace {

void check(const AttentionBlock::Spec& spec) {
  if (spec.dim <= 0 || spec.dim % kKeyLanes || spec.dim > kMaxHeadDim)
    throw std::invalid_argument("head_dim " + std::to_string(spec.dim) +
                                " is not supported: it must be a multiple of 16 up to 256");
  if (spec.kv_heads <= 0 || spec.heads <= 0 || spec.heads % spec.kv_heads)
    throw std::invalid_argument(std::to_string(spec.heads) + " attention heads cannot share " +
                                std::to_string(spec.kv_heads) + " key/value heads evenly");
  if (static_cast<int64_t>(2 * spec.inv_freq.size()) > spec.dim)
    throw std::invalid_argument("rotary positions cover more channels than head_dim " +
                                std::to_string(spec.dim));
  if (spec.output_gate && spec.qk_norm.q && !spec.qk_norm.per_head)
    throw std::invalid_argument("a norm over all queries together cannot leave out their gates");
  check_linear("q_proj", spec.q, (spec.output_gate ? 2 : 1) * spec.heads * spec.dim, spec.hidden);
  check_linear("k_proj", spec.k, spec.kv_heads * spec.dim, spec.hidden);
  check_linear("v_proj", spec.v, spec.kv_heads * spec.dim, spec.hidden);
  check_linear("o_proj", spec.o, spec.hidden, spec.heads * spec.dim);
}

}  // namespace

float* Scratch::take(int64_t floats) {
  const int64_t rounded = (floats + 15) / 16 * 16;
  if (rounded > left_)
    throw std::invalid_argument("the workspace is too small for this block: open it with the "
                                "largest shapes of the model");
  float* piece = data_;
  data_ += rounded;
  left_ -= rounded;
  return piece;
}

// One tile of rows on its way through the phases.
struct AttentionBlock::Call {
  float* x;
  int64_t tokens;
  const KVView& cache;
  int64_t start;
};

AttentionBlock::AttentionBlock(Pool& pool, Spec spec, Scratch scratch)
    : pool_(pool), spec_(std::move(spec)) {
  check(spec_);
  rows_ = std::min(spec_.max_tokens, kRowTile);
  const int64_t widest = std::max(spec_.hidden, q_dim());
  blocks_ = (spec_.context + kPositionBlock - 1) / kPositionBlock;
  ld_wide_ = padded_ld(widest);
  ld_sums_ = widest / kGroup;
  wide_ = scratch.take(rows_ * ld_wide_);
  sums_ = scratch.take(rows_ * ld_sums_);
  q_ = scratch.take(rows_ * ld_q());
  k_ = scratch.take(rows_ * padded_ld(kv_dim()));
  v_ = scratch.take(rows_ * padded_ld(kv_dim()));
  angles_ = scratch.take(rows_ * spec_.dim);
  partials_ = scratch.take(spec_.heads * blocks_ * (spec_.dim + kPartialHead));
}

void AttentionBlock::run(float* x, int64_t tokens, const KVView& cache, int64_t start) const {
  const int64_t weights = spec_.q.nbytes() + spec_.k.nbytes() + spec_.v.nbytes() + spec_.o.nbytes();
  const int64_t cached = (start + tokens) * kv_dim() * 8;
  run_shared(pool_, (weights + cached) * tokens, [&](Team& team) {
    for (int64_t t = 0; t < tokens; t += rows_) {
      const Call call{x + t * spec_.hidden, std::min(rows_, tokens - t), cache, start + t};
      project(team, call);
      place(team, call);
      if (call.tokens == 1) {
        attend_one(team, call);
      } else {
        attend_rows(team, attended(), call.cache, call.start, call.tokens);
        sum_rows(team, call);
      }
      finish(team, call);
    }
  });
}

// Norm, rotary angles, then q, k and v of the tile's rows.
void AttentionBlock::project(Team& team, const Call& call) const {
  const AttentionTable& table = kernels().attention;
  const int64_t half = static_cast<int64_t>(spec_.inv_freq.size());
  team.each(2 * call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / 2;
      float* angles = angles_ + row * spec_.dim;
      if (item % 2) {
        table.rotary_angles(call.start + row, spec_.inv_freq.data(), half, angles, angles + half);
        continue;
      }
      float* normed = wide_ + row * ld_wide_;
      table.rms_norm(call.x + row * spec_.hidden, spec_.norm, spec_.eps, spec_.hidden, normed);
      kernels().row_sums(normed, spec_.hidden, sums_ + row * ld_sums_);
    }
  });
  const Rows in{wide_, ld_wide_, sums_, ld_sums_};
  const LinearJob jobs[] = {{&spec_.q, in, q_, ld_q()},
                            {&spec_.k, in, k_, padded_ld(kv_dim())},
                            {&spec_.v, in, v_, padded_ld(kv_dim())}};
  linear_phase(team, jobs, 3, call.tokens);
  if (spec_.qk_norm.q && !spec_.qk_norm.per_head) norm_projections(team, call);
}

// Each row's queries, then its keys, over all of their heads.
void AttentionBlock::norm_projections(Team& team, const Call& call) const {
  const AttentionTable& table = kernels().attention;
  team.each(2 * call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const bool keys = item % 2;
      const int64_t n = keys ? kv_dim() : q_dim();
      float* row = (keys ? k_ : q_) + item / 2 * padded_ld(n);
      table.rms_norm(row, keys ? spec_.qk_norm.k : spec_.qk_norm.q, spec_.eps, n, row);
    }
  });
}

// Norms heads, rotates queries and keys and appends keys and values. An item is the rows of one key vector (16
// aligned positions) and one kv head, so no two threads write to one line of the cache.
void AttentionBlock::place(Team& team, const Call& call) const {
  const int64_t first = call.start / kKeyLanes;
  const int64_t vectors = (call.start + call.tokens - 1) / kKeyLanes - first + 1;
  team.each(vectors * spec_.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t position = (first + item / spec_.kv_heads) * kKeyLanes;
      const int64_t from = std::max(position, call.start) - call.start;
      const int64_t to = std::min(position + kKeyLanes, call.start + call.tokens) - call.start;
      for (int64_t row = from; row < to; ++row) place_head(call, row, item % spec_.kv_heads);
    }
  });
}

void AttentionBlock::place_head(const Call& call, int64_t row, int64_t head) const {
  const AttentionTable& table = kernels().attention;
  const int64_t dim = spec_.dim;
  const float scale = spec_.scale.value_or(1.0f / std::sqrt(static_cast<float>(dim)));
  const QKNorm& norm = spec_.qk_norm;
  float* queries = q_ + row * ld_q() + head * group() * q_stride();
  for (float* q = queries; q < queries + group() * q_stride(); q += q_stride()) {
    if (norm.per_head) table.rms_norm(q, norm.q, spec_.eps, dim, q);
    turn(q, row, scale);
  }

  float* k = k_ + row * padded_ld(kv_dim()) + head * dim;
  if (norm.per_head) table.rms_norm(k, norm.k, spec_.eps, dim, k);
  turn(k, row, 1.0f);
  const int64_t position = call.start + row;
  float* keys = call.cache.head_keys(head) + position / kKeyLanes * kKeyLanes * dim;
  for (int64_t d = 0; d < dim; ++d) keys[d * kKeyLanes + position % kKeyLanes] = k[d];
  const float* v = v_ + row * padded_ld(kv_dim()) + head * dim;
  std::memcpy(call.cache.head_values(head) + position * dim, v, static_cast<size_t>(dim) * 4);
}

// Rotates a head in its place and scales all of it.
void AttentionBlock::turn(float* head, int64_t row, float scale) const {
  const int64_t half = static_cast<int64_t>(spec_.inv_freq.size());
  const float* cosine = angles_ + row * spec_.dim;
  kernels().attention.rotate(head, cosine, cosine + half, half, 2 * half, scale * spec_.rotary_scale,
                             head);
  for (int64_t d = 2 * half; d < spec_.dim; ++d) head[d] *= scale;
}

Attended AttentionBlock::attended() const {
  return {q_,           ld_q(),    q_stride(),   wide_,       ld_wide_, spec_.dim,
          spec_.heads, partials_, spec_.window, spec_.sinks};
}

void AttentionBlock::attend_one(Team& team, const Call& call) const {
  attend_blocks(team, attended(), call.cache, call.start);
  // The sums that o_proj needs run over groups of 64 inputs: as many heads as fill whole groups.
  int64_t together = 1;
  while (together * spec_.dim % kGroup) together *= 2;
  team.each(spec_.heads / together, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin * together; head < end * together; ++head) {
      merge_head(attended(), call.cache, call.start, head);
      gate_head(0, head);
    }
    const int64_t first = begin * together * spec_.dim;
    kernels().row_sums(wide_ + first, (end - begin) * together * spec_.dim, sums_ + first / kGroup);
  });
}

void AttentionBlock::gate_head(int64_t row, int64_t head) const {
  if (!spec_.output_gate) return;
  const float* gate = q_ + row * ld_q() + head * q_stride() + spec_.dim;
  kernels().delta.sigmoid_mul(wide_ + row * ld_wide_ + head * spec_.dim, gate, spec_.dim);
}

void AttentionBlock::sum_rows(Team& team, const Call& call) const {
  team.each(call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t head = 0; head < spec_.heads; ++head) gate_head(row, head);
      kernels().row_sums(wide_ + row * ld_wide_, q_dim(), sums_ + row * ld_sums_);
    }
  });
}

void AttentionBlock::finish(Team& team, const Call& call) const {
  const Rows in{wide_, ld_wide_, sums_, ld_sums_};
  LinearJob job{&spec_.o, in, call.x, spec_.hidden, call.x, spec_.hidden};
  if (spec_.residual != 1.0f) job.weight = &spec_.residual;
  linear_phase(team, &job, 1, call.tokens);
}

}  // namespace aegis
