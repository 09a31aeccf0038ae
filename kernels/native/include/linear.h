// Linear layers over layout il16: descriptors, and phases of a dispatch that compute them.
#pragma once

#include <cstdint>

#include "pool.h"

// Never emitted out of line: a copy compiled for a newer processor must not be the one linked.
#define AEGIS_ALWAYS_INLINE inline __attribute__((always_inline))

namespace aegis {

constexpr int64_t kGroup = 64;    // inputs that a sum is taken over, and of one dense block
constexpr int64_t kMostGroup = 128;  // inputs that may share a scale
constexpr int64_t kLanes = 16;    // rows of one block
constexpr int kMaxTokens = 64;    // rows of x that one tile call may cover

// The bits of a code; of dense numbers 0. A block of mxfp4 is two groups of 32 inputs: a scale for each
// takes the place of scale and bias.
enum class Kind : int {
    affine2 = 2, affine3 = 3, affine4 = 4, affine5 = 5, affine6 = 6, affine8 = 8, dense = 0, mxfp4 = 64
};
enum class DType : int { bf16 = 0, f16 = 1, f32 = 2, e8m0 = 3 };

// One weight in memory; made once when a model is opened.
struct LinearDesc {
    const uint8_t* data = nullptr;
    int64_t rows = 0;
    int64_t in_features = 0;
    Kind kind = Kind::dense;
    DType dtype = DType::f32;
    const float* bias = nullptr;  // [rows] or null
    int64_t group_size = kGroup;  // inputs that share a scale and a bias: 32, 64 or 128; of one block

    AEGIS_ALWAYS_INLINE int64_t groups() const { return in_features / kGroup; }
    AEGIS_ALWAYS_INLINE int64_t row_blocks() const { return (rows + kLanes - 1) / kLanes; }
    AEGIS_ALWAYS_INLINE int64_t number_nbytes() const {
        return dtype == DType::f32 ? 4 : dtype == DType::e8m0 ? 1 : 2;
    }
    AEGIS_ALWAYS_INLINE int64_t code_bits() const { return kind == Kind::mxfp4 ? 4 : static_cast<int>(kind); }
    AEGIS_ALWAYS_INLINE int64_t block_nbytes() const {
        if (kind == Kind::dense) return kGroup * kLanes * number_nbytes();
        return 2 * kLanes * number_nbytes() + kLanes * group_size * code_bits() / 8;
    }
    AEGIS_ALWAYS_INLINE int64_t row_block_nbytes() const { return in_features / group_size * block_nbytes(); }
    AEGIS_ALWAYS_INLINE int64_t nbytes() const { return row_blocks() * row_block_nbytes(); }
};

// Input rows with the sums of their groups of 64: sums[t * ld_sums + g], made by row_sums.
struct Rows {
    const float* x;
    int64_t ld;
    const float* sums;
    int64_t ld_sums;
};

// out[t] = [add[t] +] (W x[t] [+ bias]). add may be out itself.
struct LinearJob {
    const LinearDesc* w;
    Rows in;
    float* out;
    int64_t ld_out;
    const float* add = nullptr;
    int64_t ld_add = 0;
    const float* weight = nullptr;  // if given, `add` is `out`: out = fma(weight, product, out)
};

// Part of a dispatch: all jobs for `tokens` rows, shared over the team; returns when all of it is done.
void linear_phase(Team& team, const LinearJob* jobs, int count, int64_t tokens);

// Row blocks [begin, end) of a job for `tokens` rows from t0 on, at most kMaxTokens, by the caller.
void linear_piece(const LinearJob& job, int64_t begin, int64_t end, int64_t t0, int tokens);

// A dispatch of its own; runs on the caller alone where sharing would cost more than it saves.
void linear(Pool& pool, const LinearJob* jobs, int count, int64_t tokens);

// Row length in floats that keeps rows of n floats from falling into the same cache sets.
constexpr int64_t padded_ld(int64_t n) { return n + 16; }

}  // namespace aegis
