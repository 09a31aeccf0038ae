// Softmax attention of many heads over a cache, divided among a team.
#pragma once

#include "kernel_table.h"
#include "pool.h"

namespace aegis {

// Queries, rotated and scaled: head h of row r at q + r * ld_q + h * q_step; and where what they
// attend to goes.
struct Attended {
  const float* q;
  int64_t ld_q;
  int64_t q_step;
  float* out;
  int64_t ld_out;
  int64_t out_step;
  int64_t heads;
  float* partials;  // [heads][blocks][value_dim + kPartialHead], for a single row
  int64_t window = 0;            // how many positions a row sees; 0: all up to its own
  const float* sinks = nullptr;  // of every head, or null
};

// Rows at positions start.. over the positions up to their own.
void attend_rows(Team& team, const Attended& attended, const KVView& cache, int64_t start,
                 int64_t tokens);
// A single row, block by block of positions, so that a long context keeps every thread busy; then
// each head's blocks have to be merged.
void attend_blocks(Team& team, const Attended& attended, const KVView& cache, int64_t start);
void merge_head(const Attended& attended, const KVView& cache, int64_t start, int64_t head);

}  // namespace aegis
