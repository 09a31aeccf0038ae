// Gated DeltaNet: its kernels over all magnitudes, and blocks over prompts in uneven pieces.
#include <string>

#include "delta_block.h"
#include "digest.h"

namespace digest {

using aegis::kernels;

namespace {

void gate_cases() {
  Random random(14);
  for (Range range : {Range::ordinary, Range::wide, Range::tiny, Range::edges})
    for (int64_t n : {1, 16, 20}) {
      std::vector<float> a = numbers(random, n, range), b = numbers(random, n, range);
      const std::vector<float> a_log = numbers(random, n, range), dt_bias = numbers(random, n, range);
      kernels_only([&] { kernels().delta.gates(a.data(), b.data(), a_log.data(), dt_bias.data(), n); });
      Digest digest;
      digest.add(a.data(), n);
      digest.add(b.data(), n);
      report("delta gates " + std::to_string(n) + " " + name_of(range), digest);
    }
}

void row_cases() {
  Random random(15);
  for (Range range : {Range::ordinary, Range::wide, Range::tiny, Range::edges})
    for (int64_t n : {16, 48, 128}) {
      const std::vector<float> w = numbers(random, n), z = numbers(random, n, range);
      std::vector<float> unit = numbers(random, n, range), normed = unit, gated = unit;
      kernels_only([&] {
        kernels().delta.to_unit(unit.data(), n, 0.25f);
        kernels().delta.gated_norm(normed.data(), w.data(), 1e-6f, z.data(), n);
        kernels().delta.sigmoid_mul(gated.data(), z.data(), n);
      });
      Digest digest;
      for (const std::vector<float>* row : {&unit, &normed, &gated}) digest.add(row->data(), n);
      report("delta rows " + std::to_string(n) + " " + name_of(range), digest);
    }
}

struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
};

void delta_case(aegis::Pool& pool, DeltaShape shape, Range range) {
  constexpr int64_t hidden = 64, rows = 200;
  Random random(16);
  aegis::DeltaBlock::Spec spec{};
  spec.hidden = hidden;
  spec.key_heads = shape.key_heads, spec.value_heads = shape.value_heads;
  spec.key_dim = shape.key_dim, spec.value_dim = shape.value_dim, spec.taps = shape.taps;
  spec.max_tokens = rows, spec.eps = 1e-6f;
  const Weight qkv(random, spec.channels(), hidden, Kind::affine4, DType::bf16);
  const Weight z(random, spec.values(), hidden, Kind::affine8, DType::f16);
  const Weight a(random, spec.value_heads, hidden, Kind::affine3, DType::bf16);
  const Weight b(random, spec.value_heads, hidden, Kind::dense, DType::f32);
  const Weight out(random, hidden, spec.values(), Kind::affine4, DType::f32);
  const std::vector<float> norm = numbers(random, hidden), out_norm = numbers(random, spec.value_dim);
  const std::vector<float> taps = numbers(random, spec.taps * spec.channels());
  const std::vector<float> a_log = numbers(random, spec.value_heads);
  const std::vector<float> dt_bias = numbers(random, spec.value_heads);
  spec.norm = norm.data(), spec.out_norm = out_norm.data(), spec.conv = taps.data();
  spec.a_log = a_log.data(), spec.dt_bias = dt_bias.data();
  spec.qkv = qkv.desc, spec.z = z.desc, spec.a = a.desc, spec.b = b.desc, spec.out = out.desc;
  std::vector<float> x = numbers(random, rows * hidden, range), scratch(1 << 20);
  std::vector<float> memory(static_cast<size_t>(spec.state_numbers()));
  const int64_t nbytes = static_cast<int64_t>(scratch.size()) * 4;
  const aegis::DeltaBlock block(pool, spec, aegis::Scratch(scratch.data(), nbytes));
  const aegis::DeltaState state{memory.data(), memory.data() + spec.head_numbers(),
                                spec.state_numbers()};
  {
    const Foreign environment;
    int64_t start = 0;
    for (int64_t tokens : {1, 2, 150, 45, 1, 1}) {
      block.run(x.data() + start * hidden, tokens, state);
      start += tokens;
    }
  }
  Digest digest;
  digest.add(x.data(), rows * hidden);
  digest.add(memory.data(), spec.state_numbers());
  report("delta " + std::to_string(shape.key_heads) + " " + std::to_string(shape.value_heads) + " " +
             std::to_string(shape.key_dim) + " " + std::to_string(shape.value_dim) + " " +
             std::to_string(shape.taps) + " " + name_of(range),
         digest);
}

}  // namespace

void delta_cases(aegis::Pool& pool) {
  gate_cases();
  row_cases();
  for (DeltaShape shape :
       {DeltaShape{2, 4, 32, 32, 4}, {1, 4, 16, 16, 1}, {2, 8, 48, 48, 2}, {1, 2, 128, 128, 4}})
    for (Range range : {Range::ordinary, Range::tiny, Range::wide}) delta_case(pool, shape, range);
}

}  // namespace digest
