// Linear kernels of one instruction set. The order of the sum is part of the format:
//   per row and group of 64: chain A over k = 0..31, chain B over 32..63, acc = fma(code, x, acc);
//   g = A + B; total = fma(scale, g, total); total = fma(bias, sum of x, total); groups in order.
// Two groups of 64 that share a scale are a group of 128. Where only 32 do, a code becomes its value,
// fma(code, scale, bias), and the sum is that of dense numbers: total = total + (A + B).
// In mxfp4 each chain is a group: total = fma(scale, A, total); total = fma(next scale, B, total).
// Lanes are rows, so neither the number of tokens nor the split over threads can change a bit.
#pragma once

#include "bit_stream.h"
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

// How the two chains of 64 inputs come onto the total.
enum class Fold {
  none,    // their sum does: of dense numbers, and of groups of 32, where scales multiply the codes
  affine,  // the sum's scale and bias do
  chains   // each chain has a scale
};
template <class W, int G>
constexpr Fold kFold = !W::affine || G == 32 ? Fold::none
                       : kScalePerChain<W>   ? Fold::chains
                                             : Fold::affine;

// `second` is a bias, or the scale of b.
template <Fold F, bool Scaled = false>
AEGIS_INLINE f32x16 fold(f32x16 a, f32x16 b, f32x16 scale, f32x16 second, float sum, f32x16 total) {
  if (F == Fold::chains) return fma(second, b, fma(scale, a, total));
  f32x16 g = add(a, b);
  if (Scaled) g = mul(g, set1(kUnscale));
  if (F == Fold::none) return add(total, g);
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

// The same, and where the codes of 64 inputs lie: in a block of their own (G is 64), in half a block
// (128) or in two (32).
template <class W, int G>
struct Blocks : BlockOf<W, W::sized && G == 64> {
  using BlockOf<W, W::sized && G == 64>::BlockOf;
  int64_t span() const { return this->nbytes * kGroup / G; }           // bytes of 64 inputs
  int64_t half_block() const { return (this->nbytes - 2 * this->param_nbytes) / 2; }
  int64_t words_step() const { return G == 128 ? half_block() : span(); }
  int64_t params_step() const { return G == 128 ? 0 : span(); }
  // From the codes of inputs 0..31 of 64 to those of 32..63.
  int64_t half() const { return G == 32 ? this->nbytes : half_block() * 64 / G; }
};

// Scales and biases of the two groups of 32 that 64 inputs are, and a code's value.
struct Halves {
  f32x16 scale[2], bias[2];

  template <class Shape>
  AEGIS_INLINE Halves load(const Shape& shape, const uint8_t* params) {
    Halves h;
    for (int i = 0; i < 2; ++i, params += shape.nbytes) {
      h.scale[i] = load_number(params, shape.dtype);
      h.bias[i] = load_number(params + shape.param_nbytes, shape.dtype);
    }
    return h;
  }
  template <int I>
  __attribute__((always_inline)) f32x16 value(f32x16 code) const {
    return fma(code, scale[I], bias[I]);
  }
};

// NT tokens times one row block, N times 64 inputs from group g on: codes go straight from the words
// into chains.
template <class W, int G, int NT, int N>
AEGIS_INLINE void direct_groups(const W& policy, const TileArgs& args, const Blocks<W, G>& shape,
                                const uint8_t* params, const uint8_t* words, const uint8_t* ahead,
                                int64_t g, f32x16 (&total)[NT]) {
  const float* x[NT];
  f32x16 a[NT][N], b[NT][N];
  for (int t = 0; t < NT; ++t) {
    x[t] = (W::scaled ? args.scaled : args.x[t]) + g * kGroup;
    for (int n = 0; n < N; ++n) a[t][n] = b[t][n] = zero();
  }
  for (int64_t line = 0; line < N * shape.span(); line += 64) prefetch_far(ahead + line);
  [[maybe_unused]] Halves halves[N];
  if constexpr (G == 32)
    for (int n = 0; n < N; ++n) halves[n] = Halves::load(shape, params + n * shape.params_step());
  policy.template codes<N>(
      words, shape.words_step(), shape.half(), [&](int k, Codes<N> ca, Codes<N> cb) AEGIS_LAMBDA {
        if constexpr (G == 32)
          for (int n = 0; n < N; ++n) {
            ca.v[n] = halves[n].template value<0>(ca.v[n]);
            cb.v[n] = halves[n].template value<1>(cb.v[n]);
          }
        for (int t = 0; t < NT; ++t)
          for (int n = 0; n < N; ++n) {
            const float* xn = x[t] + n * kGroup + k;
            a[t][n] = fma(ca.v[n], set1(xn[0]), a[t][n]);
            b[t][n] = fma(cb.v[n], set1(xn[32]), b[t][n]);
          }
      });
  for (int n = 0; n < N; ++n) {
    constexpr Fold F = kFold<W, G>;
    const uint8_t* here = params + n * shape.params_step();
    const f32x16 scale = F == Fold::none ? zero() : load_number(here, shape.dtype);
    const f32x16 second = F == Fold::none ? zero() : load_number(here + shape.param_nbytes, shape.dtype);
    for (int t = 0; t < NT; ++t)
      total[t] = fold<F, W::scaled>(a[t][n], b[t][n], scale, second, args.sums[t][g + n], total[t]);
  }
}

template <class W, int G, int NT>
static void direct(const TileArgs& args) {
  constexpr int N = NT == 1 ? W::groups_at_once : 1;
  const W policy;
  const Blocks<W, G> shape(*args.w);
  const int64_t groups = args.w->groups(), step = shape.span(), head = 2 * shape.param_nbytes;
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
    if constexpr (G == 128) {
      for (; g < groups; g += 2, block += 2 * step)
        for (int n = 0; n < 2; n += N)
          direct_groups<W, G, NT, N>(policy, args, shape, block, block + head + n * shape.words_step(),
                                     ahead(block + n * step), g + n, total);
    } else {
      for (; g + N <= groups; g += N, block += N * step)
        direct_groups<W, G, NT, N>(policy, args, shape, block, block + head, ahead(block), g, total);
      for (; g < groups; ++g, block += step)
        direct_groups<W, G, NT, 1>(policy, args, shape, block, block + head, ahead(block), g, total);
    }
    for (int t = 0; t < NT; ++t) emit(args, t, rb, total[t]);
  }
}

struct Panel {
  alignas(64) float codes[kTileBlocks][kGroup * kLanes];
  alignas(64) float totals[kMaxTokens][kTileBlocks][kLanes];
  f32x16 scale[kTileBlocks], second[kTileBlocks];  // second: the bias, or another scale
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
template <Fold F, int NT, int NB>
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
      store(total, fold<F>(load(first[t][n]), acc[t][n], panel.scale[n], panel.second[n],
                           args.sums[t0 + t][g], load(total)));
    }
}

// The codes of 64 inputs of a row block, from group g on, into part n of the panel: values where the
// scales do not fold into sums.
template <class W, int G>
AEGIS_INLINE void unpack_group(const W& policy, const Blocks<W, G>& shape, const uint8_t* row_block,
                               int64_t g, Panel& panel, int n) {
  const uint8_t* params = row_block + g * kGroup / G * shape.nbytes;
  const uint8_t* words = params + 2 * shape.param_nbytes;
  if (G == 128 && g % 2) words += shape.words_step();
  for (int64_t line = 0; line < shape.span(); line += 64) prefetch(params + shape.span() + line);
  float* codes = panel.codes[n];
  [[maybe_unused]] Halves halves;
  if constexpr (G == 32) halves = Halves::load(shape, params);
  policy.template codes<1>(words, 0, shape.half(), [&](int k, Codes<1> ca, Codes<1> cb) AEGIS_LAMBDA {
    if constexpr (G == 32) {
      ca.v[0] = halves.template value<0>(ca.v[0]);
      cb.v[0] = halves.template value<1>(cb.v[0]);
    }
    store(codes + k * kLanes, ca.v[0]);
    store(codes + (k + 32) * kLanes, cb.v[0]);
  });
  constexpr bool folds = kFold<W, G> != Fold::none;
  panel.scale[n] = folds ? load_number(params, shape.dtype) : zero();
  panel.second[n] = folds ? load_number(params + shape.param_nbytes, shape.dtype) : zero();
}

// unpack(row block, group, panel, part of it) for NB row blocks from rb on.
template <Fold F, int NB, class Unpack>
AEGIS_INLINE void tiled_blocks(const TileArgs& args, int64_t rb, Panel& panel, const Unpack& unpack) {
  const int64_t groups = args.w->groups(), row_block_nbytes = args.w->row_block_nbytes();
  const uint8_t* row_block = args.w->data + rb * row_block_nbytes;
  for (int t = 0; t < args.tokens; ++t)
    for (int n = 0; n < NB; ++n) store(panel.totals[t][n], zero());
  for (int64_t g = 0; g < groups; ++g) {
    for (int n = 0; n < NB; ++n) unpack(row_block + n * row_block_nbytes, g, panel, n);
    int t = 0;
    for (; t + kTileTokens <= args.tokens; t += kTileTokens)
      tile<F, kTileTokens, NB>(args, panel, t, g);
    if (kTileTokens > 4)
      for (; t + 4 <= args.tokens; t += 4) tile<F, 4, NB>(args, panel, t, g);
    if (kTileTokens > 2)
      for (; t + 2 <= args.tokens; t += 2) tile<F, 2, NB>(args, panel, t, g);
    for (; t < args.tokens; ++t) tile<F, 1, NB>(args, panel, t, g);
  }
  for (int t = 0; t < args.tokens; ++t)
    for (int n = 0; n < NB; ++n) emit(args, t, rb + n, load(panel.totals[t][n]));
}

template <Fold F, class Unpack>
AEGIS_INLINE void tiled(const TileArgs& args, const Unpack& unpack) {
  Panel panel;
  int64_t rb = args.block_begin;
  for (; rb + kTileBlocks <= args.block_end; rb += kTileBlocks)
    tiled_blocks<F, kTileBlocks>(args, rb, panel, unpack);
  for (; rb < args.block_end; ++rb) tiled_blocks<F, 1>(args, rb, panel, unpack);
}

// What most stores hold: tiles of its own.
template <class W>
static void linear_of(const TileArgs& args) {
  if (args.tokens == 1) return direct<W, 64, 1>(args);
  if (kDirectTokens >= 2 && args.tokens == 2) return direct<W, 64, 2>(args);
  if (kDirectTokens >= 3 && args.tokens == 3) return direct<W, 64, 3>(args);
  if (kDirectTokens >= 4 && args.tokens == 4) return direct<W, 64, 4>(args);
  const W policy;
  const Blocks<W, 64> shape(*args.w);
  tiled<kFold<W, 64>>(args, [=](const uint8_t* row_block, int64_t g, Panel& panel, int n) AEGIS_LAMBDA {
    unpack_group<W, 64>(policy, shape, row_block, g, panel, n);
  });
}

// All other formats share one copy of the tiles, and call a function for their codes.
using Unpack = void (*)(const LinearDesc& w, const uint8_t* row_block, int64_t g, Panel& panel, int n);

template <Fold F>
static void shared_tiles(const TileArgs& args, Unpack unpack) {
  tiled<F>(args, [&](const uint8_t* row_block, int64_t g, Panel& panel, int n) AEGIS_LAMBDA {
    unpack(*args.w, row_block, g, panel, n);
  });
}

template <class W, int G>
static void unpack_of(const LinearDesc& w, const uint8_t* row_block, int64_t g, Panel& panel, int n) {
  unpack_group<W, G>(W(), Blocks<W, G>(w), row_block, g, panel, n);
}

// W shifts codes into place, M uses them in it.
template <class W, class M, int G>
static void other_of(const TileArgs& args) {
#if !defined(AEGIS_ISA_SCALAR)
  if constexpr (M::scaled && G != 32)
    if (args.scaled) return direct<M, G, 1>(args);
  if (args.tokens == 1) return direct<W, G, 1>(args);
#endif
  shared_tiles<kFold<W, G>>(args, unpack_of<W, G>);
}

template <class W, class M>
static void other_group_of(const TileArgs& args) {
  if (args.w->group_size == 32) return other_of<W, M, 32>(args);
  other_of<W, M, 128>(args);
}

static void other_group(const TileArgs& args) {
  switch (args.w->kind) {
    case Kind::affine2:
      return other_group_of<AffineStream<2>, MaskedStream<2>>(args);
    case Kind::affine3:
      return other_group_of<Affine3, Masked3<DType::bf16>>(args);
    case Kind::affine4:
      return other_group_of<Affine4, Masked4<DType::bf16>>(args);
    case Kind::affine5:
      return other_group_of<AffineStream<5>, MaskedStream<5>>(args);
    case Kind::affine6:
      return other_group_of<AffineStream<6>, MaskedStream<6>>(args);
    default:
      return other_group_of<Affine8, Affine8>(args);
  }
}

template <class W, class M>
static void usual_of(const TileArgs& args) {
#if !defined(AEGIS_ISA_SCALAR)
  if (args.scaled) return direct<M, 64, 1>(args);
#endif
  linear_of<W>(args);
}

// The type of the scales is part of M: one group is so little work that looking it up shows.
template <class W, template <DType> class M>
static void usual_affine(const TileArgs& args) {
  switch (args.w->dtype) {
    case DType::bf16:
      return usual_of<W, M<DType::bf16>>(args);
    case DType::f16:
      return usual_of<W, M<DType::f16>>(args);
    case DType::f32:
      return usual_of<W, M<DType::f32>>(args);
    case DType::e8m0:  // of mxfp4 alone
      break;
  }
}

static void linear_tile(const TileArgs& args) {
  if (args.w->group_size != kGroup) return other_group(args);
  switch (args.w->kind) {
    case Kind::affine2:
      return other_of<AffineStream<2>, MaskedStream<2>, 64>(args);
    case Kind::affine3:
      return usual_affine<Affine3, Masked3>(args);
    case Kind::affine4:
      return usual_affine<Affine4, Masked4>(args);
    case Kind::affine5:
      return other_of<AffineStream<5>, MaskedStream<5>, 64>(args);
    case Kind::affine6:
      return other_of<AffineStream<6>, MaskedStream<6>, 64>(args);
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

#if !defined(AEGIS_ISA_SCALAR)
static bool scale_inputs(Kind kind, const float* x, int64_t n, float* out) {
  switch (kind) {
    case Kind::affine2:
      return scale_for<MaskedStream<2>>(x, n, out);
    case Kind::affine3:
      return scale_for<Masked3<DType::bf16>>(x, n, out);
    case Kind::affine4:
      return scale_for<Masked4<DType::bf16>>(x, n, out);
    case Kind::affine5:
      return scale_for<MaskedStream<5>>(x, n, out);
    case Kind::affine6:
      return scale_for<MaskedStream<6>>(x, n, out);
    default:
      return false;
  }
}
#endif

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
