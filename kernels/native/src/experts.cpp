#include "experts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernel_table.h"

namespace aegis {

namespace {

constexpr int64_t kStreamNbytes = 32 << 10;  // weights of one expert per claim of the down phase
constexpr int64_t kGroupBlocks = kGroup / kLanes;

// Hands out consecutive pieces, each on a cache line.
class Carver {
public:
    explicit Carver(uint8_t* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        uint8_t* piece = base_ ? base_ + used_ : nullptr;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(piece);
    }
    int64_t used() const { return used_; }

private:
    uint8_t* base_;
    int64_t used_ = 0;
};

int64_t act_rows(const ExpertsShape& s) { return std::min(kActRows, s.max_tokens * s.per_token); }

int64_t shared_rows(const ExpertsShape& s) {
    return s.shared_intermediate ? std::min<int64_t>(kMaxTokens, s.max_tokens) : 0;
}

// Activations of a call of one row, routed ones first.
int64_t scaled_floats(const ExpertsShape& s) {
    return s.per_token * padded_ld(s.intermediate) + padded_ld(s.shared_intermediate);
}

int64_t scaled_groups(const ExpertsShape& s) {
    return s.per_token * (s.intermediate / kGroup) + s.shared_intermediate / kGroup;
}

// Result rows: one accumulator per token, or one result per pair of a few tokens.
int64_t result_rows(const ExpertsShape& s) {
    const int64_t few = std::min(s.max_tokens, kUnorderedRows);
    return std::max(s.max_tokens, few * (s.per_token + 2));
}

ExpertDescs at(const ExpertDescs& descs, const uint8_t* base) {
    ExpertDescs moved = descs;
    for (LinearDesc* d : {&moved.gate, &moved.up, &moved.down}) {
        d->data = base + reinterpret_cast<uintptr_t>(d->data);
        if (d->bias) d->bias = reinterpret_cast<const float*>(base + reinterpret_cast<uintptr_t>(d->bias));
    }
    return moved;
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

}  // namespace

int64_t Experts::scratch_nbytes(const ExpertsShape& s) {
    Carver carver(nullptr);
    carver.take<float>(s.max_tokens * (s.hidden / kGroup));
    carver.take<float>(result_rows(s) * s.hidden);
    carver.take<float>(s.max_tokens);
    carver.take<float>(act_rows(s) * padded_ld(s.intermediate));
    carver.take<float>(act_rows(s) * (s.intermediate / kGroup));
    carver.take<float>(shared_rows(s) * padded_ld(s.shared_intermediate));
    carver.take<float>(shared_rows(s) * (s.shared_intermediate / kGroup));
    carver.take<float>(s.hidden);
    carver.take<float>(scaled_floats(s));
    carver.take<int32_t>(scaled_groups(s));
    carver.take<int32_t>(s.experts + 1);
    carver.take<int32_t>(s.max_tokens * s.per_token);
    return carver.used();
}

Experts::Experts(Pool& pool, const ExpertsShape& shape, const SlotRange& slots, const ExpertDescs& routed,
                 const ExpertDescs* shared, const LinearDesc* shared_gate, uint8_t* scratch, int64_t scratch_nbytes,
                 float residual, std::optional<SwigluClamp> clamp)
    : pool_(pool), shape_(shape), slots_(slots), routed_(routed), has_shared_(shared), has_gate_(shared_gate),
      residual_(residual), clamp_(clamp) {
    const int64_t needed = Experts::scratch_nbytes(shape);
    if (scratch_nbytes < needed)
        refuse("the experts block needs " + std::to_string(needed) + " bytes of workspace but was given " +
               std::to_string(scratch_nbytes));
    if (shared) shared_ = *shared;
    if (shared_gate) shared_gate_ = *shared_gate;
    Carver carver(scratch);
    sums_ = carver.take<float>(shape.max_tokens * (shape.hidden / kGroup));
    acc_ = carver.take<float>(result_rows(shape) * shape.hidden);
    gates_ = carver.take<float>(shape.max_tokens);
    act_ = carver.take<float>(act_rows(shape) * padded_ld(shape.intermediate));
    act_sums_ = carver.take<float>(act_rows(shape) * (shape.intermediate / kGroup));
    shared_act_ = carver.take<float>(shared_rows(shape) * padded_ld(shape.shared_intermediate));
    shared_act_sums_ = carver.take<float>(shared_rows(shape) * (shape.shared_intermediate / kGroup));
    scaled_ = carver.take<float>(shape.hidden);
    scaled_act_ = carver.take<float>(scaled_floats(shape));
    scaled_ok_ = carver.take<int32_t>(scaled_groups(shape));
    offsets_ = carver.take<int32_t>(shape.experts + 1);
    pairs_ = carver.take<int32_t>(shape.max_tokens * shape.per_token);
    const int64_t few = std::min(shape.max_tokens, kUnorderedRows);
    partial_ = acc_ + few * shape.hidden;
    shared_out_ = partial_ + few * shape.per_token * shape.hidden;
    const int64_t tiles = shape.experts + (shape.per_token + 1) * shape.max_tokens / kMaxTokens + 2;
    tiles_.reserve(static_cast<size_t>(tiles));
    batches_.reserve(static_cast<size_t>(tiles + 1));
}

void Experts::begin(float* x, const float* normed, const int32_t* experts, const float* weights, int64_t tokens) {
    const FpEnvironment environment;
    start(x, normed, experts, weights, tokens);
    ordered_ = tokens > kUnorderedRows;
    clear_tiles();
    if (!ordered_) {
        prepare_rows(0, tokens);
        add_shared();
        if (has_shared_) pool_.run([this](Team& team) { compute(team); });
        return;
    }
    pool_.run([this](Team& team) {
        team.each(tokens_, 8, [this](int64_t begin, int64_t end) { prepare_rows(begin, end); });
    });
}

void Experts::add(const int32_t* experts, const int32_t* slots, int64_t count) {
    if (!active_) refuse("add was called before begin");
    clear_tiles();
    add_tiles(experts, slots, count);
    if (!tiles_.empty()) pool_.run([this](Team& team) { compute(team); });
}

void Experts::finish() {
    check_complete();
    active_ = false;
    clear_tiles();
    if (ordered_) add_shared();
    const auto body = [this](Team& team) {
        if (ordered_) compute(team);
        team.each(tokens_, 1, [this](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) combine(row);
        });
    };
    if (tokens_ == 1)
        Pool::run_inline(body);
    else
        pool_.run(body);
}

void Experts::run(float* x, const float* normed, const int32_t* experts, const float* weights, int64_t tokens,
                  const int32_t* ids, const int32_t* slots, int64_t count) {
    const FpEnvironment environment;
    start(x, normed, experts, weights, tokens);
    ordered_ = true;
    clear_tiles();
    add_tiles(ids, slots, count);
    check_complete();
    active_ = false;
    add_shared();
    if (tokens == 1) prepare_rows(0, 1);
    pool_.run([this](Team& team) {
        const auto prepare = [this](int64_t begin, int64_t end) { prepare_rows(begin, end); };
        const auto sum = [this](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) combine(row);
        };
        if (tokens_ > 1) team.each(tokens_, 4, prepare);
        compute(team);
        if (tokens_ > 1) team.each(tokens_, 4, sum);
    });
    if (tokens == 1) combine(0);
}

void Experts::start(float* x, const float* normed, const int32_t* experts, const float* weights, int64_t tokens) {
    if (tokens < 1 || tokens > shape_.max_tokens)
        refuse("an experts call of " + std::to_string(tokens) + " rows does not fit a workspace of " +
               std::to_string(shape_.max_tokens));
    active_ = false;
    x_ = x;
    normed_ = normed;
    chosen_ = experts;
    mix_ = weights;
    tokens_ = tokens;
    added_ = 0;
    last_expert_ = -1;
    scaled_ready_ = false;
    sort_pairs();
    active_ = true;
}

// Counting sort of the (row, choice) pairs by expert; rows stay ascending within an expert.
void Experts::sort_pairs() {
    const int64_t pairs = tokens_ * shape_.per_token;
    std::memset(offsets_, 0, static_cast<size_t>(shape_.experts + 1) * sizeof(int32_t));
    for (int64_t p = 0; p < pairs; ++p) {
        if (chosen_[p] < 0 || chosen_[p] >= shape_.experts)
            refuse("routing names expert " + std::to_string(chosen_[p]) + " of " + std::to_string(shape_.experts));
        ++offsets_[chosen_[p] + 1];
    }
    for (int64_t e = 0; e < shape_.experts; ++e) offsets_[e + 1] += offsets_[e];
    for (int64_t p = 0; p < pairs; ++p) pairs_[offsets_[chosen_[p]]++] = static_cast<int32_t>(p);
    for (int64_t e = shape_.experts; e > 0; --e) offsets_[e] = offsets_[e - 1];
    offsets_[0] = 0;
}

void Experts::prepare_rows(int64_t begin, int64_t end) {
    const int64_t hidden = shape_.hidden, groups = hidden / kGroup;
    for (int64_t row = begin; row < end; ++row) {
        kernels().row_sums(normed_ + row * hidden, hidden, sums_ + row * groups);
        std::memset(acc_ + row * hidden, 0, static_cast<size_t>(hidden) * sizeof(float));
    }
    // Not written for several rows, which several threads prepare.
    if (tokens_ == 1) scaled_ready_ = scale_inputs(routed_.gate, normed_, hidden, scaled_);
}

void Experts::clear_tiles() {
    tiles_.clear();
    batches_.assign(1, 0);
    act_used_ = 0;
}

void Experts::add_tiles(const int32_t* experts, const int32_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (experts[i] < 0 || experts[i] >= shape_.experts)
            refuse("expert " + std::to_string(experts[i]) + " does not exist; there are " +
                   std::to_string(shape_.experts));
        if (slots[i] < 0 || slots[i] >= slots_.count)
            refuse("slot " + std::to_string(slots[i]) + " does not exist; there are " + std::to_string(slots_.count));
        if (ordered_ && experts[i] <= last_expert_)
            refuse("experts of a call of more than " + std::to_string(kUnorderedRows) +
                   " rows must be added in ascending order");
        last_expert_ = experts[i];
        add_routed(at(routed_, slots_.base + slots[i] * slots_.stride), experts[i]);
    }
}

void Experts::add_routed(const ExpertDescs& weights, int32_t expert) {
    const int64_t ld = padded_ld(shape_.intermediate), groups = shape_.intermediate / kGroup;
    for (int64_t p = offsets_[expert]; p < offsets_[expert + 1];) {
        const int rows = static_cast<int>(std::min<int64_t>(kMaxTokens, offsets_[expert + 1] - p));
        if (act_used_ + rows > act_rows(shape_)) {
            batches_.push_back(static_cast<int32_t>(tiles_.size()));
            act_used_ = 0;
        }
        tiles_.push_back({weights, pairs_ + p, 0, rows, act_ + act_used_ * ld, act_sums_ + act_used_ * groups, ld, groups,
                          tokens_ == 1 ? scaled_act_ + act_used_ * ld : nullptr, scaled_ok_ + act_used_ * groups});
        act_used_ += rows;
        added_ += rows;
        p += rows;
    }
}

// The first tile joins the last routed batch; it has activations of its own.
void Experts::add_shared() {
    if (!has_shared_) return;
    const int64_t ld = padded_ld(shape_.shared_intermediate), groups = shape_.shared_intermediate / kGroup;
    for (int64_t first = 0; first < tokens_; first += kMaxTokens) {
        const int rows = static_cast<int>(std::min<int64_t>(kMaxTokens, tokens_ - first));
        if (first) batches_.push_back(static_cast<int32_t>(tiles_.size()));
        tiles_.push_back({shared_, nullptr, first, rows, shared_act_, shared_act_sums_, ld, groups,
                          tokens_ == 1 ? scaled_act_ + shape_.per_token * padded_ld(shape_.intermediate) : nullptr,
                          scaled_ok_ + shape_.per_token * (shape_.intermediate / kGroup)});
    }
}

void Experts::check_complete() const {
    if (!active_) refuse("finish was called before begin");
    if (added_ != tokens_ * shape_.per_token)
        refuse("the experts added answer " + std::to_string(added_) + " of " +
               std::to_string(tokens_ * shape_.per_token) + " choices: add every chosen expert once");
}

int64_t Experts::row_of(const Tile& tile, int t) const {
    return tile.pairs ? tile.pairs[t] / shape_.per_token : tile.first + t;
}

// Batch by batch: activations of all its tiles, a barrier, their down projections, a barrier.
void Experts::compute(Team& team) const {
    const int64_t blocks = shape_.hidden / kLanes, chunk = down_chunk(team.size);
    for (size_t b = 0; b < batches_.size(); ++b) {
        const int64_t first = batches_[b];
        const int64_t last = b + 1 < batches_.size() ? batches_[b + 1] : static_cast<int64_t>(tiles_.size());
        int64_t items = 0;
        for (int64_t i = first; i < last; ++i) items += tiles_[i].ld_sums + !tiles_[i].pairs;
        team.each(items, 1, [&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) {
                int64_t i = first, local = item;
                while (local >= tiles_[i].ld_sums + !tiles_[i].pairs) {
                    local -= tiles_[i].ld_sums + !tiles_[i].pairs;
                    ++i;
                }
                if (local < tiles_[i].ld_sums)
                    gate_up(tiles_[i], local);
                else
                    shared_gates(tiles_[i]);
            }
        });
        team.each((blocks + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item)
                for (int64_t i = first; i < last; ++i) {
                    const LinearDesc& after = tiles_[i + 1 < last ? i + 1 : first].weights.down;
                    const int64_t at = (i + 1 < last ? item : item + 1) * chunk;
                    down(tiles_[i], item * chunk, std::min(blocks, (item + 1) * chunk),
                         after.data + std::min(blocks, at) * after.row_block_nbytes());
                }
        });
    }
}

int64_t Experts::down_chunk(int team) const {
    const int64_t stream = kStreamNbytes / routed_.down.row_block_nbytes();
    const int64_t balance = shape_.hidden / kLanes / (4 * team);
    return std::max<int64_t>(2, std::min(stream, balance) / 2 * 2);
}

// 64 activations of each row: silu(gate) * up, and their sum for the down projection.
void Experts::gate_up(const Tile& tile, int64_t group) const {
    alignas(64) float gate[kMaxTokens][kGroup], up[kMaxTokens][kGroup];
    const float *x[kMaxTokens], *sums[kMaxTokens];
    float *gate_out[kMaxTokens], *up_out[kMaxTokens];
    for (int t = 0; t < tile.rows; ++t) {
        const int64_t row = row_of(tile, t);
        x[t] = normed_ + row * shape_.hidden;
        sums[t] = sums_ + row * (shape_.hidden / kGroup);
        gate_out[t] = gate[t];
        up_out[t] = up[t];
    }
    const int64_t begin = group * kGroupBlocks, end = begin + kGroupBlocks;
    TileArgs args{&tile.weights.gate, begin, end, tile.rows, x, sums, gate_out};
    args.out_base = group * kGroup;
    args.scaled = scaled_input(tile.weights.gate);
    args.next = tile.weights.up.data + begin * tile.weights.up.row_block_nbytes();
    kernels().linear_tile(args);
    args.w = &tile.weights.up;
    args.out = up_out;
    args.scaled = scaled_input(tile.weights.up);
    args.next = nullptr;
    if (end < tile.weights.gate.row_blocks())
        args.next = tile.weights.gate.data + end * tile.weights.gate.row_block_nbytes();
    kernels().linear_tile(args);
    for (int t = 0; t < tile.rows; ++t) {
        float* act = tile.act + t * tile.ld_act + group * kGroup;
        if (clamp_)
            kernels().clamped_swiglu(gate[t], up[t], *clamp_, act, kGroup);
        else
            kernels().silu_mul(gate[t], up[t], act, kGroup);
        kernels().row_sums(act, kGroup, tile.act_sums + t * tile.ld_sums + group);
    }
    if (tile.scaled_act)
        tile.scaled_ok[group] =
            scale_inputs(tile.weights.down, tile.act + group * kGroup, kGroup, tile.scaled_act + group * kGroup);
}

const float* Experts::scaled_input(const LinearDesc& w) const {
    return scaled_ready_ && w.kind == routed_.gate.kind ? scaled_ : nullptr;
}

const float* Experts::scaled_act(const Tile& tile) const {
    if (!tile.scaled_act) return nullptr;
    const bool ready = std::all_of(tile.scaled_ok, tile.scaled_ok + tile.ld_sums, [](int32_t ok) { return ok != 0; });
    return ready ? tile.scaled_act : nullptr;
}

void Experts::shared_gates(const Tile& tile) const {
    if (!has_gate_) {
        std::fill_n(gates_ + tile.first, tile.rows, 1.0f);
        return;
    }
    const float *x[kMaxTokens], *sums[kMaxTokens];
    float* out[kMaxTokens];
    for (int t = 0; t < tile.rows; ++t) {
        const int64_t row = tile.first + t;
        x[t] = normed_ + row * shape_.hidden;
        sums[t] = sums_ + row * (shape_.hidden / kGroup);
        out[t] = gates_ + row;
    }
    kernels().linear_tile({&shared_gate_, 0, 1, tile.rows, x, sums, out});
    for (int t = 0; t < tile.rows; ++t) *out[t] = kernels().sigmoid(*out[t]);
}

// Ordered: straight into the accumulator. Otherwise the result is kept until finish.
void Experts::down(const Tile& tile, int64_t block_begin, int64_t block_end, const uint8_t* next) const {
    const float *x[kMaxTokens], *sums[kMaxTokens];
    float* out[kMaxTokens];
    float weights[kMaxTokens];
    for (int t = 0; t < tile.rows; ++t) {
        const int64_t row = row_of(tile, t), pair = tile.pairs ? tile.pairs[t] : 0;
        x[t] = tile.act + t * tile.ld_act;
        sums[t] = tile.act_sums + t * tile.ld_sums;
        weights[t] = tile.pairs ? mix_[pair] : gates_[row];
        float* kept = tile.pairs ? partial_ + pair * shape_.hidden : shared_out_ + row * shape_.hidden;
        out[t] = (ordered_ ? acc_ + row * shape_.hidden : kept) + block_begin * kLanes;
    }
    TileArgs args{&tile.weights.down, block_begin, block_end, tile.rows, x, sums, out};
    args.out_base = block_begin * kLanes;
    args.scaled = scaled_act(tile);
    args.next = next;
    if (ordered_) args.weights = weights;
    kernels().linear_tile(args);
}

void Experts::combine(int64_t row) const {
    const int64_t hidden = shape_.hidden;
    float* acc = acc_ + row * hidden;
    if (!ordered_) {
        for (int64_t pair = row * shape_.per_token; pair < (row + 1) * shape_.per_token; ++pair)
            kernels().axpy(mix_[pair], partial_ + pair * hidden, acc, hidden);
        if (has_shared_) kernels().axpy(gates_[row], shared_out_ + row * hidden, acc, hidden);
    }
    kernels().axpy(residual_, acc, x_ + row * hidden, hidden);
}

}  // namespace aegis
