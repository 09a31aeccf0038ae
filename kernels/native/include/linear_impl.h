// Linear kernels of one instruction set. The order of the sum is part of the format:
//   per row and group of 64: chain A over k = 0..31, chain B over 32..63, acc = fma(code, x, acc);
//   g = A + B; total = fma(scale, g, total); total = fma(bias, sum of x, total); groups in order.
// In mxfp4 each chain is a group: total = fma(scale, A, total); total = fma(next scale, B, total).
// Lanes are rows, so neither the number of tokens nor the split over threads can change a bit.
#pragma once

#include "kernel_table.h"
#include "masked.h"
#include "mxfp4.h"
#include "unpack.h"
#include "vmath.h"

namespace aegis::AEGIS_ISA {

#if defined(AEGIS_ISA_AVX512)
constexpr int kTileTokens = 8, kTileBlocks = 2, kDirectTokens = 4;
#elif defined(AEGIS_ISA_SCALAR)
constexpr int kTileTokens = 2, kTileBlocks = 1, kDirectTokens = 1;
#else
constexpr int kTileTokens = 6, kTileBlocks = 1, kDirectTokens = 2;
#endif
// One stream of words is read ahead into L2, from where the processor's own prefetcher brings it
// nearer. Measured on Zen 4, two threads from memory: 12-17 GB/s reading 4 KiB ahead into L1, 29
// with this; 16 to 128 KiB are alike.
constexpr int64_t kPrefetchAhead = 16384;

// Writes 16 rows of one token.
AEGIS_INLINE void emit(const TileArgs& args, int t, int64_t block, f32x16 y) {
  const LinearDesc& w = *args.w;
  const int64_t row = block * kLanes;
  const int64_t left = w.rows - row;
  const int n = left < kLanes ? (int)left : (int)kLanes;
  if (w.bias) y = add(y, load_first(w.bias + row, n));
  float* out = args.out[t] + (row - args.out_base);
  if (args.weights) y = fma(set1(args.weights[t]), y, load_first(out, n));
  if (args.add) y = add(load_first(args.add[t] + (row - args.out_base), n), y);
  if (n == kLanes)
    store(out, y);
  else
    store_first(out, y, n);
}

// The two chains of a block onto the total; its second parameter is a bias, or the scale of b.
template <class W>
AEGIS_INLINE f32x16 fold(f32x16 a, f32x16 b, f32x16 scale, f32x16 second, float sum, f32x16 total) {
  if (kScalePerChain<W>) return fma(second, b, fma(scale, a, total));
  f32x16 g = add(a, b);
  if (W::scaled) g = mul(g, set1(kUnscale));
  if (!W::affine) return add(total, g);
  return fma(second, set1(sum), fma(scale, g, total));
}

// Bytes of one block and of its scales, and their type: from the policy where it has them.
template <class W, bool Known>
struct BlockOf {
  static constexpr int64_t param_nbytes = W::param_nbytes, nbytes = W::block_nbytes;
  static constexpr DType dtype = W::dtype;
  explicit BlockOf(const LinearDesc&) {}
};
template <class W>
struct BlockOf<W, false> {
  const int64_t param_nbytes, nbytes;
  const DType dtype;
  explicit BlockOf(const LinearDesc& w)
      : param_nbytes(W::affine ? kLanes * w.number_nbytes() : 0), nbytes(w.block_nbytes()), dtype(w.dtype) {}
};

// NT tokens times one row block, groups [g, g + N): codes go straight from the words into chains.
template <class W, int NT, int N>
AEGIS_INLINE void direct_groups(const W& policy, const TileArgs& args, const uint8_t* block,
                                const uint8_t* ahead, int64_t g, f32x16 (&total)[NT]) {
  const BlockOf<W, W::scaled> shape(*args.w);
  const int64_t step = shape.nbytes, param = shape.param_nbytes;
  const float* x[NT];
  f32x16 a[NT][N], b[NT][N];
  for (int t = 0; t < NT; ++t) {
    x[t] = (W::scaled ? args.scaled : args.x[t]) + g * kGroup;
    for (int n = 0; n < N; ++n) a[t][n] = b[t][n] = zero();
  }
  for (int64_t line = 0; line < N * step; line += 64) prefetch_far(ahead + line);
  policy.template codes<N>(
      block + 2 * param, step, [&](int k, Codes<N> ca, Codes<N> cb) AEGIS_LAMBDA {
        for (int t = 0; t < NT; ++t)
          for (int n = 0; n < N; ++n) {
            const float* xn = x[t] + n * kGroup + k;
            a[t][n] = fma(ca.v[n], set1(xn[0]), a[t][n]);
            b[t][n] = fma(cb.v[n], set1(xn[32]), b[t][n]);
          }
      });
  for (int n = 0; n < N; ++n) {
    const uint8_t* params = block + n * step;
    const f32x16 scale = W::affine ? load_number(params, shape.dtype) : zero();
    const f32x16 bias = W::affine ? load_number(params + param, shape.dtype) : zero();
    for (int t = 0; t < NT; ++t)
      total[t] = fold<W>(a[t][n], b[t][n], scale, bias, args.sums[t][g + n], total[t]);
  }
}

template <class W, int NT>
static void direct(const TileArgs& args) {
  constexpr int N = NT == 1 ? W::groups_at_once : 1;
  const W policy;
  const int64_t groups = args.w->groups(), step = BlockOf<W, W::scaled>(*args.w).nbytes;
  const uint8_t* block = args.w->data + args.block_begin * args.w->row_block_nbytes();
  const uint8_t* end = args.w->data + args.block_end * args.w->row_block_nbytes();
  const uint8_t* next = args.next ? args.next : end;
  const auto ahead = [=](const uint8_t* p) AEGIS_LAMBDA {
    p += kPrefetchAhead;
    return p < end ? p : next + (p - end);
  };
  for (int64_t rb = args.block_begin; rb < args.block_end; ++rb) {
    f32x16 total[NT];
    for (int t = 0; t < NT; ++t) total[t] = zero();
    int64_t g = 0;
    for (; g + N <= groups; g += N, block += N * step)
      direct_groups<W, NT, N>(policy, args, block, ahead(block), g, total);
    for (; g < groups; ++g, block += step)
      direct_groups<W, NT, 1>(policy, args, block, ahead(block), g, total);
    for (int t = 0; t < NT; ++t) emit(args, t, rb, total[t]);
  }
}

struct Panel {
  alignas(64) float codes[kTileBlocks][kGroup * kLanes];
  alignas(64) float totals[kMaxTokens][kTileBlocks][kLanes];
  f32x16 scale[kTileBlocks], bias[kTileBlocks];
};

// One chain of 32 inputs: NT tokens by NB blocks of accumulators in registers.
template <int NT, int NB>
AEGIS_INLINE void chain(const float* const* x, const Panel& panel, int64_t base,
                        f32x16 (&acc)[NT][NB]) {
  for (int t = 0; t < NT; ++t)
    for (int n = 0; n < NB; ++n) acc[t][n] = zero();
#pragma GCC unroll 4
  for (int64_t k = base; k < base + 32; ++k) {
    f32x16 c[NB];
    for (int n = 0; n < NB; ++n) c[n] = load(panel.codes[n] + k * kLanes);
    for (int t = 0; t < NT; ++t) {
      const f32x16 xv = set1(x[t][k]);
      for (int n = 0; n < NB; ++n) acc[t][n] = fma(c[n], xv, acc[t][n]);
    }
  }
}

// One group of NB unpacked blocks times NT tokens from t0 on.
template <class W, int NT, int NB>
AEGIS_INLINE void tile(const TileArgs& args, Panel& panel, int t0, int64_t g) {
  const float* x[NT];
  for (int t = 0; t < NT; ++t) x[t] = args.x[t0 + t] + g * kGroup;
  f32x16 acc[NT][NB];
  alignas(64) float first[NT][NB][kLanes];
  chain<NT, NB>(x, panel, 0, acc);
  for (int t = 0; t < NT; ++t)
    for (int n = 0; n < NB; ++n) store(first[t][n], acc[t][n]);
  chain<NT, NB>(x, panel, 32, acc);
  for (int t = 0; t < NT; ++t)
    for (int n = 0; n < NB; ++n) {
      float* total = panel.totals[t0 + t][n];
      store(total, fold<W>(load(first[t][n]), acc[t][n], panel.scale[n], panel.bias[n],
                           args.sums[t0 + t][g], load(total)));
    }
}

template <class W, int NB>
static void tiled_blocks(const TileArgs& args, int64_t rb, Panel& panel) {
  const W policy;
  const LinearDesc& w = *args.w;
  const int64_t groups = w.groups(), step = w.block_nbytes();
  const int64_t param = W::affine ? kLanes * w.number_nbytes() : 0;
  for (int t = 0; t < args.tokens; ++t)
    for (int n = 0; n < NB; ++n) store(panel.totals[t][n], zero());
  for (int64_t g = 0; g < groups; ++g) {
    for (int n = 0; n < NB; ++n) {
      const uint8_t* block = w.data + (rb + n) * w.row_block_nbytes() + g * step;
      float* codes = panel.codes[n];
      for (int64_t line = 0; line < step; line += 64) prefetch(block + step + line);
      policy.template codes<1>(
          block + 2 * param, 0, [&](int k, Codes<1> ca, Codes<1> cb) AEGIS_LAMBDA {
            store(codes + k * kLanes, ca.v[0]);
            store(codes + (k + 32) * kLanes, cb.v[0]);
          });
      panel.scale[n] = W::affine ? load_number(block, w.dtype) : zero();
      panel.bias[n] = W::affine ? load_number(block + param, w.dtype) : zero();
    }
    int t = 0;
    for (; t + kTileTokens <= args.tokens; t += kTileTokens)
      tile<W, kTileTokens, NB>(args, panel, t, g);
    if (kTileTokens > 4)
      for (; t + 4 <= args.tokens; t += 4) tile<W, 4, NB>(args, panel, t, g);
    if (kTileTokens > 2)
      for (; t + 2 <= args.tokens; t += 2) tile<W, 2, NB>(args, panel, t, g);
    for (; t < args.tokens; ++t) tile<W, 1, NB>(args, panel, t, g);
  }
  for (int t = 0; t < args.tokens; ++t)
    for (int n = 0; n < NB; ++n) emit(args, t, rb + n, load(panel.totals[t][n]));
}

template <class W>
static void linear_of(const TileArgs& args) {
  if (args.tokens == 1) return direct<W, 1>(args);
  if (kDirectTokens >= 2 && args.tokens == 2) return direct<W, 2>(args);
  if (kDirectTokens >= 3 && args.tokens == 3) return direct<W, 3>(args);
  if (kDirectTokens >= 4 && args.tokens == 4) return direct<W, 4>(args);
  Panel panel;
  int64_t rb = args.block_begin;
  for (; rb + kTileBlocks <= args.block_end; rb += kTileBlocks)
    tiled_blocks<W, kTileBlocks>(args, rb, panel);
  for (; rb < args.block_end; ++rb) tiled_blocks<W, 1>(args, rb, panel);
}

template <DType D>
static void scaled_of(const TileArgs& args) {
  if (args.w->kind == Kind::affine4) return direct<Masked4<D>, 1>(args);
  direct<Masked3<D>, 1>(args);
}

static void linear_tile(const TileArgs& args) {
  if (args.scaled) {
    if (args.w->dtype == DType::bf16) return scaled_of<DType::bf16>(args);
    if (args.w->dtype == DType::f16) return scaled_of<DType::f16>(args);
    return scaled_of<DType::f32>(args);
  }
  switch (args.w->kind) {
    case Kind::affine4:
      return linear_of<Affine4>(args);
    case Kind::affine3:
      return linear_of<Affine3>(args);
    case Kind::affine8:
      return linear_of<Affine8>(args);
    case Kind::mxfp4:
      return linear_of<Mxfp4>(args);
    case Kind::dense:
      break;
  }
  switch (args.w->dtype) {
    case DType::bf16:
      return linear_of<Dense<DType::bf16>>(args);
    case DType::f16:
      return linear_of<Dense<DType::f16>>(args);
    case DType::f32:
    case DType::e8m0:  // of no dense weight
      return linear_of<Dense<DType::f32>>(args);
  }
}

static void row_sums(const float* x, int64_t n, float* sums) {
  for (int64_t g = 0; g < n / kGroup; ++g, x += kGroup) {
    const f32x16 low = add(load(x), load(x + 16));
    const f32x16 high = add(load(x + 32), load(x + 48));
    sums[g] = reduce_add(add(low, high));
  }
}

static void silu_mul(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, mul(silu(load(gate + i)), load(up + i)));
}

static void clamped_swiglu(const float* gate, const float* up, SwigluClamp clamp, float* out,
                           int64_t n) {
  // Constants come first, so that a NaN passes through.
  const f32x16 most = set1(clamp.limit), least = set1(-clamp.limit), alpha = set1(clamp.alpha);
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 g = min(most, load(gate + i));
    const f32x16 u = max(least, min(most, load(up + i)));
    store(out + i, mul(mul(g, sigmoid(mul(alpha, g))), add(u, set1(1.0f))));
  }
}

static void axpy(float weight, const float* x, float* y, int64_t n) {
  const f32x16 w = set1(weight);
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, fma(w, load(x + i), load(y + i)));
}

static float sigmoid_of(float x) { return sigmoid1(x); }

// The limit that kernels are compared with. Its distance is its own: at kPrefetchAhead into L1 it
// reads a quarter slower, which would flatter every ratio.
static float read_probe(const float* x, int64_t n) {
  constexpr int64_t ahead = 1024;  // floats
  i32x16 r[4] = {izero(), izero(), izero(), izero()};
  for (int64_t i = 0; i + 64 <= n; i += 64) {
    for (int64_t j = 0; j < 4; ++j) {
      prefetch(x + i + 16 * j + ahead);
      r[j] = ixor(r[j], iload(x + i + 16 * j));
    }
  }
  return reduce_add(as_float(ixor(ixor(r[0], r[1]), ixor(r[2], r[3]))));
}

static int64_t fma_probe(int64_t rounds, float* sink) {
#if defined(AEGIS_ISA_AVX512)
  constexpr int kChains = 16;
#else
  constexpr int kChains = 6;
#endif
  f32x16 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = set1(sink[i]);
  const f32x16 a = set1(sink[16]), b = set1(sink[17]);
  for (int64_t r = 0; r < rounds; ++r) {
    for (int i = 0; i < kChains; ++i) acc[i] = fma(acc[i], a, b);
  }
  f32x16 all = acc[0];
  for (int i = 1; i < kChains; ++i) all = add(all, acc[i]);
  sink[0] = reduce_add(all);
  return rounds * kChains * kLanes;
}

static KernelTable make_table(const char* name) {
  KernelTable table = {};
  table.name = name;
  table.linear_tile = linear_tile;
#if !defined(AEGIS_ISA_SCALAR)
  table.scale_inputs = scale_inputs;
#endif
  table.row_sums = row_sums;
  table.silu_mul = silu_mul;
  table.clamped_swiglu = clamped_swiglu;
  table.axpy = axpy;
  table.sigmoid = sigmoid_of;
  table.read_probe = read_probe;
  table.fma_probe = fma_probe;
  return table;
}

}  // namespace aegis::AEGIS_ISA
