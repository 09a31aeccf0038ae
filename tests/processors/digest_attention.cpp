// Elementary functions at every magnitude, norms, rotary positions, attention, routing and the head.
#include <optional>
#include <string>

#include "latent_block.h"
#include "digest.h"

namespace digest {

using aegis::kernels;
using aegis::RouterRule;

namespace {

// Both signs, every exponent, some mantissas: zeros, denormals, infinities and NaN among them.
std::vector<float> every_magnitude() {
  Random random(4);
  std::vector<float> values;
  for (uint32_t high = 0; high < 512; ++high)
    for (uint32_t mantissa : {0u, 1u, 0x400000u, 0x7FFFFFu, random.below(1 << 23)}) {
      const uint32_t bits = high << 23 | mantissa;
      values.emplace_back();
      std::memcpy(&values.back(), &bits, 4);
    }
  for (int i = 0; i < 4000; ++i) values.push_back(number(random, Range::ordinary) * 64.0f);
  return values;
}

void elementwise_cases() {
  const std::vector<float> x = every_magnitude();
  const int64_t n = static_cast<int64_t>(x.size());
  constexpr const char* names[] = {"exp", "sigmoid", "silu", "softplus", "sin", "cos"};
  for (int f = 0; f < 6; ++f) {
    std::vector<float> y(x.size());
    const auto which = static_cast<aegis::Elementwise>(f);
    kernels_only([&] { kernels().attention.elementwise(which, x.data(), n, y.data()); });
    Digest digest;
    digest.add(y.data(), n);
    report(std::string("function ") + names[f], digest);
  }
}

void norm_cases() {
  Random random(5);
  for (Range range : {Range::ordinary, Range::wide, Range::tiny, Range::edges})
    for (int64_t n : {64, 192, 1024}) {
      const std::vector<float> x = numbers(random, n, range), w = numbers(random, n);
      std::vector<float> y(static_cast<size_t>(n));
      kernels_only([&] { kernels().attention.rms_norm(x.data(), w.data(), 1e-6f, n, y.data()); });
      Digest digest;
      digest.add(y.data(), n);
      report("rms_norm " + std::to_string(n) + " " + name_of(range), digest);
    }
}

void rotary_cases() {
  Random random(6);
  for (int64_t half : {1, 8, 16, 20, 64}) {
    const int64_t dim = 2 * half + 16;
    std::vector<float> inv_freq = numbers(random, half);
    inv_freq[0] = 1.0f;
    const std::vector<float> x = numbers(random, dim);
    std::vector<float> cosine(inv_freq.size()), sine(inv_freq.size()), y(x.size());
    Digest digest;
    for (int64_t position : {0, 1, 2, 1000, 131071, 16777217}) {
      kernels_only([&] {
        kernels().attention.rotary_angles(position, inv_freq.data(), half, cosine.data(), sine.data());
        kernels().attention.rotate(x.data(), cosine.data(), sine.data(), half, dim, 0.25f, y.data());
      });
      digest.add(cosine.data(), half);
      digest.add(sine.data(), half);
      digest.add(y.data(), dim);
    }
    report("rotary " + std::to_string(half), digest);
  }
}

struct AttentionShape {
  int64_t heads, kv_heads, dim;
  bool normed = false;    // queries and keys, and with multipliers
  bool per_head = false;
  bool gated = false;  // what heads give
  int64_t window = 0;  // above 0: with sinks, a bias and rotated channels scaled, too
};

// A prompt in uneven pieces over more than one block of positions, then single tokens.
void attention_case(aegis::Pool& pool, AttentionShape shape) {
  constexpr int64_t hidden = 64, context = 272;
  Random random(8);
  const int64_t q_rows = shape.heads * shape.dim, kv_rows = shape.kv_heads * shape.dim;
  const Weight q(random, (shape.gated ? 2 : 1) * q_rows, hidden, Kind::affine4, DType::bf16, true);
  const Weight k(random, kv_rows, hidden, Kind::affine8, DType::f16, true);
  const Weight v(random, kv_rows, hidden, Kind::affine3, DType::bf16, true);
  const Weight o(random, hidden, q_rows, Kind::affine4, DType::f32);
  const std::vector<float> norm = numbers(random, hidden);
  std::vector<float> x = numbers(random, context * hidden);
  std::vector<float> scratch(4 << 20);
  std::vector<float> cache(static_cast<size_t>(2 * shape.kv_heads * context * shape.dim), -1e30f);
  aegis::AttentionBlock::Spec spec{};
  spec.hidden = hidden;
  spec.heads = shape.heads;
  spec.kv_heads = shape.kv_heads;
  spec.dim = shape.dim;
  spec.max_tokens = spec.context = context;
  spec.eps = 1e-6f;
  spec.inv_freq = numbers(random, shape.dim / 2);
  spec.norm = norm.data();
  spec.q = q.desc, spec.k = k.desc, spec.v = v.desc, spec.o = o.desc;
  spec.output_gate = shape.gated;
  const std::vector<float> q_norm = numbers(random, q_rows), k_norm = numbers(random, kv_rows);
  if (shape.normed) {
    spec.qk_norm = {q_norm.data(), k_norm.data(), shape.per_head};
    spec.scale = 0.3f;
    spec.residual = 0.22f;
  }
  const std::vector<float> sinks = numbers(random, shape.heads), bias = numbers(random, hidden);
  if (shape.window) {
    spec.rotary_scale = 1.35f;
    spec.window = shape.window;
    spec.sinks = sinks.data();
    spec.o.bias = bias.data();
  }
  const int64_t nbytes = static_cast<int64_t>(scratch.size()) * 4;
  const aegis::AttentionBlock block(pool, spec, aegis::Scratch(scratch.data(), nbytes));
  const aegis::KVView view{cache.data(), cache.data() + shape.kv_heads * context * shape.dim, context,
                           shape.kv_heads, shape.dim, shape.dim};
  {
    const Foreign environment;
    int64_t start = 0;
    for (int64_t tokens : {1, 7, 150, 97, 1, 1, 15}) {
      block.run(x.data() + start * hidden, tokens, view, start);
      start += tokens;
    }
  }
  Digest digest;
  digest.add(x.data(), context * hidden);
  report("attention " + std::to_string(shape.heads) + " " + std::to_string(shape.kv_heads) + " " +
             std::to_string(shape.dim) + (shape.normed ? " normed" : "") +
             (shape.per_head ? " per head" : "") + (shape.gated ? " gated" : "") +
             (shape.window ? " window " + std::to_string(shape.window) : ""),
         digest);
}

struct LatentShape {
  int64_t heads, rank, nope, rope, value, low;
};

void latent_case(aegis::Pool& pool, const LatentShape& s) {
  Random random(static_cast<uint64_t>(700 + s.rank + s.heads));
  constexpr int64_t hidden = 192, context = 300;
  const int64_t queries = s.heads * (s.nope + s.rope), key = s.rank + s.rope;
  const std::vector<float> norm = numbers(random, hidden), kv_norm = numbers(random, s.rank);
  const std::vector<float> q_norm = numbers(random, s.low ? s.low : 1);
  const Weight q(random, s.low ? s.low : queries, hidden, Kind::affine4, DType::bf16);
  const Weight q_b(random, queries, s.low ? s.low : 64, Kind::affine8, DType::bf16);
  const Weight kv(random, key, hidden, Kind::affine4, DType::bf16);
  const Weight embed(random, s.heads * s.rank, s.nope, Kind::affine4, DType::bf16);
  const Weight unembed(random, s.heads * s.value, s.rank, Kind::affine3, DType::f16);
  const Weight o(random, hidden, s.heads * s.value, Kind::affine4, DType::bf16);
  aegis::LatentBlock::Spec spec{hidden, s.heads, s.rank, s.nope, s.rope, s.value,
                                context, context, 1e-5f, 1e-6f, numbers(random, s.rope / 2), 0.1f,
                                1.2f, norm.data(), q.desc, s.low ? q_norm.data() : nullptr,
                                q_b.desc, kv.desc, kv_norm.data(), embed.desc, unembed.desc,
                                o.desc};
  std::vector<float> x = numbers(random, context * hidden), scratch(2 << 20);
  std::vector<float> cache(static_cast<size_t>((key + s.rank) * 304), -1e30f);
  const aegis::LatentBlock block(pool, spec, aegis::Scratch(scratch.data(), int64_t{4} << 21));
  const aegis::KVView view{cache.data(), cache.data() + key * 304, 304, 1, key, s.rank};
  {
    const Foreign environment;
    int64_t start = 0;
    for (int64_t tokens : {1, 7, 150, 97, 1, 1, 15}) {
      block.run(x.data() + start * hidden, tokens, view, start);
      start += tokens;
    }
  }
  Digest digest;
  digest.add(x.data(), context * hidden);
  report("latent attention " + std::to_string(s.heads) + " " + std::to_string(s.rank), digest);
}

struct Choice {
  const char* name;
  RouterRule rule;
};
constexpr Choice kChoices[] = {{" plain ", {}},
                               {" normalised ", {true}},
                               {" sigmoid ", {true, true, nullptr, 1, 1, 2.5f}},
                               {" grouped ", {false, true, nullptr, 5, 3, 1.0f}}};

void choice_cases() {
  Random random(9);
  for (int n : {1, 10, 60, 128, 130})
    for (Range range : {Range::ordinary, Range::tiny, Range::edges})
      for (const Choice& choice : kChoices) {
        if (n % choice.rule.groups) continue;
        std::vector<float> logits = numbers(random, n, range);
        for (int i = 1; i < n; i += 3) logits[i] = logits[i - 1];  // ties
        const int k = n < 6 ? n : 6;
        std::vector<int32_t> ids(6), best(6);
        std::vector<float> weights(6), correction = numbers(random, n, Range::ordinary);
        RouterRule rule = choice.rule;
        if (rule.sigmoid) rule.correction = correction.data();
        kernels_only([&] {
          kernels().attention.route(logits.data(), n, k, rule, ids.data(), weights.data());
          kernels().attention.best(logits.data(), n, k, rule, best.data());
        });
        Digest digest;
        digest.add(ids.data(), k);
        digest.add(best.data(), k);
        digest.add(weights.data(), k);
        report("choice " + std::to_string(n) + choice.name + name_of(range), digest);
      }
}

}  // namespace

void attention_cases(aegis::Pool& pool) {
  elementwise_cases();
  norm_cases();
  rotary_cases();
  for (AttentionShape shape :
       {AttentionShape{4, 4, 16}, {6, 2, 32}, {8, 1, 64}, {2, 1, 128}, {1, 1, 256},
        {4, 4, 16, true}, {6, 2, 32, true, true}, {2, 1, 128, true, true},
        {8, 2, 16, false, false, true}, {2, 1, 128, true, true, true},
        {8, 2, 16, false, false, false, 1}, {8, 1, 64, false, false, false, 20},
        {4, 4, 32, false, false, false, 100}, {6, 2, 64, true, true, true, 260}})
    attention_case(pool, shape);
  for (LatentShape shape : {LatentShape{4, 64, 64, 32, 32, 128}, {9, 192, 64, 16, 64, 0}})
    latent_case(pool, shape);
}

void mlp_cases(aegis::Pool& pool) {
  constexpr int64_t hidden = 192, inner = 320, rows = 40;
  Random random(12);
  const std::vector<float> norm = numbers(random, hidden);
  const Weight gate(random, inner, hidden, Kind::affine4, DType::bf16);
  const Weight up(random, inner, hidden, Kind::affine8, DType::bf16);
  const Weight down(random, hidden, inner, Kind::dense, DType::f16);
  std::vector<float> scratch(1 << 17);
  for (int64_t tokens : {int64_t{1}, int64_t{5}, rows}) {
    std::vector<float> x = numbers(random, tokens * hidden);
    const aegis::MlpBlock block(pool, {rows, 1e-6f, norm.data(), gate.desc, up.desc, down.desc},
                                aegis::Scratch(scratch.data(), int64_t{4} << 17));
    {
      const Foreign environment;
      block.run(x.data(), tokens);
    }
    Digest digest;
    digest.add(x.data(), tokens * hidden);
    report("mlp " + std::to_string(tokens), digest);
  }
}

void router_cases(aegis::Pool& pool) {
  choice_cases();
  constexpr int64_t hidden = 192, rows = 40, vocabulary = 200;
  constexpr int k = 4;
  Random random(10);
  const std::vector<float> norm = numbers(random, hidden);
  const Weight gate(random, 20, hidden, Kind::affine8, DType::bf16);
  const Weight next(random, 36, hidden, Kind::dense, DType::f16);
  std::vector<float> scratch(1 << 20);
  const int64_t nbytes = static_cast<int64_t>(scratch.size()) * 4;
  for (int64_t tokens : {int64_t{1}, int64_t{5}, rows}) {
    const std::vector<float> x = numbers(random, tokens * hidden);
    std::vector<float> normed(x.size()), weights(static_cast<size_t>(tokens * k));
    std::vector<int32_t> experts(weights.size()), guess(36);
    const aegis::RouterBlock::Layer layer{norm.data(), gate.desc, 1e-6f, k, {true}};
    const aegis::RouterBlock::Layer following{norm.data(), next.desc, 1e-5f, k};
    const aegis::RouterBlock block(pool, hidden, rows, layer, following,
                                   {normed.data(), experts.data(), weights.data(), guess.data()},
                                   aegis::Scratch(scratch.data(), nbytes));
    int guessed;
    {
      const Foreign environment;
      guessed = block.run(x.data(), tokens, 7);
    }
    Digest digest;
    digest.add(normed.data(), tokens * hidden);
    digest.add(experts.data(), tokens * k);
    digest.add(weights.data(), tokens * k);
    digest.add(guess.data(), guessed);
    report("router " + std::to_string(tokens), digest);
  }
  const Weight lm_head(random, vocabulary, hidden, Kind::affine4, DType::bf16);
  const std::vector<float> x = numbers(random, rows * hidden);
  std::vector<float> logits(rows * vocabulary);
  const aegis::HeadBlock head(pool, norm.data(), 1e-6f, lm_head.desc, rows,
                              aegis::Scratch(scratch.data(), nbytes), 6.0f);
  Digest digest;
  for (int64_t tokens : {int64_t{1}, rows}) {
    {
      const Foreign environment;
      head.run(x.data(), tokens, logits.data());
    }
    digest.add(logits.data(), tokens * vocabulary);
  }
  report("head", digest);
}

}  // namespace digest
