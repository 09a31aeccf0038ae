// The experts block: routed SwiGLU experts in slots, an optional shared expert, and the residual. The
// biases of an expert, if it has some, are added to what its matrices give.
//
// Per row: acc = 0; for its experts in ascending id acc = fma(weight, expert(x), acc); then the
// shared expert with weight sigmoid(gate) or 1; then out = fma(residual, acc, x), which is x + acc
// for a residual multiplier of 1. Up to kUnorderedRows rows the experts may be added in any order,
// because each result is kept and summed at the end.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernel_table.h"
#include "linear.h"

namespace aegis {

constexpr int64_t kUnorderedRows = 8;
constexpr int64_t kActRows = 128;  // (row, expert) pairs between two barriers

// One expert: data and biases hold offsets into a slot for routed ones, addresses for the shared one.
struct ExpertDescs {
    LinearDesc gate, up, down;
};

struct ExpertsShape {
    int64_t hidden;
    int64_t intermediate;
    int64_t shared_intermediate;  // 0: no shared expert
    int64_t experts;
    int64_t per_token;
    int64_t max_tokens;
};

struct SlotRange {
    uint8_t* base;
    int64_t stride;
    int64_t count;
};

class Experts {
public:
    // Scratch is a range of the workspace; refused where it is smaller than scratch_nbytes(shape).
    Experts(Pool& pool, const ExpertsShape& shape, const SlotRange& slots, const ExpertDescs& routed,
            const ExpertDescs* shared, const LinearDesc* shared_gate, uint8_t* scratch, int64_t scratch_nbytes,
            float residual = 1.0f, std::optional<SwigluClamp> clamp = {});

    static int64_t scratch_nbytes(const ExpertsShape& shape);

    // experts, weights: [tokens, per_token], ids ascending in a row. normed, x: [tokens, hidden].
    void begin(float* x, const float* normed, const int32_t* experts, const float* weights, int64_t tokens);
    void add(const int32_t* experts, const int32_t* slots, int64_t count);
    void finish();
    // begin, add and finish in one dispatch.
    void run(float* x, const float* normed, const int32_t* experts, const float* weights, int64_t tokens,
             const int32_t* ids, const int32_t* slots, int64_t count);

private:
    // Up to kMaxTokens rows of one expert. pairs: indices row * per_token + choice; null: shared,
    // whose rows are first, first + 1, ...
    struct Tile {
        ExpertDescs weights;
        const int32_t* pairs;
        int64_t first;
        int rows;
        float* act;
        float* act_sums;
        int64_t ld_act;
        int64_t ld_sums;
        float* scaled_act;   // act for TileArgs::scaled, where the call has one row; else null
        int32_t* scaled_ok;  // per group of 64, whether it may be used
    };

    void start(float* x, const float* normed, const int32_t* experts, const float* weights, int64_t tokens);
    void sort_pairs();
    void prepare_rows(int64_t begin, int64_t end);
    void clear_tiles();
    void add_tiles(const int32_t* experts, const int32_t* slots, int64_t count);
    void add_routed(const ExpertDescs& weights, int32_t expert);
    void add_shared();
    void check_complete() const;
    int64_t row_of(const Tile& tile, int t) const;
    void compute(Team& team) const;
    void gate_up(const Tile& tile, int64_t group) const;
    const float* scaled_input(const LinearDesc& w) const;
    const float* scaled_act(const Tile& tile) const;
    void shared_gates(const Tile& tile) const;
    void down(const Tile& tile, int64_t block_begin, int64_t block_end, const uint8_t* next) const;
    void combine(int64_t row) const;
    int64_t down_chunk(int team) const;

    Pool& pool_;
    ExpertsShape shape_;
    SlotRange slots_;
    ExpertDescs routed_;
    ExpertDescs shared_;
    LinearDesc shared_gate_;
    bool has_shared_, has_gate_;
    float residual_;
    std::optional<SwigluClamp> clamp_;

    float *sums_, *acc_, *partial_, *shared_out_, *gates_, *act_, *act_sums_, *shared_act_, *shared_act_sums_;
    float *scaled_, *scaled_act_;  // the same of a single row, for TileArgs::scaled
    int32_t* scaled_ok_;
    bool scaled_ready_ = false;
    int32_t *offsets_, *pairs_;

    float* x_ = nullptr;
    const float* normed_ = nullptr;
    const int32_t* chosen_ = nullptr;
    const float* mix_ = nullptr;
    int64_t tokens_ = 0, added_ = 0, act_used_ = 0;
    int32_t last_expert_ = -1;
    bool ordered_ = false, active_ = false;
    std::vector<Tile> tiles_;
    std::vector<int32_t> batches_;  // index of each batch's first tile
};

}  // namespace aegis
