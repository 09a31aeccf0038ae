// The model's blocks over kernels that only touch what real ones read and write, so that a build with
// ThreadSanitizer takes seconds and sees every access of the threads to shared memory.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "delta_block.h"
#include "experts.h"
#include "kernel_table.h"
#include "latent_block.h"

namespace aegis {

namespace {

// The sum matters to nobody, but keeps the reads.
float touch(const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

void fill(float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) x[i] = value;
}

void linear_tile(const TileArgs& args) {
  for (int t = 0; t < args.tokens; ++t) {
    float value = touch(args.x[t], args.w->in_features) + touch(args.sums[t], args.w->groups());
    if (args.scaled) value += touch(args.scaled, args.w->in_features);
    const int64_t first = args.block_begin * kLanes;
    const int64_t last = std::min(args.block_end * kLanes, args.w->rows);
    for (int64_t row = first; row < last; ++row) {
      float* out = args.out[t] + (row - args.out_base);
      if (args.weights) value += *out * args.weights[t];
      if (args.add) value += args.add[t][row - args.out_base];
      *out = value;
    }
  }
}

void row_sums(const float* x, int64_t n, float* sums) { fill(sums, n / kGroup, touch(x, n)); }
void silu_mul(const float* gate, const float* up, float* out, int64_t n) {
  fill(out, n, touch(gate, n) + touch(up, n));
}
void clamped_swiglu(const float* gate, const float* up, SwigluClamp, float* out, int64_t n) {
  silu_mul(gate, up, out, n);
}
void axpy(float weight, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += weight * x[i];
}
float sigmoid(float x) { return x; }
bool copy_scaled(Kind, const float* x, int64_t n, float* out) {
  fill(out, n, touch(x, n));
  return true;
}
int64_t fma_probe(int64_t rounds, float*) { return rounds; }

void rms_norm(const float* x, const float* w, float, int64_t n, float* y) {
  fill(y, n, touch(x, n) + touch(w, n));
}
void rotary_angles(int64_t, const float* inv_freq, int64_t half, float* cosine, float* sine) {
  fill(cosine, half, touch(inv_freq, half));
  fill(sine, half, 0);
}
void rotate(const float* x, const float* cosine, const float* sine, int64_t half, int64_t dim, float,
            float* y) {
  fill(y, dim, touch(x, dim) + touch(cosine, half) + touch(sine, half));
}
// Keys and values up to the last row's own position.
float touch_cache(const AttentionUnit& unit) {
  float sum = 0;
  const int64_t positions = unit.first + unit.rows;
  for (int64_t p = 0; p < positions; ++p)
    for (int64_t d = 0; d < unit.dim; ++d)
      sum += unit.keys[(p / kKeyLanes * unit.dim + d) * kKeyLanes + p % kKeyLanes];
  return sum + touch(unit.values, positions * unit.value_dim);
}
void attend(const AttentionUnit& unit) {
  const float seen = touch_cache(unit);
  for (int row = 0; row < unit.rows; ++row)
    for (int head = 0; head < unit.heads; ++head)
      fill(unit.out + row * unit.ld_out + head * unit.out_step, unit.value_dim,
           seen + touch(unit.q + row * unit.ld_q + head * unit.dim, unit.dim));
}
void attend_block(const AttentionUnit& unit, int64_t, float* partials, int64_t ld_partial) {
  const float seen = touch_cache(unit) + touch(unit.q, unit.heads * unit.dim);
  for (int head = 0; head < unit.heads; ++head)
    fill(partials + head * ld_partial, unit.value_dim + kPartialHead, seen);
}
void merge_blocks(const float* partials, int64_t blocks, int64_t dim, const float*, float* out) {
  fill(out, dim, touch(partials, blocks * (dim + kPartialHead)));
}
void route(const float* logits, int n, int k, const RouterRule&, int32_t* ids, float* weights) {
  fill(weights, k, touch(logits, n));
  for (int i = 0; i < k; ++i) ids[i] = i;
}
void best(const float* logits, int n, int k, const RouterRule&, int32_t* ids) {
  const bool first = touch(logits, n) < 0;
  for (int i = 0; i < k; ++i) ids[i] = first ? n - 1 - i : i;
}

void convolve(const ConvolutionUnit& unit) {
  float sum = 0;
  for (int64_t row = 0; row < unit.rows; ++row) sum += touch(unit.x + row * unit.ld, unit.channels);
  for (int i = 0; i < unit.count; ++i) sum += touch(unit.taps + i * unit.ld_taps, unit.channels);
  for (int i = 0; i + 1 < unit.count; ++i) {
    float* inputs = unit.inputs + i * unit.ld_inputs;
    fill(inputs, unit.channels, touch(inputs, unit.channels));
  }
  for (int64_t row = 0; row < unit.rows; ++row) fill(unit.x + row * unit.ld, unit.channels, sum);
}
void to_unit(float* x, int64_t n, float) { fill(x, n, touch(x, n)); }
void gates(float* a, float* b, const float* a_log, const float* dt_bias, int64_t n) {
  fill(a, n, touch(a, n) + touch(a_log, n) + touch(dt_bias, n));
  fill(b, n, touch(b, n));
}
void recur(const DeltaUnit& unit) {
  const int64_t channels = 16 * unit.panels;
  float sum = touch(unit.state, channels * unit.key_dim);
  for (int64_t row = 0; row < unit.rows; ++row) {
    sum += touch(unit.q + row * unit.ld, unit.key_dim) + touch(unit.k + row * unit.ld, unit.key_dim);
    sum += touch(unit.v + row * unit.ld, channels);
    sum += unit.decay[row * unit.ld_gates] + unit.beta[row * unit.ld_gates];
    fill(unit.out + row * unit.ld_out, channels, sum);
  }
  fill(unit.state, channels * unit.key_dim, sum);
}
void gated_norm(float* x, const float* w, float, const float* z, int64_t n) {
  fill(x, n, touch(x, n) + touch(w, n) + touch(z, n));
}
void sigmoid_mul(float* x, const float* gate, int64_t n) { fill(x, n, touch(x, n) + touch(gate, n)); }

}  // namespace

// The only table of this program.
const KernelTable& table_scalar() {
  static const KernelTable table = [] {
    KernelTable made{};
    made.name = "touch";
    made.linear_tile = linear_tile;
    made.row_sums = row_sums;
    made.silu_mul = silu_mul;
    made.clamped_swiglu = clamped_swiglu;
    made.axpy = axpy;
    made.sigmoid = sigmoid;
    made.scale_inputs = copy_scaled;
    made.fma_probe = fma_probe;
    AttentionTable& blocks = made.attention;
    blocks.rms_norm = rms_norm;
    blocks.rotary_angles = rotary_angles;
    blocks.rotate = rotate;
    blocks.attend = attend;
    blocks.attend_block = attend_block;
    blocks.merge_blocks = merge_blocks;
    blocks.route = route;
    blocks.best = best;
    made.delta = {convolve, to_unit, gates, recur, gated_norm, sigmoid_mul};
    return made;
  }();
  return table;
}

}  // namespace aegis

namespace {

using namespace aegis;

constexpr int64_t kHidden = 128, kInner = 192, kNumExperts = 12, kMost = 40;
constexpr int kChoices = 3;

LinearDesc desc(int64_t rows, int64_t in_features) {
  LinearDesc made;  // no data: these kernels read none
  made.rows = rows;
  made.in_features = in_features;
  made.kind = Kind::affine4;
  made.dtype = DType::bf16;
  return made;
}

void stress_experts(Pool& pool, int64_t tokens, std::optional<SwigluClamp> clamp) {
  const ExpertsShape shape{kHidden, kInner, kInner, kNumExperts, kChoices, kMost};
  const ExpertDescs parts{desc(kInner, kHidden), desc(kInner, kHidden), desc(kHidden, kInner)};
  const LinearDesc gate = desc(1, kHidden);
  std::vector<float> scratch(static_cast<size_t>(Experts::scratch_nbytes(shape) / 4));
  std::vector<uint8_t> slots(64);
  const int64_t nbytes = static_cast<int64_t>(scratch.size()) * 4;
  Experts block(pool, shape, {slots.data(), 0, kNumExperts}, parts, &parts, &gate,
                reinterpret_cast<uint8_t*>(scratch.data()), nbytes, 1.0f, clamp);
  std::vector<float> x(static_cast<size_t>(tokens * kHidden)), normed = x;
  std::vector<float> weights(static_cast<size_t>(tokens * kChoices));
  std::vector<int32_t> chosen, ids;
  for (int64_t t = 0; t < tokens; ++t)
    for (int choice = 0; choice < kChoices; ++choice)
      chosen.push_back(static_cast<int32_t>((t % (kNumExperts / kChoices)) * kChoices + choice));
  for (int32_t id = 0; id < kNumExperts && id < tokens * kChoices; ++id) ids.push_back(id);
  const int64_t count = static_cast<int64_t>(ids.size());
  block.run(x.data(), normed.data(), chosen.data(), weights.data(), tokens, ids.data(), ids.data(), count);
  block.begin(x.data(), normed.data(), chosen.data(), weights.data(), tokens);
  for (int32_t id : ids) block.add(&id, &id, 1);
  block.finish();
}

struct AttentionMemory {
  std::vector<float> norm = std::vector<float>(kHidden), scratch = std::vector<float>(1 << 20);
  std::vector<float> cache = std::vector<float>(1 << 16), x = std::vector<float>(kMost * kHidden);
};

void stress_attention(Pool& pool, AttentionMemory& memory, int64_t window) {
  constexpr int64_t heads = 8, kv_heads = 2, dim = 32, context = 64;
  AttentionBlock::Spec spec{};
  spec.hidden = kHidden, spec.heads = heads, spec.kv_heads = kv_heads, spec.dim = dim;
  spec.max_tokens = kMost, spec.context = context, spec.eps = 1e-6f;
  spec.inv_freq = std::vector<float>(dim / 2);
  spec.norm = memory.norm.data();
  spec.q = desc(heads * dim, kHidden), spec.o = desc(kHidden, heads * dim);
  spec.k = spec.v = desc(kv_heads * dim, kHidden);
  spec.window = window, spec.sinks = window ? memory.norm.data() : nullptr;
  const AttentionBlock block(pool, spec, Scratch(memory.scratch.data(), int64_t{4} << 20));
  float* keys = memory.cache.data();
  const KVView view{keys, keys + kv_heads * context * dim, context, kv_heads, dim, dim};
  int64_t start = 0;
  for (int64_t tokens : {int64_t{17}, int64_t{1}, int64_t{30}, int64_t{1}}) {
    block.run(memory.x.data(), tokens, view, start);
    start += tokens;
  }
}

void stress_delta(Pool& pool, AttentionMemory& memory) {
  DeltaBlock::Spec spec{};
  spec.hidden = kHidden, spec.key_heads = 2, spec.value_heads = 8;
  spec.key_dim = 16, spec.value_dim = 32, spec.taps = 4, spec.max_tokens = kMost, spec.eps = 1e-6f;
  std::vector<float> vectors(static_cast<size_t>(spec.taps * spec.channels()));
  spec.norm = memory.norm.data();
  spec.conv = spec.a_log = spec.dt_bias = spec.out_norm = vectors.data();
  spec.qkv = desc(spec.channels(), kHidden), spec.z = desc(spec.values(), kHidden);
  spec.a = spec.b = desc(spec.value_heads, kHidden), spec.out = desc(kHidden, spec.values());
  const DeltaBlock block(pool, spec, Scratch(memory.scratch.data(), int64_t{4} << 20));
  const DeltaState state{memory.cache.data(), memory.cache.data() + spec.head_numbers(),
                         spec.state_numbers()};
  for (int64_t tokens : {int64_t{17}, int64_t{1}, int64_t{30}, int64_t{1}})
    block.run(memory.x.data(), tokens, state);
}

void stress_latent(Pool& pool, AttentionMemory& memory) {
  constexpr int64_t heads = 4, rank = 64, nope = 64, rope = 16, value = 32, low = 64, context = 64;
  LatentBlock::Spec spec{kHidden, heads, rank, nope, rope, value, kMost, context, 1e-6f, 1e-6f,
                         std::vector<float>(rope / 2), 0.1f, 1.0f, memory.norm.data(),
                         desc(low, kHidden), memory.norm.data(), desc(heads * (nope + rope), low),
                         desc(rank + rope, kHidden), memory.norm.data(), desc(heads * rank, nope),
                         desc(heads * value, rank), desc(kHidden, heads * value)};
  const LatentBlock block(pool, spec, Scratch(memory.scratch.data(), int64_t{4} << 20));
  float* keys = memory.cache.data();
  const KVView view{keys, keys + context * (rank + rope), context, 1, rank + rope, rank};
  int64_t start = 0;
  for (int64_t tokens : {int64_t{17}, int64_t{1}, int64_t{30}, int64_t{1}}) {
    block.run(memory.x.data(), tokens, view, start);
    start += tokens;
  }
}

void stress_mlp(Pool& pool, AttentionMemory& memory, int64_t tokens) {
  const MlpBlock::Spec spec{kMost, 1e-6f, memory.norm.data(), desc(kInner, kHidden),
                            desc(kInner, kHidden), desc(kHidden, kInner)};
  const MlpBlock block(pool, spec, Scratch(memory.scratch.data(), int64_t{4} << 20));
  block.run(memory.x.data(), tokens);
}

void stress_router_and_head(Pool& pool, AttentionMemory& memory, int64_t tokens) {
  const RouterBlock::Layer layer{memory.norm.data(), desc(512, kHidden), 1e-6f, kChoices};
  std::vector<float> normed(kMost * kHidden), weights(kMost * kChoices), logits(kMost * 1000);
  std::vector<int32_t> experts(kMost * kChoices), guess(512);
  const RouterBlock router(pool, kHidden, kMost, layer, layer,
                           {normed.data(), experts.data(), weights.data(), guess.data()},
                           Scratch(memory.scratch.data(), int64_t{4} << 20));
  router.run(memory.x.data(), tokens, 6);
  const HeadBlock head(pool, memory.norm.data(), 1e-6f, desc(1000, kHidden), kMost,
                       Scratch(memory.scratch.data(), int64_t{4} << 20));
  head.run(memory.x.data(), tokens, logits.data());
}

}  // namespace

int main() {
  for (int threads : {2, 8}) {
    Pool pool(threads, threads);
    AttentionMemory memory;
    for (int round = 0; round < 10; ++round)
      for (int64_t tokens : {int64_t{1}, int64_t{2}, int64_t{9}, kMost}) {
        stress_experts(pool, tokens, std::nullopt);
        stress_experts(pool, tokens, SwigluClamp{7.0f, 1.702f});
        stress_attention(pool, memory, 0);
        stress_attention(pool, memory, 20);
        stress_delta(pool, memory);
        stress_latent(pool, memory);
        stress_mlp(pool, memory, tokens);
        stress_router_and_head(pool, memory, tokens);
      }
  }
  std::puts("ok");
  return 0;
}
