#include "delta_block.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace aegis {

namespace {

constexpr int64_t kPanel = 16;
// Panels of one unit of work: with keys of 128 channels they fit the first-level cache.
constexpr int64_t kUnitPanels = 2;

void check(const DeltaBlock::Spec& spec) {
  if (spec.key_heads <= 0 || spec.value_heads <= 0 || spec.value_heads % spec.key_heads)
    throw std::invalid_argument(std::to_string(spec.value_heads) + " value heads cannot share " +
                                std::to_string(spec.key_heads) + " key heads evenly");
  if (spec.key_dim <= 0 || spec.key_dim % kPanel || spec.value_dim <= 0 || spec.value_dim % kPanel)
    throw std::invalid_argument("heads of " + std::to_string(spec.key_dim) + " and " +
                                std::to_string(spec.value_dim) +
                                " channels are not supported: they must be multiples of 16");
  if (spec.taps < 1 || spec.taps > kMaxTaps)
    throw std::invalid_argument("a convolution over " + std::to_string(spec.taps) +
                                " tokens is not supported: it must be 1 to 16");
  check_linear("in_proj_qkv", spec.qkv, spec.channels(), spec.hidden);
  check_linear("in_proj_z", spec.z, spec.values(), spec.hidden);
  check_linear("in_proj_a", spec.a, spec.value_heads, spec.hidden);
  check_linear("in_proj_b", spec.b, spec.value_heads, spec.hidden);
  check_linear("out_proj", spec.out, spec.hidden, spec.values());
}

}  // namespace

// One tile of rows on its way through the phases.
struct DeltaBlock::Call {
  float* x;
  int64_t tokens;
  const DeltaState& state;
};

DeltaBlock::DeltaBlock(Pool& pool, Spec spec, Scratch scratch) : pool_(pool), spec_(spec) {
  check(spec_);
  rows_ = std::min(spec_.max_tokens, kRowTile);
  const int64_t widest = std::max(spec_.hidden, spec_.values());
  ld_wide_ = padded_ld(widest);
  ld_sums_ = widest / kGroup;
  wide_ = scratch.take(rows_ * ld_wide_);
  sums_ = scratch.take(rows_ * ld_sums_);
  mixed_ = scratch.take(rows_ * ld_mixed());
  z_ = scratch.take(rows_ * ld_z());
  a_ = scratch.take(rows_ * ld_gates());
  b_ = scratch.take(rows_ * ld_gates());
}

void DeltaBlock::run(float* x, int64_t tokens, const DeltaState& state) const {
  const int64_t weights = spec_.qkv.nbytes() + spec_.z.nbytes() + spec_.a.nbytes() +
                          spec_.b.nbytes() + spec_.out.nbytes();
  run_shared(pool_, (weights + 4 * state.numbers) * tokens, [&](Team& team) {
    for (int64_t t = 0; t < tokens; t += rows_) {
      const Call call{x + t * spec_.hidden, std::min(rows_, tokens - t), state};
      project(team, call);
      mix(team, call);
      recur(team, call);
      leave(team, call);
    }
  });
}

void DeltaBlock::project(Team& team, const Call& call) const {
  team.each(call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* normed = wide_ + row * ld_wide_;
      kernels().attention.rms_norm(call.x + row * spec_.hidden, spec_.norm, spec_.eps, spec_.hidden,
                                   normed);
      kernels().row_sums(normed, spec_.hidden, sums_ + row * ld_sums_);
    }
  });
  const Rows in{wide_, ld_wide_, sums_, ld_sums_};
  const LinearJob jobs[] = {{&spec_.qkv, in, mixed_, ld_mixed()},
                            {&spec_.z, in, z_, ld_z()},
                            {&spec_.a, in, a_, ld_gates()},
                            {&spec_.b, in, b_, ld_gates()}};
  linear_phase(team, jobs, 4, call.tokens);
}

// The convolution of every head's channels, and the gates of every row.
void DeltaBlock::mix(Team& team, const Call& call) const {
  const int64_t heads = 2 * spec_.key_heads + spec_.value_heads;
  team.each(heads + call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      if (item < heads) {
        convolve_head(call, item);
        continue;
      }
      const int64_t at = (item - heads) * ld_gates();
      kernels().delta.gates(a_ + at, b_ + at, spec_.a_log, spec_.dt_bias, spec_.value_heads);
    }
  });
}

// Heads of queries, then of keys, then of values. Queries and keys come out with length 1, queries
// scaled as scores are.
void DeltaBlock::convolve_head(const Call& call, int64_t head) const {
  const int64_t keys = 2 * spec_.key_heads;
  const bool value = head >= keys;
  ConvolutionUnit unit;
  unit.channels = value ? spec_.value_dim : spec_.key_dim;
  const int64_t column =
      value ? 2 * spec_.keys() + (head - keys) * spec_.value_dim : head * spec_.key_dim;
  unit.x = mixed_ + column;
  unit.ld = ld_mixed();
  unit.rows = call.tokens;
  unit.inputs = call.state.inputs + column;
  unit.ld_inputs = unit.ld_taps = spec_.channels();
  unit.taps = spec_.conv + column;
  unit.count = static_cast<int>(spec_.taps);
  kernels().delta.convolve(unit);
  if (value) return;
  const bool query = head < spec_.key_heads;
  const float scale = query ? 1.0f / std::sqrt(static_cast<float>(spec_.key_dim)) : 1.0f;
  for (int64_t row = 0; row < call.tokens; ++row)
    kernels().delta.to_unit(unit.x + row * unit.ld, spec_.key_dim, scale);
}

// A unit is some panels of one value head, which stay in a cache while all rows pass.
void DeltaBlock::recur(Team& team, const Call& call) const {
  const int64_t panels = spec_.value_dim / kPanel;
  const int64_t per_head = (panels + kUnitPanels - 1) / kUnitPanels;
  const int64_t shared = spec_.value_heads / spec_.key_heads;
  team.each(spec_.value_heads * per_head, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / per_head, panel = item % per_head * kUnitPanels;
      const int64_t column = head * spec_.value_dim + panel * kPanel;
      DeltaUnit unit;
      unit.q = mixed_ + head / shared * spec_.key_dim;
      unit.k = unit.q + spec_.keys();
      unit.v = mixed_ + 2 * spec_.keys() + column;
      unit.ld = ld_mixed();
      unit.decay = a_ + head;
      unit.beta = b_ + head;
      unit.ld_gates = ld_gates();
      unit.state = call.state.heads + column * spec_.key_dim;
      unit.out = wide_ + column;
      unit.ld_out = ld_wide_;
      unit.rows = call.tokens;
      unit.key_dim = spec_.key_dim;
      unit.panels = std::min(kUnitPanels, panels - panel);
      kernels().delta.recur(unit);
    }
  });
}

// Norms and gates what heads have read, then the way back to the residual stream.
void DeltaBlock::leave(Team& team, const Call& call) const {
  // The sums that out_proj needs run over groups of 64 inputs: as many heads as fill whole groups.
  int64_t together = 1;
  while (together * spec_.value_dim % kGroup) together *= 2;
  const int64_t parts = spec_.value_heads / together, width = together * spec_.value_dim;
  team.each(call.tokens * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / parts, column = item % parts * width;
      float* heads = wide_ + row * ld_wide_ + column;
      for (int64_t c = 0; c < width; c += spec_.value_dim)
        kernels().delta.gated_norm(heads + c, spec_.out_norm, spec_.eps, z_ + row * ld_z() + column + c,
                                   spec_.value_dim);
      kernels().row_sums(heads, width, sums_ + row * ld_sums_ + column / kGroup);
    }
  });
  const Rows in{wide_, ld_wide_, sums_, ld_sums_};
  const LinearJob job{&spec_.out, in, call.x, spec_.hidden, call.x, spec_.hidden};
  linear_phase(team, &job, 1, call.tokens);
}

}  // namespace aegis
