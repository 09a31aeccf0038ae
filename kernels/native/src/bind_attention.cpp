// Python bindings of the attention, router, embedding and head blocks. Addresses are bound once, so
// that a call passes one or two arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "attention_blocks.h"
#include "bind_checks.h"
#include "latent_block.h"

namespace nb = nanobind;
using namespace aegis;

namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Input = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

void check_columns(const char* what, size_t columns, int64_t expected) {
  if (static_cast<int64_t>(columns) != expected)
    refuse(std::string(what) + " has " + std::to_string(columns) + " columns but must have " +
           std::to_string(expected));
}

// A single row takes microseconds and keeps the GIL: getting it back could take milliseconds.
template <class F>
void unlocked(int64_t rows, F&& f) {
  if (rows <= 1) {
    f();
  } else {
    nb::gil_scoped_release release;
    f();
  }
}

QKNorm make_qk_norm(uintptr_t q, uintptr_t k, bool per_head) {
  if (!q && !k) return {};
  return {at<const float>("a query norm", q), at<const float>("a key norm", k), per_head};
}

void make_attention(AttentionBlock* self, Pool& pool, int64_t hidden, int64_t heads,
                    int64_t kv_heads, int64_t dim, int64_t max_tokens, int64_t context, float eps,
                    std::vector<float> inv_freq, uintptr_t norm, const LinearDesc& q,
                    const LinearDesc& k, const LinearDesc& v, const LinearDesc& o,
                    uintptr_t scratch, int64_t scratch_nbytes, uintptr_t q_norm, uintptr_t k_norm,
                    bool norm_per_head, std::optional<float> scale, float residual,
                    bool output_gate, float rotary_scale, int64_t window, uintptr_t sinks) {
  AttentionBlock::Spec spec{hidden, heads, kv_heads, dim, max_tokens, context, eps,
                            std::move(inv_freq), at<const float>("a norm", norm), q, k, v, o,
                            make_qk_norm(q_norm, k_norm, norm_per_head), scale, residual,
                            output_gate, rotary_scale, window,
                            sinks ? at<const float>("sinks", sinks) : nullptr};
  new (self) AttentionBlock(pool, std::move(spec),
                            Scratch(at<float>("scratch", scratch), scratch_nbytes));
}

template <class Block>
void run_attention(const Block& block, Matrix x, const KVView& cache, int64_t start) {
  const int64_t tokens = static_cast<int64_t>(x.shape(0));
  check_columns("x", x.shape(1), block.hidden());
  const int64_t limit = std::min(cache.positions, block.max_positions());
  if (start < 0 || start + tokens > limit)
    refuse("positions " + std::to_string(start) + " to " + std::to_string(start + tokens - 1) +
           " do not fit a context of " + std::to_string(limit));
  if (!block.fits(cache)) refuse("the cache was made for other key/value heads than this layer's");
  float* data = data_of("x", x);
  unlocked(tokens, [&] { block.run(data, tokens, cache, start); });
}

KVView make_cache(uintptr_t address, int64_t kv_heads, int64_t positions, int64_t dim,
                  int64_t value_dim) {
  if (positions % kKeyLanes)
    refuse("a cache of " + std::to_string(positions) + " positions is not a multiple of 16");
  float* keys = at<float>("a KV cache", address);
  return {keys, keys + kv_heads * positions * dim, positions, kv_heads, dim, value_dim};
}

void bind_attention_block(nb::module_& m) {
  nb::class_<KVView>(m, "KVCache")
      .def("__init__",
           [](KVView* self, uintptr_t address, int64_t kv_heads, int64_t positions, int64_t dim,
              int64_t value_dim) {
             new (self) KVView(make_cache(address, kv_heads, positions, dim, value_dim));
           },
           nb::arg("address"), nb::arg("kv_heads"), nb::arg("positions"), nb::arg("dim"),
           nb::arg("value_dim"));
  nb::class_<AttentionBlock>(m, "Attention")
      .def("__init__", &make_attention, nb::arg("pool"), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("dim"), nb::arg("max_tokens"), nb::arg("context"), nb::arg("eps"),
           nb::arg("inv_freq"), nb::arg("norm"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("o"), nb::arg("scratch"), nb::arg("scratch_nbytes"), nb::arg("q_norm") = 0,
           nb::arg("k_norm") = 0, nb::arg("norm_per_head") = false,
           nb::arg("scale") = nb::none(), nb::arg("residual") = 1.0f,
           nb::arg("output_gate") = false, nb::arg("rotary_scale") = 1.0f, nb::arg("window") = 0,
           nb::arg("sinks") = 0, nb::keep_alive<1, 2>())
      .def("__call__", &run_attention<AttentionBlock>, nb::arg("x").noconvert(),
           nb::arg("cache"), nb::arg("start"));
}

void make_latent(LatentBlock* self, Pool& pool, const std::vector<int64_t>& shape, float eps,
                 float lora_eps, std::vector<float> inv_freq, float scale, float rotary_scale,
                 const std::vector<uintptr_t>& norms, const std::vector<LinearDesc>& linears,
                 uintptr_t scratch, int64_t scratch_nbytes) {
  if (shape.size() != 8 || norms.size() != 3 || linears.size() != 6)
    refuse("a latent attention has 8 sizes, 3 norms and 6 linears");
  LatentBlock::Spec spec{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6],
                         shape[7], eps, lora_eps, std::move(inv_freq), scale, rotary_scale,
                         at<const float>("a norm", norms[0]), linears[0], nullptr, linears[1],
                         linears[2], at<const float>("a norm of latents", norms[1]), linears[3],
                         linears[4], linears[5]};
  if (norms[2]) spec.q_norm = at<const float>("a query norm", norms[2]);
  new (self) LatentBlock(pool, std::move(spec),
                         Scratch(at<float>("scratch", scratch), scratch_nbytes));
}

void bind_latent_block(nb::module_& m) {
  nb::class_<LatentBlock>(m, "LatentAttention")
      .def("__init__", &make_latent, nb::arg("pool"), nb::arg("shape"), nb::arg("eps"),
           nb::arg("lora_eps"), nb::arg("inv_freq"), nb::arg("scale"), nb::arg("rotary_scale"),
           nb::arg("norms"), nb::arg("linears"), nb::arg("scratch"), nb::arg("scratch_nbytes"),
           nb::keep_alive<1, 2>())
      .def("__call__", &run_attention<LatentBlock>, nb::arg("x").noconvert(), nb::arg("cache"),
           nb::arg("start"));
}

void make_mlp(MlpBlock* self, Pool& pool, int64_t max_tokens, float eps, uintptr_t norm,
              const LinearDesc& gate, const LinearDesc& up, const LinearDesc& down,
              uintptr_t scratch, int64_t scratch_nbytes, float residual) {
  const MlpBlock::Spec spec{max_tokens, eps, at<const float>("a norm", norm), gate, up, down,
                            residual};
  new (self) MlpBlock(pool, spec, Scratch(at<float>("scratch", scratch), scratch_nbytes));
}

void run_mlp(const MlpBlock& block, Matrix x) {
  const int64_t tokens = static_cast<int64_t>(x.shape(0));
  check_columns("x", x.shape(1), block.hidden());
  float* data = data_of("x", x);
  unlocked(tokens, [&] { block.run(data, tokens); });
}

void bind_mlp_block(nb::module_& m) {
  nb::class_<MlpBlock>(m, "Mlp")
      .def("__init__", &make_mlp, nb::arg("pool"), nb::arg("max_tokens"), nb::arg("eps"),
           nb::arg("norm"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("scratch"),
           nb::arg("scratch_nbytes"), nb::arg("residual") = 1.0f, nb::keep_alive<1, 2>())
      .def("__call__", &run_mlp, nb::arg("x").noconvert());
}

void make_layer(RouterBlock::Layer* self, uintptr_t norm, const LinearDesc& gate, float eps, int k,
                bool normalise, bool sigmoid, uintptr_t correction, int groups, int kept,
                float scaling) {
  const float* added = correction ? at<const float>("a correction", correction) : nullptr;
  new (self) RouterBlock::Layer{at<const float>("a norm", norm), gate, eps, k,
                                {normalise, sigmoid, added, groups, kept, scaling}};
}

void make_router(RouterBlock* self, Pool& pool, int64_t hidden, int64_t max_tokens,
                 const RouterBlock::Layer& layer, std::optional<RouterBlock::Layer> next,
                 uintptr_t normed, uintptr_t experts, uintptr_t weights, uintptr_t guess,
                 uintptr_t scratch, int64_t scratch_nbytes) {
  const RouterBlock::Outputs outputs{
      at<float>("normed", normed), at<int32_t>("experts", experts), at<float>("weights", weights),
      at<int32_t>("guess", guess)};
  new (self) RouterBlock(pool, hidden, max_tokens, layer, next, outputs,
                         Scratch(at<float>("scratch", scratch), scratch_nbytes));
}

int run_router(const RouterBlock& block, Input x, int candidates) {
  const int64_t tokens = static_cast<int64_t>(x.shape(0));
  check_columns("x", x.shape(1), block.hidden());
  if (tokens > block.max_tokens())
    refuse("a call of " + std::to_string(tokens) + " rows exceeds the workspace's " +
           std::to_string(block.max_tokens()));
  int guessed = 0;
  const float* data = data_of("x", x);
  unlocked(tokens, [&] { guessed = block.run(data, tokens, candidates); });
  return guessed;
}

void bind_router_block(nb::module_& m) {
  nb::class_<RouterBlock::Layer>(m, "RouterLayer")
      .def("__init__", &make_layer, nb::arg("norm"), nb::arg("gate"), nb::arg("eps"),
           nb::arg("k"), nb::arg("normalise"), nb::arg("sigmoid") = false,
           nb::arg("correction") = 0, nb::arg("groups") = 1, nb::arg("kept") = 1,
           nb::arg("scaling") = 1.0f);
  nb::class_<RouterBlock>(m, "Router")
      .def("__init__", &make_router, nb::arg("pool"), nb::arg("hidden"), nb::arg("max_tokens"),
           nb::arg("layer"), nb::arg("next").none(), nb::arg("normed"),
           nb::arg("experts"), nb::arg("weights"), nb::arg("guess"), nb::arg("scratch"),
           nb::arg("scratch_nbytes"), nb::keep_alive<1, 2>())
      .def("__call__", &run_router, nb::arg("x").noconvert(), nb::arg("candidates"));
}

void make_head(HeadBlock* self, Pool& pool, uintptr_t norm, float eps, const LinearDesc& lm_head,
               int64_t max_rows, uintptr_t scratch, int64_t scratch_nbytes, float scaling) {
  new (self) HeadBlock(pool, at<const float>("a norm", norm), eps, lm_head, max_rows,
                       Scratch(at<float>("scratch", scratch), scratch_nbytes), scaling);
}

void run_head(const HeadBlock& block, Input x, Matrix logits) {
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  check_columns("x", x.shape(1), block.lm_head().in_features);
  check_columns("logits", logits.shape(1), block.lm_head().rows);
  if (rows > block.max_rows() || static_cast<int64_t>(logits.shape(0)) < rows)
    refuse(std::to_string(rows) + " rows of logits exceed the workspace's " +
           std::to_string(block.max_rows()));
  const float* data = data_of("x", x);
  float* out = data_of("logits", logits);
  unlocked(rows, [&] { block.run(data, rows, out); });
}

void check_ids(const Ids& ids, int64_t rows) {
  const int32_t* data = data_of("ids", ids);
  for (size_t t = 0; t < ids.shape(0); ++t)
    if (data[t] < 0 || data[t] >= rows)
      refuse("token id " + std::to_string(data[t]) + " is not between 0 and " +
             std::to_string(rows - 1));
}

// The ids' rows of a table times a number: `ranges` holds the range of each id if given, else the
// table is in memory.
void gather(const LinearDesc& table, Ids ids, std::optional<Bytes> ranges, Matrix out,
            float multiplier) {
  check_ids(ids, table.rows);
  check_columns("out", out.shape(1), table.in_features);
  if (out.shape(0) < ids.shape(0)) refuse("there are more token ids than rows of the output");
  if (ranges) {
    check_columns("rows", ranges->shape(1), table.row_block_nbytes());
    if (ranges->shape(0) < ids.shape(0)) refuse("there are more token ids than rows read");
  }
  const uint8_t* source = ranges ? data_of("rows", *ranges) : table.data;
  float* to = data_of("out", out);
  const FpEnvironment environment;
  for (size_t t = 0; t < ids.shape(0); ++t) {
    const int64_t id = ids.data()[t];
    const int64_t block = table.row_block_nbytes();
    const uint8_t* at = source + (ranges ? static_cast<int64_t>(t) : id / kLanes) * block;
    float* row = to + static_cast<int64_t>(t) * table.in_features;
    kernels().attention.table_row(table, at, static_cast<int>(id % kLanes), row);
    if (multiplier != 1.0f)
      for (int64_t i = 0; i < table.in_features; ++i) row[i] *= multiplier;
  }
}

// Single kernels, for tests against numpy.
void rms_norm(Input x, Vector weight, float eps, Matrix out) {
  const FpEnvironment environment;
  check_columns("weight", weight.shape(0), static_cast<int64_t>(x.shape(1)));
  check_columns("out", out.shape(1), static_cast<int64_t>(x.shape(1)));
  if (x.shape(1) % kGroup || out.shape(0) < x.shape(0)) refuse("rows of x do not fit the norm's output");
  const float *from = data_of("x", x), *scale = data_of("weight", weight);
  float* to = data_of("out", out);
  const int64_t n = static_cast<int64_t>(x.shape(1));
  for (int64_t row = 0; row < static_cast<int64_t>(x.shape(0)); ++row)
    kernels().attention.rms_norm(from + row * n, scale, eps, n, to + row * n);
}

void elementwise(const std::string& name, Vector x, Vector out) {
  constexpr const char* names[] = {"exp", "sigmoid", "silu", "softplus", "sin", "cos"};
  int f = 0;
  while (f < 6 && name != names[f]) ++f;
  if (f == 6) refuse("no elementary function is called " + name);
  if (x.shape(0) != out.shape(0)) refuse("x and out differ in length");
  const FpEnvironment environment;
  kernels().attention.elementwise(static_cast<Elementwise>(f), data_of("x", x),
                                  static_cast<int64_t>(x.shape(0)), data_of("out", out));
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_attention_block(m);
  bind_latent_block(m);
  bind_mlp_block(m);
  bind_router_block(m);
  nb::class_<HeadBlock>(m, "Head")
      .def("__init__", &make_head, nb::arg("pool"), nb::arg("norm"), nb::arg("eps"),
           nb::arg("lm_head"), nb::arg("max_rows"), nb::arg("scratch"), nb::arg("scratch_nbytes"),
           nb::arg("scaling") = 1.0f, nb::keep_alive<1, 2>())
      .def("__call__", &run_head, nb::arg("x").noconvert(), nb::arg("logits").noconvert());
  m.def("gather", &gather, nb::arg("table"), nb::arg("ids").noconvert(), nb::arg("ranges").none(),
        nb::arg("out").noconvert(), nb::arg("multiplier") = 1.0f);
  m.def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
        nb::arg("eps"), nb::arg("out").noconvert());
  m.def("elementwise", &elementwise, nb::arg("name"), nb::arg("x").noconvert(),
        nb::arg("out").noconvert());
}
