#include "linear.h"

#include <algorithm>

#include "kernel_table.h"

namespace aegis {

namespace {

constexpr int64_t kChunkNbytes = 48 << 10;   // one claim of weights
constexpr int64_t kInlineNbytes = 48 << 10;  // weights times tokens not worth a dispatch
constexpr int kMaxJobs = 8;
constexpr int64_t kMaxScaled = 8192;  // inputs made ready on the stack

// Row blocks of one claim: even, large enough to stream, small enough to balance the team.
int64_t chunk_blocks(const LinearDesc& w, int team) {
    const int64_t stream = kChunkNbytes / w.row_block_nbytes();
    const int64_t balance = w.row_blocks() / (4 * team);
    return std::max<int64_t>(2, std::min(stream, balance) / 2 * 2);
}

}  // namespace

void linear_piece(const LinearJob& job, int64_t begin, int64_t end, int64_t t0, int tokens) {
    alignas(64) float scaled[kMaxScaled];
    const float *x[kMaxTokens], *sums[kMaxTokens], *add[kMaxTokens];
    float weights[kMaxTokens];
    float* out[kMaxTokens];
    for (int t = 0; t < tokens; ++t) {
        x[t] = job.in.x + (t0 + t) * job.in.ld;
        sums[t] = job.in.sums + (t0 + t) * job.in.ld_sums;
        out[t] = job.out + (t0 + t) * job.ld_out;
        if (job.add) add[t] = job.add + (t0 + t) * job.ld_add;
        if (job.weight) weights[t] = *job.weight;
    }
    TileArgs args{job.w, begin, end, tokens, x, sums, out};
    args.weights = job.weight ? weights : nullptr;
    args.add = job.add && !job.weight ? add : nullptr;
    const int64_t n = job.w->in_features;
    if (tokens == 1 && n <= kMaxScaled && scale_inputs(*job.w, x[0], n, scaled)) args.scaled = scaled;
    kernels().linear_tile(args);
}

void linear_phase(Team& team, const LinearJob* jobs, int count, int64_t tokens) {
    int64_t chunk[kMaxJobs], items[kMaxJobs], per_panel = 0;
    for (int j = 0; j < count; ++j) {
        chunk[j] = chunk_blocks(*jobs[j].w, team.size);
        items[j] = (jobs[j].w->row_blocks() + chunk[j] - 1) / chunk[j];
        per_panel += items[j];
    }
    const int64_t panels = (tokens + kMaxTokens - 1) / kMaxTokens;
    team.each(panels * per_panel, 1, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t t0 = begin / per_panel * kMaxTokens;
            int64_t local = begin % per_panel;
            int j = 0;
            while (local >= items[j]) local -= items[j++];
            const int64_t pieces = std::min(end - begin, items[j] - local);
            const int64_t first = local * chunk[j];
            const int64_t last = std::min(first + pieces * chunk[j], jobs[j].w->row_blocks());
            linear_piece(jobs[j], first, last, t0, static_cast<int>(std::min<int64_t>(kMaxTokens, tokens - t0)));
            begin += pieces;
        }
    });
}

void linear(Pool& pool, const LinearJob* jobs, int count, int64_t tokens) {
    int64_t work = 0;
    for (int j = 0; j < count; ++j) work += jobs[j].w->nbytes() * tokens;
    auto body = [&](Team& team) { linear_phase(team, jobs, count, tokens); };
    if (work < kInlineNbytes)
        Pool::run_inline(body);
    else
        pool.run(body);
}

}  // namespace aegis
