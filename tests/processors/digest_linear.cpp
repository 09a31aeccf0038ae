// Linear layers of every kind, number type and count of tokens; and the kernels of single rows.
#include <string>

#include "digest.h"
#include "kernel_table.h"

namespace digest {

using aegis::kernels;

namespace {

constexpr int kMostTokens = 17;
constexpr int64_t kGroups = 3;
constexpr int64_t kIn = kGroups * aegis::kGroup;
constexpr int64_t kOtherIn = 2 * aegis::kMostGroup;  // of weights in groups of 32 or 128

// y = W x for rows [first, first + tokens) of x.
std::vector<float> multiply(aegis::Pool& pool, const Weight& weight, const std::vector<float>& x,
                            int64_t first, int64_t tokens) {
  const int64_t groups = weight.desc.groups(), in = weight.desc.in_features;
  std::vector<float> sums(static_cast<size_t>(tokens * groups));
  std::vector<float> out(static_cast<size_t>(tokens * weight.desc.rows));
  kernels_only([&] {
    for (int64_t t = 0; t < tokens; ++t)
      kernels().row_sums(x.data() + (first + t) * in, in, sums.data() + t * groups);
  });
  aegis::LinearJob job{};
  job.w = &weight.desc;
  job.in.x = x.data() + first * in;
  job.in.ld = in;
  job.in.sums = sums.data();
  job.in.ld_sums = groups;
  job.out = out.data();
  job.ld_out = weight.desc.rows;
  const Foreign environment;
  aegis::linear(pool, &job, 1, tokens);
  return out;
}

uint64_t digest_of(const float* values, int64_t count) {
  Digest digest;
  digest.add(values, count);
  return digest.value();
}

// One token's row with its codes used in place, whether or not this processor is quick at that.
void check_in_place(const Weight& weight, const float* x, uint64_t expected, Range range,
                    const std::string& name) {
  const LinearDesc& w = weight.desc;
  const bool in_place = w.kind != Kind::dense && w.kind != Kind::affine8 && w.kind != Kind::mxfp4 &&
                        w.group_size != 32;
  if (!kernels().scale_inputs || !in_place) return;
  const int64_t in = w.in_features;
  std::vector<float> scaled(static_cast<size_t>(in)), sums(static_cast<size_t>(w.groups()));
  std::vector<float> y(static_cast<size_t>(w.rows));
  const float* inputs = x;
  const float* input_sums = sums.data();
  float* out = y.data();
  aegis::TileArgs args{};
  args.w = &w;
  args.block_end = w.row_blocks();
  args.tokens = 1;
  args.x = &inputs;
  args.sums = &input_sums;
  args.out = &out;
  args.scaled = scaled.data();
  bool ready = false;
  kernels_only([&] {
    kernels().row_sums(x, in, sums.data());
    ready = kernels().scale_inputs(w.kind, x, in, scaled.data());
    if (ready) kernels().linear_tile(args);
  });
  if (ready && digest_of(y.data(), w.rows) != expected) fail(name + ": codes in place give other bits");
  if (!ready && range == Range::ordinary) fail(name + ": ordinary inputs cannot be scaled");
}

void linear_case(aegis::Pool& pool, const Weight& weight, Range range, bool every_count,
                 const std::string& name) {
  Random random(7);
  const std::vector<float> x = numbers(random, kMostTokens * weight.desc.in_features, range);
  const int64_t rows = weight.desc.rows;
  std::vector<uint64_t> alone;
  Digest digest;
  for (int64_t t = 0; t < kMostTokens; ++t) {
    const std::vector<float> y = multiply(pool, weight, x, t, 1);
    alone.push_back(digest_of(y.data(), rows));
    digest.add(alone.back());
    check_in_place(weight, x.data() + t * weight.desc.in_features, alone.back(), range, name);
  }
  report(name, digest);
  for (int64_t tokens = 2; tokens <= kMostTokens; ++tokens) {
    if (!every_count && tokens != 2 && tokens != 6 && tokens != kMostTokens) continue;
    const std::vector<float> y = multiply(pool, weight, x, 0, tokens);
    for (int64_t t = 0; t < tokens; ++t)
      if (digest_of(y.data() + t * rows, rows) != alone[static_cast<size_t>(t)])
        fail(name + ": row " + std::to_string(t) + " of " + std::to_string(tokens) +
             " differs from the same row alone");
  }
}

void kind_cases(aegis::Pool& pool, Random& random, Kind kind, DType dtype) {
  for (int64_t rows : {1, 9, 48}) {
    const std::string name = std::string("linear ") + name_of(kind) + " " + name_of(dtype) + " " +
                             std::to_string(rows) + " ";
    const Weight weight(random, rows, kIn, kind, dtype);
    for (Range range : {Range::ordinary, Range::wide, Range::tiny, Range::edges})
      linear_case(pool, weight, range, range == Range::ordinary, name + name_of(range));
    const Weight with_bias(random, rows, kIn, kind, dtype, true);
    linear_case(pool, with_bias, Range::ordinary, false, name + "with bias");
  }
}

void group_cases(aegis::Pool& pool, Random& random, Kind kind, int64_t group_size) {
  const std::string name = std::string("linear ") + name_of(kind) + " in groups of " +
                           std::to_string(group_size) + " ";
  for (DType dtype : kDTypes) {
    const bool usual = dtype == DType::bf16;
    const Weight weight(random, 17, kOtherIn, kind, dtype, false, group_size);
    linear_case(pool, weight, Range::ordinary, usual, name + name_of(dtype) + " ordinary");
    if (usual) linear_case(pool, weight, Range::edges, false, name + name_of(dtype) + " edges");
  }
}

// Large enough to be shared out.
void shared_case(aegis::Pool& pool, Random& random, Kind kind, DType dtype) {
  const Weight weight(random, 192, 512, kind, dtype);
  linear_case(pool, weight, Range::ordinary, false, std::string("linear shared ") + name_of(kind));
}

}  // namespace

void linear_cases(aegis::Pool& pool) {
  Random random(1);
  for (Kind kind : kKinds)
    for (DType dtype : kDTypes) kind_cases(pool, random, kind, dtype);
  kind_cases(pool, random, Kind::mxfp4, DType::e8m0);
  for (Kind kind : kKinds)
    for (int64_t group_size : {32, 128})
      if (kind != Kind::dense) group_cases(pool, random, kind, group_size);
  for (Kind kind : kKinds) shared_case(pool, random, kind, DType::bf16);
  shared_case(pool, random, Kind::mxfp4, DType::e8m0);
}

void vector_cases() {
  Random random(2);
  for (Range range : {Range::ordinary, Range::wide, Range::tiny, Range::edges}) {
    constexpr int64_t n = 1024;
    const std::vector<float> a = numbers(random, n, range), b = numbers(random, n, range);
    std::vector<float> out(n), sums(n / aegis::kGroup), gates(n), accumulated = b, clamped(n);
    kernels_only([&] {
      kernels().row_sums(a.data(), n, sums.data());
      kernels().silu_mul(a.data(), b.data(), out.data(), n);
      kernels().clamped_swiglu(a.data(), b.data(), {0.75f, 1.702f}, clamped.data(), n);
      kernels().axpy(a[0], a.data(), accumulated.data(), n);
      for (int64_t i = 0; i < n; ++i) gates[i] = kernels().sigmoid(a[i]);
    });
    Digest digest;
    digest.add(sums.data(), n / aegis::kGroup);
    digest.add(out.data(), n);
    digest.add(accumulated.data(), n);
    digest.add(gates.data(), n);
    report(std::string("vectors ") + name_of(range), digest);
    Digest of_clamped;
    of_clamped.add(clamped.data(), n);
    report(std::string("clamped swiglu ") + name_of(range), of_clamped);
  }
}

namespace {

void table_case(const Weight& table, const std::string& name) {
  const int64_t in = table.desc.in_features;
  std::vector<float> row(static_cast<size_t>(in));
  Digest digest;
  for (int64_t id = 0; id < table.desc.rows; ++id) {
    const uint8_t* block = table.desc.data + id / aegis::kLanes * table.desc.row_block_nbytes();
    kernels_only([&] {
      const int lane = static_cast<int>(id % aegis::kLanes);
      kernels().attention.table_row(table.desc, block, lane, row.data());
    });
    digest.add(row.data(), in);
  }
  report(name, digest);
}

void usual_table(Random& random, Kind kind, DType dtype) {
  table_case(Weight(random, 48, kIn, kind, dtype),
             std::string("table ") + name_of(kind) + " " + name_of(dtype));
}

}  // namespace

void table_cases() {
  Random random(3);
  for (Kind kind : kKinds)
    for (DType dtype : kDTypes) usual_table(random, kind, dtype);
  usual_table(random, Kind::mxfp4, DType::e8m0);
  for (Kind kind : kKinds)
    for (int64_t group_size : {32, 128})
      if (kind != Kind::dense)
        table_case(Weight(random, 48, kOtherIn, kind, DType::bf16, false, group_size),
                   std::string("table ") + name_of(kind) + " in groups of " + std::to_string(group_size));
}

}  // namespace digest
