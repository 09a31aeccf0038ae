// What the attention, router and embedding blocks need from each instruction set.
#pragma once

#include <cstdint>

#include "linear.h"

namespace aegis {

// Softmax runs over blocks of positions on a grid from position 0, each with its own maximum and
// sum, merged in order. A row's result therefore never depends on which rows came with it or on
// who computed which block.
constexpr int64_t kPositionBlock = 256;
constexpr int64_t kKeyLanes = 16;
constexpr int kTileQueries = 8;    // queries that share the loads of keys and values
constexpr int kUnitQueries = 32;   // queries of one unit of work
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxKeyDim = 576;  // where values are of another width
constexpr int64_t kUnitFloats = 16 * kMaxKeyDim;  // of a unit's queries
constexpr int64_t kMaxValueDim = 512;

// Keys [kv_head][position / 16][dim][16] and values [kv_head][position][value_dim] of one layer.
struct KVView {
  float* keys;
  float* values;
  int64_t positions;  // a multiple of 16
  int64_t kv_heads;
  int64_t dim;
  int64_t value_dim;

  float* head_keys(int64_t head) const { return keys + head * positions * dim; }
  float* head_values(int64_t head) const { return values + head * positions * value_dim; }
};

// Some query rows of some heads that share one kv head: row r at absolute position first + r,
// head h at q + r * ld_q + h * q_step, already rotated and scaled. Its output, value_dim numbers at
// out + r * ld_out + h * out_step, may lie in the place of the queries. A row sees the `window`
// positions up to its own (0: all of them). Head h's softmax has the score sinks[h] more, of no
// value.
struct AttentionUnit {
  const float* q;
  int64_t ld_q;
  int64_t q_step;
  float* out;
  int64_t ld_out;
  int64_t out_step;
  const float* keys;
  const float* values;
  int64_t dim;
  int64_t value_dim;
  int64_t first;
  int rows;
  int heads;  // rows * heads <= kUnitQueries, and times dim <= kUnitFloats
  int64_t window = 0;
  const float* sinks = nullptr;
};

// The first position that a query sees; 0 for a window: all.
inline int64_t first_seen(int64_t position, int64_t window) {
  return window && position >= window ? position - window + 1 : 0;
}

// A partial result: maximum, sum, and from kPartialHead on the weighted values.
constexpr int64_t kPartialHead = 16;

// How a router's logits become a choice and mixing weights.
struct RouterRule {
  bool normalise = false;
  bool sigmoid = false;               // of each logit; else softmax over all
  const float* correction = nullptr;  // [n], added to sigmoids for the choice alone; or null
  int groups = 1;                     // equal ones; experts outside of the `kept` best, by the sum
  int kept = 1;                       // of their two best, are not chosen: sigmoid only
  float scaling = 1.0f;
};

enum class Elementwise : int { exp, sigmoid, silu, softplus, sin, cos };

struct AttentionTable {
  // y[i] = f(x[i])
  void (*elementwise)(Elementwise f, const float* x, int64_t n, float* y);
  // y = w * (x / sqrt(mean(x^2) + eps)); n is a multiple of 16, y may be x.
  void (*rms_norm)(const float* x, const float* w, float eps, int64_t n, float* y);
  // cosine[i], sine[i] of float(position * inv_freq[i]).
  void (*rotary_angles)(int64_t position, const float* inv_freq, int64_t half, float* cosine,
                        float* sine);
  // Rotates the pairs (i, half + i) of one head and scales it all.
  void (*rotate)(const float* x, const float* cosine, const float* sine, int64_t half, int64_t dim,
                 float scale, float* y);
  // The whole attention of a unit.
  void (*attend)(const AttentionUnit& unit);
  // One row and at most kTileQueries heads against one block: partial of head h at
  // partials + h * ld_partial.
  void (*attend_block)(const AttentionUnit& unit, int64_t block, float* partials,
                       int64_t ld_partial);
  // Merges the `blocks` partials of a head (each value_dim + kPartialHead floats) in order, then its
  // sink, unless that is null.
  void (*merge_blocks)(const float* partials, int64_t blocks, int64_t value_dim, const float* sink,
                       float* out);
  // The k that the rule chooses of n (ties: lower id) in ascending id order, and their weights.
  void (*route)(const float* logits, int n, int k, const RouterRule& rule, int32_t* ids,
                float* weights);
  // The same k, or more of them, best first (NaN last).
  void (*best)(const float* logits, int n, int k, const RouterRule& rule, int32_t* ids);
  // Row `lane` of a 16-row block of a table, dequantised.
  void (*table_row)(const LinearDesc& format, const uint8_t* row_block, int lane, float* out);
};

constexpr int kMaxExperts = 4096;  // of one router

}  // namespace aegis
