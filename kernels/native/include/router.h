// Softmax or sigmoids over the experts, and the choice of the best.
#pragma once

#include "attention.h"
#include "vmath.h"

namespace aegis::AEGIS_ISA {

constexpr int32_t kTaken = INT32_MIN;
constexpr int32_t kNaNKey = INT32_MIN + 1;

// Integers in the order of the floats, both zeros equal and NaN below everything, n padded to 16.
static void order_keys(const float* x, int n, int32_t* keys) {
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = add(load_first(x + i, n - i), zero());
    const i32x16 b = bits(v);
    i32x16 key = ixor(b, iand(isar<31>(b), iset1(INT32_MAX)));
    key = select(cmp_unord(v, v), iset1(kNaNKey), key);
    istore(keys + i, key);
  }
  for (int i = n; i % 16; ++i) keys[i] = kTaken;
}

// Index of the largest key, the lowest of equals; always one that was not taken, if there is any.
AEGIS_INLINE int largest_key(const int32_t* keys, int n) {
  i32x16 best = iload(keys);
  i32x16 where = izero();
  for (int i = 16; i < n; i += 16) {
    const i32x16 key = iload(keys + i);
    const mask16 better = icmp_gt(key, best);
    best = select(better, key, best);
    where = select(better, iset1(i), where);
  }
  int32_t lane_best[16], lane_where[16];
  istore(lane_best, best);
  istore(lane_where, where);
  int index = lane_where[0];
  for (int lane = 1; lane < 16; ++lane) {
    const int at = lane_where[lane] + lane;
    const int32_t now = keys[index];
    if (lane_best[lane] > now || (lane_best[lane] == now && at < index)) index = at;
  }
  return index;
}

static void largest(const float* x, int n, int k, int32_t* ids) {
  int32_t keys[kMaxExperts];
  order_keys(x, n, keys);
  for (int i = 0; i < k; ++i) {
    ids[i] = largest_key(keys, n);
    keys[ids[i]] = kTaken;
  }
}

// Probabilities of n logits. A NaN makes them all NaN, as it does elsewhere.
static void softmax(const float* logits, int n, float* p) {
  const f32x16 lowest = set1(-__builtin_inff());
  f32x16 m = lowest;
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = select(mask_first(n - i), load_first(logits + i, n - i), lowest);
    store(p + i, v);
    m = max(m, v);
  }
  const f32x16 shift = set1(reduce_max(m));
  f32x16 total = zero();
  for (int i = 0; i < n; i += 16) {
    const f32x16 e = exp(sub(load(p + i), shift));
    store(p + i, e);
    total = add(total, e);
  }
  const f32x16 sum = set1(reduce_add(total));
  for (int i = 0; i < n; i += 16) store(p + i, div(load(p + i), sum));
}

// Sum of the two largest of n scores.
AEGIS_INLINE float best_two(const float* scores, int n) {
  float first = -__builtin_inff(), second = first;
  for (int i = 0; i < n; ++i) {
    if (scores[i] > first) {
      second = first;
      first = scores[i];
    } else if (scores[i] > second) {
      second = scores[i];
    }
  }
  return first + second;
}

// Lowers the scores of all groups but the best ones below every other.
static void leave_groups(int n, const RouterRule& rule, float* scores) {
  const int each = n / rule.groups;
  float sums[kMaxExperts];
  int32_t ranked[kMaxExperts];
  for (int g = 0; g < rule.groups; ++g) sums[g] = best_two(scores + g * each, each);
  largest(sums, rule.groups, rule.groups, ranked);
  for (int g = rule.kept; g < rule.groups; ++g)
    for (int i = 0; i < each; ++i) scores[ranked[g] * each + i] = -__builtin_inff();
}

// What weights are taken from, and what the largest are chosen of.
static void score_logits(const float* logits, int n, const RouterRule& rule, float* p,
                         float* scores) {
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = sigmoid(load_first(logits + i, n - i));
    store(p + i, v);
    store(scores + i, rule.correction ? add(v, load_first(rule.correction + i, n - i)) : v);
  }
  if (rule.kept < rule.groups) leave_groups(n, rule, scores);
}

static void route(const float* logits, int n, int k, const RouterRule& rule, int32_t* ids,
                  float* weights) {
  float p[kMaxExperts];
  int32_t keys[kMaxExperts];
  if (rule.sigmoid) {
    float scores[kMaxExperts];
    score_logits(logits, n, rule, p, scores);
    order_keys(scores, n, keys);
  } else {
    softmax(logits, n, p);
    order_keys(p, n, keys);
  }
  for (int i = 0; i < k; ++i) {
    const int id = largest_key(keys, n);
    keys[id] = kTaken;
    int at = i;
    for (; at > 0 && ids[at - 1] > id; --at) ids[at] = ids[at - 1];
    ids[at] = id;
  }
  float sum = 0.0f;
  for (int i = 0; i < k; ++i) sum = sum + p[ids[i]];
  if (rule.sigmoid) sum = sum + 1e-20f;  // they may all be zero
  for (int i = 0; i < k; ++i)
    weights[i] = (rule.normalise ? p[ids[i]] / sum : p[ids[i]]) * rule.scaling;
}

static void best(const float* logits, int n, int k, const RouterRule& rule, int32_t* ids) {
  if (!rule.sigmoid) return largest(logits, n, k, ids);
  float p[kMaxExperts], scores[kMaxExperts];
  score_logits(logits, n, rule, p, scores);
  largest(scores, n, k, ids);
}

}  // namespace aegis::AEGIS_ISA
