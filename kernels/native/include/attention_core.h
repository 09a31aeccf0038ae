// Softmax attention over blocks of 256 positions: scores with a position per lane, values with a
// channel per lane. Every lane is one chain of FMAs in a fixed order, so the register tiles below
// are free to differ between instruction sets.
#pragma once

#include "attention.h"
#include "vmath.h"

namespace aegis::AEGIS_ISA {

// What one register tile holds: queries at most, vectors of 16 keys, accumulators of values.
#if defined(AEGIS_ISA_AVX512)
constexpr int kQueries = 8;
constexpr int kKeyVectors = 2;
constexpr int kValueRegisters = 16;
#else
constexpr int kQueries = 4;
constexpr int kKeyVectors = 1;
constexpr int kValueRegisters = 4;
#endif
// Values that pass through all channels together: with those of the next run, which are fetched
// meanwhile, they fit the first-level cache.
constexpr int64_t kRunFloats = 2048;

// Of one query in a block: 16 more than there may be, so that rows do not fall into the same cache
// sets.
constexpr int64_t kValueRow = kMaxValueDim + 16;

struct Block {
  float scores[kTileQueries * kPositionBlock];  // [query][position]
  float values[kTileQueries * kValueRow];       // [query][value_dim]
  float maximum[kTileQueries];
  float sum[kTileQueries];
};

// scores[q][16 p + lane] for NQ queries, packed as q[dim][kTileQueries], and NP vectors of keys.
template <int NQ, int NP>
AEGIS_INLINE void score_tile(const float* q, const float* keys, int64_t dim, float* scores) {
  f32x16 acc[NQ][NP];
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p) acc[i][p] = zero();
  for (int64_t d = 0; d < dim; ++d) {
    f32x16 key[NP];
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p) {
      key[p] = load(keys + (p * dim + d) * kKeyLanes);
      prefetch(keys + ((p + NP) * dim + d) * kKeyLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; ++i) {
      const f32x16 broadcast = set1(q[d * kTileQueries + i]);
#pragma GCC unroll 2
      for (int p = 0; p < NP; ++p) acc[i][p] = fma(key[p], broadcast, acc[i][p]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p) store(scores + i * kPositionBlock + p * kKeyLanes, acc[i][p]);
}

template <int NQ>
static void score_queries(const float* q, const float* keys, int64_t dim, int vectors,
                          float* scores) {
  int v = 0;
  for (; v + kKeyVectors <= vectors; v += kKeyVectors)
    score_tile<NQ, kKeyVectors>(q, keys + v * dim * kKeyLanes, dim, scores + v * kKeyLanes);
  for (; v < vectors; ++v)
    score_tile<NQ, 1>(q, keys + v * dim * kKeyLanes, dim, scores + v * kKeyLanes);
}

static void score(int count, const float* q, const float* keys, int64_t dim, int vectors,
                  float* scores) {
  while (count > 0) {
    const int n = count < kQueries ? count : kQueries;
    switch (n) {
#if defined(AEGIS_ISA_AVX512)
      case 8: score_queries<8>(q, keys, dim, vectors, scores); break;
      case 7: score_queries<7>(q, keys, dim, vectors, scores); break;
      case 6: score_queries<6>(q, keys, dim, vectors, scores); break;
      case 5: score_queries<5>(q, keys, dim, vectors, scores); break;
#endif
      case 4: score_queries<4>(q, keys, dim, vectors, scores); break;
      case 3: score_queries<3>(q, keys, dim, vectors, scores); break;
      case 2: score_queries<2>(q, keys, dim, vectors, scores); break;
      default: score_queries<1>(q, keys, dim, vectors, scores); break;
    }
    count -= n;
    q += n;
    scores += n * kPositionBlock;
  }
}

// Scores of positions [from, to) to weights e^(score - maximum) in place. Lanes past the query's own
// position hold garbage keys' scores, NaN perhaps: they are replaced before anything is computed
// from them, as are those ahead of its window. Vectors ahead of it would add nothing.
AEGIS_INLINE void soften(float* scores, int from, int to, float* maximum, float* sum) {
  const f32x16 lowest = set1(-__builtin_inff());
  const int start = from / kKeyLanes * kKeyLanes;
  const int whole = to / kKeyLanes * kKeyLanes;
  const int rest = to - whole;
  if (rest) {
    const f32x16 s = load(scores + whole);
    store(scores + whole, select(mask_first(rest), s, lowest));
  }
  if (from > start) {
    const f32x16 s = load(scores + start);
    store(scores + start, select(mask_first(from - start), lowest, s));
  }
  f32x16 m = lowest;
  for (int p = start; p < to; p += kKeyLanes) m = max(m, load(scores + p));
  *maximum = reduce_max(m);
  const f32x16 shift = set1(*maximum);
  f32x16 total = zero();
  for (int p = start; p < to; p += kKeyLanes) {
    const f32x16 weight = exp(sub(load(scores + p), shift));
    store(scores + p, weight);
    total = add(total, weight);
  }
  *sum = reduce_add(total);
}

// out[q][c] += weights[q][p] * values[p][c] for p in [0, count) in order, 16 NC channels. Fetches
// as much from `ahead` as it uses: fetched all at once, the next run would stall this one.
template <int NQ, int NC>
AEGIS_INLINE void mix_tile(const float* weights, const float* values, int64_t dim, int count,
                           const float* ahead, float* out) {
  f32x16 acc[NQ][NC];
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < NC; ++c) acc[i][c] = load(out + i * kValueRow + 16 * c);
  for (int p = 0; p < count; ++p) {
    f32x16 value[NC];
#pragma GCC unroll 16
    for (int c = 0; c < NC; ++c) {
      value[c] = load(values + p * dim + 16 * c);
      prefetch(ahead + (p * NC + c) * 16);
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; ++i) {
      const f32x16 broadcast = set1(weights[i * kPositionBlock + p]);
#pragma GCC unroll 16
      for (int c = 0; c < NC; ++c) acc[i][c] = fma(value[c], broadcast, acc[i][c]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < NC; ++c) store(out + i * kValueRow + 16 * c, acc[i][c]);
}

// All channels from c on that NC vectors fit into; then the rest with fewer vectors.
template <int NQ, int NC>
AEGIS_INLINE void mix_channels(const float* weights, const float* values, int64_t dim, int count,
                               int64_t c, float* out) {
  for (; c + 16 * NC <= dim; c += 16 * NC)
    mix_tile<NQ, NC>(weights, values + c, dim, count, values + (dim + c) * count, out + c);
  if constexpr (NC > 1)
    if (c < dim) mix_channels<NQ, NC / 2>(weights, values, dim, count, c, out);
}

template <int NQ>
static void mix_queries(const float* weights, const float* values, int64_t dim, int begin, int end,
                        float* out) {
  constexpr int fit = kValueRegisters / NQ;
  constexpr int NC = fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
  const int run = (int)(kRunFloats / dim);
  for (int p = begin; p < end; p += run)
    mix_channels<NQ, NC>(weights + p, values + p * dim, dim, p + run < end ? run : end - p, 0, out);
}

static void mix(int count, const float* weights, const float* values, int64_t dim, int begin,
                int end, float* out) {
  while (count > 0) {
    const int n = count < kQueries ? count : kQueries;
    switch (n) {
#if defined(AEGIS_ISA_AVX512)
      case 8: mix_queries<8>(weights, values, dim, begin, end, out); break;
      case 7: mix_queries<7>(weights, values, dim, begin, end, out); break;
      case 6: mix_queries<6>(weights, values, dim, begin, end, out); break;
      case 5: mix_queries<5>(weights, values, dim, begin, end, out); break;
#endif
      case 4: mix_queries<4>(weights, values, dim, begin, end, out); break;
      case 3: mix_queries<3>(weights, values, dim, begin, end, out); break;
      case 2: mix_queries<2>(weights, values, dim, begin, end, out); break;
      default: mix_queries<1>(weights, values, dim, begin, end, out); break;
    }
    count -= n;
    weights += n * kPositionBlock;
    out += n * kValueRow;
  }
}

// `count` queries at positions[0..count) (not decreasing, each seeing some of the block) against
// the block of positions that starts at `base`.
static void run_block(const AttentionUnit& unit, const float* q, int count,
                      const int64_t* positions, int64_t base, Block& block) {
  int from[kTileQueries], to[kTileQueries];
  for (int i = 0; i < count; ++i) {
    const int64_t n = positions[i] - base + 1, first = first_seen(positions[i], unit.window) - base;
    from[i] = (int)(first > 0 ? first : 0);
    to[i] = (int)(n < kPositionBlock ? n : kPositionBlock);
  }
  const int skipped = from[0] / kKeyLanes;
  const int vectors = (to[count - 1] + kKeyLanes - 1) / kKeyLanes - skipped;
  score(count, q, unit.keys + (base + skipped * kKeyLanes) * unit.dim, unit.dim, vectors,
        block.scores + skipped * kKeyLanes);
  for (int i = 0; i < count; ++i)
    soften(block.scores + i * kPositionBlock, from[i], to[i], &block.maximum[i], &block.sum[i]);

  const int64_t dim = unit.value_dim;
  for (int i = 0; i < count; ++i)
    for (int64_t c = 0; c < dim; c += 16) store(block.values + i * kValueRow + c, zero());
  const float* values = unit.values + base * dim;
  const auto alone = [&](int i, int begin, int end) {
    if (begin < end)
      mix_queries<1>(block.scores + i * kPositionBlock, values, dim, begin, end,
                     block.values + i * kValueRow);
  };
  // Rows of a tile begin and end at different positions; a row never multiplies a value that it does
  // not see, and takes those that it does in their order.
  const int begin = from[count - 1], end = begin < to[0] ? to[0] : begin;
  for (int i = 0; i < count; ++i) alone(i, from[i], begin < to[i] ? begin : to[i]);
  if (begin < end) mix(count, block.scores, values, dim, begin, end, block.values);
  for (int i = 0; i < count; ++i) alone(i, from[i] < end ? end : from[i], to[i]);
}

// Adds a block's result to the running one: both are brought to the larger maximum.
AEGIS_INLINE void merge(float* maximum, float* sum, float* out, float block_maximum,
                        float block_sum, const float* block_values, int64_t dim) {
  const float m = *maximum > block_maximum ? *maximum : block_maximum;
  const float keep = exp1(*maximum - m);
  const float take = exp1(block_maximum - m);
  *maximum = m;
  *sum = fma1(*sum, keep, block_sum * take);
  for (int64_t c = 0; c < dim; c += 16)
    store(out + c, fma(load(out + c), set1(keep), mul(load(block_values + c), set1(take))));
}

// Divides a head's result by the sum of its weights, to which a sink adds one of no value.
AEGIS_INLINE void finish_row(float* out, float maximum, float sum, const float* sink, int64_t dim) {
  float factor = 1.0f / sum;
  if (sink) {
    const float m = maximum > *sink ? maximum : *sink;
    const float keep = exp1(maximum - m);
    factor = keep / fma1(sum, keep, exp1(*sink - m));
  }
  for (int64_t c = 0; c < dim; c += 16) store(out + c, mul(load(out + c), set1(factor)));
}

// q[tile][dim][kTileQueries]: what a tile broadcasts lies in one stream.
static void pack_queries(const AttentionUnit& unit, float* packed) {
  for (int i = 0; i < unit.rows * unit.heads; ++i) {
    const float* q = unit.q + i / unit.heads * unit.ld_q + i % unit.heads * unit.q_step;
    float* to = packed + i / kTileQueries * kTileQueries * unit.dim + i % kTileQueries;
    for (int64_t d = 0; d < unit.dim; ++d) to[d * kTileQueries] = q[d];
  }
}

// Where the i-th of a unit's queries has its result.
AEGIS_INLINE float* output_of(const AttentionUnit& unit, int i) {
  return unit.out + i / unit.heads * unit.ld_out + i % unit.heads * unit.out_step;
}

static void attend(const AttentionUnit& unit) {
  float packed[kUnitFloats];
  float maximum[kUnitQueries], sum[kUnitQueries];
  int64_t positions[kUnitQueries];
  Block block;
  const int total = unit.rows * unit.heads;
  pack_queries(unit, packed);
  for (int i = 0; i < total; ++i) positions[i] = unit.first + i / unit.heads;

  const auto first_of = [&](int i) { return first_seen(positions[i], unit.window); };
  for (int64_t base = first_of(0) / kPositionBlock * kPositionBlock; base <= positions[total - 1];
       base += kPositionBlock)
    for (int tile = 0; tile < total; tile += kTileQueries) {
      int begin = tile;
      int end = tile + kTileQueries < total ? tile + kTileQueries : total;
      while (begin < end && positions[begin] < base) ++begin;
      while (begin < end && first_of(end - 1) >= base + kPositionBlock) --end;
      if (begin == end) continue;
      const float* q = packed + tile * unit.dim + (begin - tile);
      run_block(unit, q, end - begin, positions + begin, base, block);
      for (int i = begin; i < end; ++i) {
        float* out = output_of(unit, i);
        const float* values = block.values + (i - begin) * kValueRow;
        if (base <= first_of(i)) {
          maximum[i] = block.maximum[i - begin];
          sum[i] = block.sum[i - begin];
          for (int64_t c = 0; c < unit.value_dim; c += 16) store(out + c, load(values + c));
        } else {
          merge(&maximum[i], &sum[i], out, block.maximum[i - begin], block.sum[i - begin], values,
                unit.value_dim);
        }
      }
    }
  for (int i = 0; i < total; ++i)
    finish_row(output_of(unit, i), maximum[i], sum[i],
               unit.sinks ? unit.sinks + i % unit.heads : nullptr, unit.value_dim);
}

static void attend_block(const AttentionUnit& unit, int64_t index, float* partials,
                         int64_t ld_partial) {
  float packed[kTileQueries * kMaxKeyDim];
  int64_t positions[kTileQueries];
  Block block;
  pack_queries(unit, packed);
  for (int i = 0; i < unit.heads; ++i) positions[i] = unit.first;
  run_block(unit, packed, unit.heads, positions, index * kPositionBlock, block);
  for (int i = 0; i < unit.heads; ++i) {
    float* partial = partials + i * ld_partial;
    partial[0] = block.maximum[i];
    partial[1] = block.sum[i];
    for (int64_t c = 0; c < unit.value_dim; c += 16)
      store(partial + kPartialHead + c, load(block.values + i * kValueRow + c));
  }
}

static void merge_blocks(const float* partials, int64_t blocks, int64_t dim, const float* sink,
                         float* out) {
  float maximum = partials[0];
  float sum = partials[1];
  for (int64_t c = 0; c < dim; c += 16) store(out + c, load(partials + kPartialHead + c));
  for (int64_t b = 1; b < blocks; ++b) {
    const float* partial = partials + b * (dim + kPartialHead);
    merge(&maximum, &sum, out, partial[0], partial[1], partial + kPartialHead, dim);
  }
  finish_row(out, maximum, sum, sink, dim);
}

}  // namespace aegis::AEGIS_ISA
