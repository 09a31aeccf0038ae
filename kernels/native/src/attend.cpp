#include "attend.h"

#include <algorithm>

namespace aegis {

namespace {

// The blocks of positions that a row sees some of.
struct Blocks {
  int64_t first, count;
};

Blocks blocks_of(int64_t position, int64_t window) {
  const int64_t first = first_seen(position, window) / kPositionBlock;
  return {first, position / kPositionBlock + 1 - first};
}

int64_t partial_floats(const KVView& cache) { return cache.value_dim + kPartialHead; }

// Queries of one unit of work.
int64_t unit_queries(int64_t dim) {
  const int64_t fit = kUnitFloats / dim / kTileQueries * kTileQueries;
  return std::min<int64_t>(kUnitQueries, fit);
}

// Rows of one unit of work: a power of two, so that tiles of eight queries come out even.
int64_t unit_rows(int64_t heads, int64_t queries) {
  int64_t rows = 1;
  while (2 * rows * heads <= queries) rows *= 2;
  return rows;
}

}  // namespace

// A unit is some rows and the heads that share a kv head, over all their positions.
void attend_rows(Team& team, const Attended& attended, const KVView& cache, int64_t start,
                 int64_t tokens) {
  const int64_t group = attended.heads / cache.kv_heads, queries = unit_queries(cache.dim);
  const int64_t heads = std::min(group, queries);
  const int64_t head_tiles = (group + heads - 1) / heads;
  const int64_t rows = unit_rows(heads, queries);
  const int64_t row_tiles = (tokens + rows - 1) / rows;
  const int64_t per_head = head_tiles * row_tiles;
  team.each(cache.kv_heads * per_head, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t kv_head = item / per_head;
      const int64_t row = item % row_tiles * rows;
      const int64_t local = item / row_tiles % head_tiles * heads;
      const int64_t head = kv_head * group + local;
      AttentionUnit unit;
      unit.q = attended.q + row * attended.ld_q + head * attended.q_step;
      unit.ld_q = attended.ld_q;
      unit.q_step = attended.q_step;
      unit.out = attended.out + row * attended.ld_out + head * attended.out_step;
      unit.ld_out = attended.ld_out;
      unit.out_step = attended.out_step;
      unit.keys = cache.head_keys(kv_head);
      unit.values = cache.head_values(kv_head);
      unit.dim = cache.dim;
      unit.value_dim = cache.value_dim;
      unit.first = start + row;
      unit.rows = static_cast<int>(std::min(rows, tokens - row));
      unit.heads = static_cast<int>(std::min(heads, group - local));
      unit.window = attended.window;
      unit.sinks = attended.sinks ? attended.sinks + head : nullptr;
      kernels().attention.attend(unit);
    }
  });
}

void attend_blocks(Team& team, const Attended& attended, const KVView& cache, int64_t start) {
  const int64_t group = attended.heads / cache.kv_heads;
  const int64_t heads = std::min<int64_t>(group, kTileQueries);
  const int64_t head_tiles = (group + heads - 1) / heads;
  const Blocks blocks = blocks_of(start, attended.window);
  const int64_t per_head = head_tiles * blocks.count;
  const int64_t ld_partial = blocks.count * partial_floats(cache);
  team.each(cache.kv_heads * per_head, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t kv_head = item / per_head;
      // Heads that share keys follow each other, while these are in a near cache.
      const int64_t local = item % head_tiles * heads;
      const int64_t block = item / head_tiles % blocks.count;
      const int64_t head = kv_head * group + local;
      AttentionUnit unit{};
      unit.q = attended.q + head * attended.q_step;
      unit.q_step = attended.q_step;
      unit.keys = cache.head_keys(kv_head);
      unit.values = cache.head_values(kv_head);
      unit.dim = cache.dim;
      unit.value_dim = cache.value_dim;
      unit.first = start;
      unit.rows = 1;
      unit.heads = static_cast<int>(std::min(heads, group - local));
      unit.window = attended.window;
      float* partials = attended.partials + head * ld_partial + block * partial_floats(cache);
      kernels().attention.attend_block(unit, blocks.first + block, partials, ld_partial);
    }
  });
}

void merge_head(const Attended& attended, const KVView& cache, int64_t start, int64_t head) {
  const int64_t blocks = blocks_of(start, attended.window).count;
  const float* partials = attended.partials + head * blocks * partial_floats(cache);
  kernels().attention.merge_blocks(partials, blocks, cache.value_dim,
                                   attended.sinks ? attended.sinks + head : nullptr,
                                   attended.out + head * attended.out_step);
}

}  // namespace aegis
