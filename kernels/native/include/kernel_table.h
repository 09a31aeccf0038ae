// The functions that exist once per instruction set, and the choice between them.
#pragma once

#include <cstdint>

#include "attention.h"
#include "delta.h"
#include "linear.h"

namespace aegis {

// Row blocks [block_begin, block_end) of one weight for up to kMaxTokens input rows.
//   y = W x [+ bias]
//   weights: out = fma(weights[t], y, out);  add: out = add + y;  neither: out = y
// out[t] and add[t] point at the value of row `out_base`.
struct TileArgs {
    const LinearDesc* w;
    int64_t block_begin;
    int64_t block_end;
    int tokens;
    const float* const* x;
    const float* const* sums;
    float* const* out;
    int64_t out_base = 0;
    const float* const* add = nullptr;
    const float* weights = nullptr;
    const float* scaled = nullptr;  // what scale_inputs made of the only token's x
    const uint8_t* next = nullptr;  // weights this thread reads after these; null: those that follow
};

// out = (up + 1) * gate * sigmoid(alpha * gate) of a gate of at most limit and an up from -limit to limit.
struct SwigluClamp {
    float limit;
    float alpha;
};

struct KernelTable {
    const char* name;
    void (*linear_tile)(const TileArgs& args);
    // Inputs [n] of one token for TileArgs::scaled. False: this kind has no such way, or these inputs
    // would change bits. Null where the instruction set has none.
    bool (*scale_inputs)(Kind kind, const float* x, int64_t n, float* out);
    // sums[g] = sum of x[64 g .. 64 g + 63] by a fixed tree; n is a multiple of 64.
    void (*row_sums)(const float* x, int64_t n, float* sums);
    // out = silu(gate) * up; n is a multiple of 16.
    void (*silu_mul)(const float* gate, const float* up, float* out, int64_t n);
    // The same as the clamp has it.
    void (*clamped_swiglu)(const float* gate, const float* up, SwigluClamp clamp, float* out, int64_t n);
    // y = fma(weight, x, y); n is a multiple of 16.
    void (*axpy)(float weight, const float* x, float* y, int64_t n);
    float (*sigmoid)(float x);
    // Measuring only: reads memory as fast as it can; and a loop of independent FMAs, returning their number.
    float (*read_probe)(const float* x, int64_t n);
    int64_t (*fma_probe)(int64_t rounds, float* sink);
    AttentionTable attention;
    DeltaTable delta;
};

// The table in use: the best one this processor runs, or what AEGIS_ISA or select_isa named.
const KernelTable& kernels();

// The same for the weight's codes, where it is fast on this processor; else false.
bool scale_inputs(const LinearDesc& w, const float* x, int64_t n, float* out);

// "avx512", "avx2", "neon" or "scalar"; false if this build or this processor lacks it.
bool select_isa(const char* name);
// The n-th available table's name, best first; null past the end.
const char* available_isa(int n);

}  // namespace aegis
