#include "latent_block.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace aegis {

namespace {

void check(const LatentBlock::Spec& s) {
  const auto fits = [](const LinearDesc& w, int64_t rows, int64_t in_features) {
    return w.rows == rows && w.in_features == in_features;
  };
  if (s.rank <= 0 || s.rank % kGroup || s.rank > kMaxValueDim || s.rope % 2 || s.rope <= 0 ||
      s.rank + s.rope > kMaxKeyDim || s.nope % kGroup)
    throw std::invalid_argument("latents of " + std::to_string(s.rank) + " with " +
                                std::to_string(s.rope) + " rotated channels, and queries of " +
                                std::to_string(s.nope) + ", are not supported");
  const int64_t queries = s.heads * (s.nope + s.rope);
  const bool low = s.q_norm != nullptr;
  if (!fits(s.q, low ? s.q_b.in_features : queries, s.hidden) ||
      (low && (s.q_b.rows != queries || s.q.rows % kKeyLanes)) ||
      !fits(s.kv, s.rank + s.rope, s.hidden) || !fits(s.embed, s.heads * s.rank, s.nope) ||
      !fits(s.unembed, s.heads * s.value, s.rank) || !fits(s.o, s.hidden, s.heads * s.value) ||
      s.value % kLanes || static_cast<int64_t>(2 * s.inv_freq.size()) != s.rope)
    throw std::invalid_argument("the projections of a latent attention of " +
                                std::to_string(s.heads) + " heads do not fit each other");
}

// The matrix of one head among those of all.
LinearDesc of_head(const LinearDesc& all, int64_t heads, int64_t head) {
  LinearDesc one = all;
  one.rows = all.rows / heads;
  one.data += head * one.nbytes();
  return one;
}

}  // namespace

// One tile of rows on its way through the phases.
struct LatentBlock::Call {
  float* x;
  int64_t tokens;
  const KVView& cache;
  int64_t start;
};

LatentBlock::LatentBlock(Pool& pool, Spec spec, Scratch scratch)
    : pool_(pool), spec_(std::move(spec)) {
  check(spec_);
  rows_ = std::min(spec_.max_tokens, kRowTile);
  blocks_ = (spec_.context + kPositionBlock - 1) / kPositionBlock;
  const int64_t widest = std::max(spec_.hidden, spec_.heads * spec_.value);
  ld_wide_ = padded_ld(widest);
  ld_sums_ = widest / kGroup;
  ld_latent_ = padded_ld(spec_.heads * key_dim());
  wide_ = scratch.take(rows_ * ld_wide_);
  sums_ = scratch.take(rows_ * ld_sums_);
  low_ = scratch.take(rows_ * padded_ld(low()));
  low_sums_ = scratch.take(rows_ * (low() / kGroup));
  q_ = scratch.take(rows_ * padded_ld(queries()));
  q_sums_ = scratch.take(rows_ * spec_.heads * (spec_.nope / kGroup));
  kv_ = scratch.take(rows_ * padded_ld(key_dim()));
  angles_ = scratch.take(rows_ * spec_.rope);
  latent_ = scratch.take(rows_ * ld_latent_);
  latent_sums_ = scratch.take(rows_ * spec_.heads * (spec_.rank / kGroup));
  partials_ = scratch.take(spec_.heads * blocks_ * (spec_.rank + kPartialHead));
}

void LatentBlock::run(float* x, int64_t tokens, const KVView& cache, int64_t start) const {
  const LinearDesc* const all[] = {&spec_.q,     &spec_.q_b,     &spec_.kv,
                                   &spec_.embed, &spec_.unembed, &spec_.o};
  int64_t weights = 0;
  for (const LinearDesc* w : all) weights += w->nbytes();
  const int64_t cached = (start + tokens) * (key_dim() + spec_.rank) * 4;
  run_shared(pool_, (weights + cached) * tokens, [&](Team& team) {
    for (int64_t t = 0; t < tokens; t += rows_) {
      const Call call{x + t * spec_.hidden, std::min(rows_, tokens - t), cache, start + t};
      project(team, call);
      place(team, call);
      prepare_queries(team, call);
      const int64_t groups = spec_.nope / kGroup;
      by_head(team, spec_.embed, {q_, padded_ld(queries()), q_sums_, spec_.heads * groups},
              query_dim(), latent_, ld_latent_, key_dim(), call.tokens);
      attend(team, call);
      finish(team, call);
    }
  });
}

// Norm, rotary angles, then queries and what the cache gets, of the tile's rows.
void LatentBlock::project(Team& team, const Call& call) const {
  const AttentionTable& table = kernels().attention;
  const int64_t half = spec_.rope / 2;
  team.each(call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* angles = angles_ + row * spec_.rope;
      table.rotary_angles(call.start + row, spec_.inv_freq.data(), half, angles, angles + half);
      float* normed = wide_ + row * ld_wide_;
      table.rms_norm(call.x + row * spec_.hidden, spec_.norm, spec_.eps, spec_.hidden, normed);
      kernels().row_sums(normed, spec_.hidden, sums_ + row * ld_sums_);
    }
  });
  const bool low = spec_.q_norm != nullptr;
  const Rows in{wide_, ld_wide_, sums_, ld_sums_};
  const LinearJob entering[] = {
      {&spec_.q, in, low ? low_ : q_, padded_ld(low ? this->low() : queries())},
      {&spec_.kv, in, kv_, padded_ld(key_dim())}};
  linear_phase(team, entering, 2, call.tokens);
  if (!low) return;
  const int64_t ld = padded_ld(this->low()), groups = this->low() / kGroup;
  team.each(call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* q = low_ + row * ld;
      table.rms_norm(q, spec_.q_norm, spec_.lora_eps, this->low(), q);
      kernels().row_sums(q, this->low(), low_sums_ + row * groups);
    }
  });
  const LinearJob job{&spec_.q_b, {low_, ld, low_sums_, groups}, q_, padded_ld(queries())};
  linear_phase(team, &job, 1, call.tokens);
}

// Appends latents and rotated keys. An item is the rows of one key vector (16 aligned positions), so
// no two threads write to one line of the cache.
void LatentBlock::place(Team& team, const Call& call) const {
  const int64_t first = call.start / kKeyLanes;
  const int64_t vectors = (call.start + call.tokens - 1) / kKeyLanes - first + 1;
  team.each(vectors, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t position = (first + item) * kKeyLanes;
      const int64_t from = std::max(position, call.start) - call.start;
      const int64_t to = std::min(position + kKeyLanes, call.start + call.tokens) - call.start;
      for (int64_t row = from; row < to; ++row) place_row(call, row);
    }
  });
}

void LatentBlock::place_row(const Call& call, int64_t row) const {
  const int64_t dim = key_dim(), position = call.start + row;
  float* key = kv_ + row * padded_ld(dim);
  kernels().attention.rms_norm(key, spec_.kv_norm, spec_.lora_eps, spec_.rank, key);
  turn(key + spec_.rank, row, spec_.rotary_scale, key + spec_.rank);
  float* keys = call.cache.head_keys(0) + position / kKeyLanes * kKeyLanes * dim;
  for (int64_t d = 0; d < dim; ++d) keys[d * kKeyLanes + position % kKeyLanes] = key[d];
  std::memcpy(call.cache.head_values(0) + position * spec_.rank, key,
              static_cast<size_t>(spec_.rank) * 4);
}

// Rotates pairs of neighbours (2i, 2i + 1), which come out as (i, half + i), and scales them; `out`
// may be `pairs`.
void LatentBlock::turn(const float* pairs, int64_t row, float scale, float* out) const {
  const int64_t half = spec_.rope / 2;
  const float* cosine = angles_ + row * spec_.rope;
  float apart[kMaxKeyDim];
  for (int64_t i = 0; i < half; ++i) {
    apart[i] = pairs[2 * i];
    apart[half + i] = pairs[2 * i + 1];
  }
  kernels().attention.rotate(apart, cosine, cosine + half, half, spec_.rope, scale, out);
}

// Scales each head's query, rotates its second part into its place behind the latents, and sums the
// first for what maps it there.
void LatentBlock::prepare_queries(Team& team, const Call& call) const {
  const int64_t groups = spec_.nope / kGroup;
  team.each(call.tokens * spec_.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / spec_.heads, head = item % spec_.heads;
      float* q = q_ + row * padded_ld(queries()) + head * query_dim();
      float* turned = latent_ + row * ld_latent_ + head * key_dim() + spec_.rank;
      turn(q + spec_.nope, row, spec_.rotary_scale * spec_.scale, turned);
      for (int64_t i = 0; i < spec_.nope; ++i) q[i] *= spec_.scale;
      kernels().row_sums(q, spec_.nope, q_sums_ + item * groups);
    }
  });
}

// Each head's part of the rows through its own matrix. `in` holds head 0's; those of the next lie
// `head_in` numbers further on, their sums behind each other, and results `head_out` apart.
void LatentBlock::by_head(Team& team, const LinearDesc& all, Rows in, int64_t head_in, float* out,
                          int64_t ld_out, int64_t head_out, int64_t tokens) const {
  const int64_t panels = (tokens + kMaxTokens - 1) / kMaxTokens;
  team.each(spec_.heads * panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / panels, t0 = item % panels * kMaxTokens;
      const LinearDesc one = of_head(all, spec_.heads, head);
      const Rows rows{in.x + head * head_in, in.ld, in.sums + head * one.groups(), in.ld_sums};
      const LinearJob job{&one, rows, out + head * head_out, ld_out};
      const int count = static_cast<int>(std::min<int64_t>(kMaxTokens, tokens - t0));
      linear_piece(job, 0, one.row_blocks(), t0, count);
    }
  });
}

// What heads attended to takes the place of their queries; then its sums.
void LatentBlock::attend(Team& team, const Call& call) const {
  const Attended attended{latent_,    ld_latent_, key_dim(),    latent_,
                          ld_latent_, key_dim(),  spec_.heads,  partials_};
  const bool single = call.tokens == 1;
  if (single)
    attend_blocks(team, attended, call.cache, call.start);
  else
    attend_rows(team, attended, call.cache, call.start, call.tokens);
  const int64_t groups = spec_.rank / kGroup;
  team.each(call.tokens * spec_.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / spec_.heads, head = item % spec_.heads;
      if (single) merge_head(attended, call.cache, call.start, head);
      kernels().row_sums(latent_ + row * ld_latent_ + head * key_dim(), spec_.rank,
                         latent_sums_ + item * groups);
    }
  });
}

void LatentBlock::finish(Team& team, const Call& call) const {
  const int64_t values = spec_.heads * spec_.value;
  by_head(team, spec_.unembed,
          {latent_, ld_latent_, latent_sums_, spec_.heads * (spec_.rank / kGroup)}, key_dim(),
          wide_, ld_wide_, spec_.value, call.tokens);
  team.each(call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels().row_sums(wide_ + row * ld_wide_, values, sums_ + row * ld_sums_);
  });
  const Rows in{wide_, ld_wide_, sums_, ld_sums_};
  const LinearJob job{&spec_.o, in, call.x, spec_.hidden, call.x, spec_.hidden};
  linear_phase(team, &job, 1, call.tokens);
}

}  // namespace aegis
