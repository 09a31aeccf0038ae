#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention_blocks.h"

namespace aegis {

namespace {

void check(const RouterBlock::Layer& layer, int64_t hidden) {
  if (layer.gate.in_features != hidden)
    throw std::invalid_argument("the router takes " + std::to_string(layer.gate.in_features) +
                                " inputs but hidden_size is " + std::to_string(hidden));
  if (layer.gate.rows > kMaxExperts)
    throw std::invalid_argument("a router of " + std::to_string(layer.gate.rows) +
                                " experts is not supported: the most is " +
                                std::to_string(kMaxExperts));
  if (layer.k < 1 || layer.k > layer.gate.rows)
    throw std::invalid_argument("num_experts_per_tok " + std::to_string(layer.k) +
                                " is not between 1 and the number of experts, " +
                                std::to_string(layer.gate.rows));
  const RouterRule& rule = layer.rule;
  if (rule.groups < 1 || rule.kept < 1 || rule.kept > rule.groups ||
      layer.gate.rows % rule.groups || layer.gate.rows / rule.groups * rule.kept < layer.k)
    throw std::invalid_argument(std::to_string(layer.k) + " of " +
                                std::to_string(layer.gate.rows) + " experts cannot lie in " +
                                std::to_string(rule.kept) + " of " + std::to_string(rule.groups) +
                                " groups");
}

}  // namespace

// One tile of rows on its way through the phases.
struct RouterBlock::Call {
  const float* x;
  int64_t row;  // of x within the whole call
  int64_t tokens;
  bool guess;
  int candidates;  // of a single row; 0: the rows' choices are counted
};

RouterBlock::RouterBlock(Pool& pool, int64_t hidden, int64_t max_tokens, Layer layer,
                         std::optional<Layer> next, Outputs outputs, Scratch scratch)
    : pool_(pool),
      hidden_(hidden),
      max_tokens_(max_tokens),
      rows_(std::min(max_tokens, kRowTile)),
      layer_(layer),
      next_(next),
      out_(outputs) {
  check(layer_, hidden);
  sums_ = scratch.take(rows_ * (hidden / kGroup));
  logits_ = scratch.take(rows_ * padded_ld(layer_.gate.rows));
  if (!next_) return;
  check(*next_, hidden);
  next_normed_ = scratch.take(rows_ * padded_ld(hidden));
  next_sums_ = scratch.take(rows_ * (hidden / kGroup));
  next_logits_ = scratch.take(rows_ * padded_ld(next_->gate.rows));
  counts_ = reinterpret_cast<int32_t*>(scratch.take(next_->gate.rows));
}

int RouterBlock::run(const float* x, int64_t tokens, int candidates) const {
  const bool guess = next_ && candidates > 0 && tokens > 0;
  const int wanted = guess ? static_cast<int>(std::min<int64_t>(candidates, next_->gate.rows)) : 0;
  const bool counted = guess && tokens > 1;
  if (counted) std::fill_n(counts_, next_->gate.rows, 0);
  const int64_t weights = layer_.gate.nbytes() + (guess ? next_->gate.nbytes() : 0);
  run_shared(pool_, weights * tokens, [&](Team& team) {
    for (int64_t t = 0; t < tokens; t += rows_) {
      const Call call{x + t * hidden_, t, std::min(rows_, tokens - t), guess,
                      counted ? 0 : wanted};
      normalise_rows(team, call);
      multiply(team, call);
      choose(team, call);
      if (counted) team.each(1, 1, [&](int64_t, int64_t) { count(call); });
    }
  });
  return counted ? rank() : wanted;
}

void RouterBlock::normalise_rows(Team& team, const Call& call) const {
  const KernelTable& table = kernels();
  const int64_t parts = call.guess ? 2 : 1;
  team.each(parts * call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / parts;
      const float* x = call.x + row * hidden_;
      const Layer& layer = item % parts ? *next_ : layer_;
      float* normed = item % parts ? next_normed_ + row * padded_ld(hidden_)
                                   : out_.normed + (call.row + row) * hidden_;
      float* sums = (item % parts ? next_sums_ : sums_) + row * (hidden_ / kGroup);
      table.attention.rms_norm(x, layer.norm, layer.eps, hidden_, normed);
      table.row_sums(normed, hidden_, sums);
    }
  });
}

void RouterBlock::multiply(Team& team, const Call& call) const {
  const int64_t ld_sums = hidden_ / kGroup;
  LinearJob jobs[2] = {{&layer_.gate,
                        {out_.normed + call.row * hidden_, hidden_, sums_, ld_sums},
                        logits_,
                        padded_ld(layer_.gate.rows)},
                       {}};
  if (call.guess)
    jobs[1] = {&next_->gate,
               {next_normed_, padded_ld(hidden_), next_sums_, ld_sums},
               next_logits_,
               padded_ld(next_->gate.rows)};
  linear_phase(team, jobs, call.guess ? 2 : 1, call.tokens);
}

// The routing of every row; and its guess, written over the logits that it came from.
void RouterBlock::choose(Team& team, const Call& call) const {
  const AttentionTable& table = kernels().attention;
  const int64_t parts = call.guess ? 2 : 1;
  team.each(parts * call.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / parts;
      if (item % parts == 0) {
        const int64_t at = (call.row + row) * layer_.k;
        table.route(logits_ + row * padded_ld(layer_.gate.rows),
                    static_cast<int>(layer_.gate.rows), layer_.k, layer_.rule,
                    out_.experts + at, out_.weights + at);
        continue;
      }
      float* logits = next_logits_ + row * padded_ld(next_->gate.rows);
      const int n = static_cast<int>(next_->gate.rows);
      if (call.candidates) {
        table.best(logits, n, call.candidates, next_->rule, out_.guess);
        continue;
      }
      int32_t ids[kMaxExperts];
      table.best(logits, n, next_->k, next_->rule, ids);
      std::memcpy(logits, ids, static_cast<size_t>(next_->k) * sizeof *ids);
    }
  });
}

void RouterBlock::count(const Call& call) const {
  for (int64_t row = 0; row < call.tokens; ++row)
    for (int i = 0; i < next_->k; ++i) {
      int32_t id;
      std::memcpy(&id, next_logits_ + row * padded_ld(next_->gate.rows) + i, sizeof id);
      ++counts_[id];
    }
}

// Experts that any row chose, most chosen first, ties by id.
int RouterBlock::rank() const {
  int chosen = 0;
  for (int32_t id = 0; id < next_->gate.rows; ++id)
    if (counts_[id]) out_.guess[chosen++] = id;
  std::sort(out_.guess, out_.guess + chosen, [this](int32_t a, int32_t b) {
    return counts_[a] != counts_[b] ? counts_[a] > counts_[b] : a < b;
  });
  return chosen;
}

HeadBlock::HeadBlock(Pool& pool, const float* norm, float eps, LinearDesc lm_head,
                     int64_t max_rows, Scratch scratch, float scaling)
    : pool_(pool), norm_(norm), eps_(eps), lm_head_(lm_head), max_rows_(max_rows),
      scaling_(scaling) {
  normed_ = scratch.take(max_rows * padded_ld(lm_head.in_features));
  sums_ = scratch.take(max_rows * lm_head.groups());
}

void HeadBlock::run(const float* x, int64_t rows, float* logits) const {
  const int64_t hidden = lm_head_.in_features;
  run_shared(pool_, lm_head_.nbytes() * rows, [&](Team& team) {
    team.each(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        float* normed = normed_ + row * padded_ld(hidden);
        kernels().attention.rms_norm(x + row * hidden, norm_, eps_, hidden, normed);
        kernels().row_sums(normed, hidden, sums_ + row * lm_head_.groups());
      }
    });
    const LinearJob job{
        &lm_head_, {normed_, padded_ld(hidden), sums_, lm_head_.groups()}, logits, lm_head_.rows};
    linear_phase(team, &job, 1, rows);
    if (scaling_ == 1.0f) return;
    team.each(rows * lm_head_.rows, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) logits[i] /= scaling_;
    });
  });
}

}  // namespace aegis
