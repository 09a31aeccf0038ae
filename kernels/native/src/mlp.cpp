#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention_blocks.h"

namespace aegis {

namespace {

void check(const MlpBlock::Spec& spec) {
  const int64_t hidden = spec.gate.in_features, inner = spec.gate.rows;
  const bool fits = spec.up.in_features == hidden && spec.up.rows == inner &&
                    spec.down.in_features == inner && spec.down.rows == hidden;
  if (!fits)
    throw std::invalid_argument("gate_proj, up_proj and down_proj of an MLP of " +
                                std::to_string(hidden) + " by " + std::to_string(inner) +
                                " do not fit each other");
}

}  // namespace

MlpBlock::MlpBlock(Pool& pool, const Spec& spec, Scratch scratch) : pool_(pool), spec_(spec) {
  check(spec_);
  rows_ = std::min(spec_.max_tokens, kRowTile);
  normed_ = scratch.take(rows_ * padded_ld(hidden()));
  sums_ = scratch.take(rows_ * (hidden() / kGroup));
  gate_ = scratch.take(rows_ * padded_ld(inner()));
  up_ = scratch.take(rows_ * padded_ld(inner()));
  act_sums_ = scratch.take(rows_ * (inner() / kGroup));
}

void MlpBlock::run(float* x, int64_t tokens) const {
  const int64_t weights = spec_.gate.nbytes() + spec_.up.nbytes() + spec_.down.nbytes();
  run_shared(pool_, weights * tokens, [&](Team& team) {
    for (int64_t t = 0; t < tokens; t += rows_)
      run_tile(team, x + t * hidden(), std::min(rows_, tokens - t));
  });
}

void MlpBlock::run_tile(Team& team, float* x, int64_t tokens) const {
  const KernelTable& table = kernels();
  const int64_t ld = padded_ld(inner()), groups = inner() / kGroup;
  team.each(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* normed = normed_ + row * padded_ld(hidden());
      table.attention.rms_norm(x + row * hidden(), spec_.norm, spec_.eps, hidden(), normed);
      table.row_sums(normed, hidden(), sums_ + row * (hidden() / kGroup));
    }
  });
  const Rows in{normed_, padded_ld(hidden()), sums_, hidden() / kGroup};
  const LinearJob entering[] = {{&spec_.gate, in, gate_, ld}, {&spec_.up, in, up_, ld}};
  linear_phase(team, entering, 2, tokens);
  team.each(tokens * groups, 16, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t at = item / groups * ld + item % groups * kGroup;
      table.silu_mul(gate_ + at, up_ + at, gate_ + at, kGroup);
      table.row_sums(gate_ + at, kGroup, act_sums_ + item);
    }
  });
  LinearJob leaving{&spec_.down, {gate_, ld, act_sums_, groups}, x, hidden(), x, hidden()};
  if (spec_.residual != 1.0f) leaving.weight = &spec_.residual;
  linear_phase(team, &leaving, 1, tokens);
}

}  // namespace aegis
