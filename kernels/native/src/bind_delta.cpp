// Python bindings of Gated DeltaNet.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <string>

#include "bind_checks.h"
#include "delta_block.h"

namespace nb = nanobind;
using namespace aegis;

namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

DeltaState make_state(uintptr_t address, int64_t head_numbers, int64_t numbers) {
  float* heads = at<float>("a recurrent state", address);
  return {heads, heads + head_numbers, numbers};
}

void make_delta(DeltaBlock* self, Pool& pool, int64_t hidden, int64_t key_heads, int64_t value_heads,
                int64_t key_dim, int64_t value_dim, int64_t taps, int64_t max_tokens, float eps,
                uintptr_t norm, uintptr_t conv, uintptr_t a_log, uintptr_t dt_bias,
                uintptr_t out_norm, const LinearDesc& qkv, const LinearDesc& z, const LinearDesc& a,
                const LinearDesc& b, const LinearDesc& out, uintptr_t scratch,
                int64_t scratch_nbytes) {
  const DeltaBlock::Spec spec{hidden, key_heads, value_heads, key_dim, value_dim, taps, max_tokens,
                              eps, at<const float>("a norm", norm),
                              at<const float>("a convolution", conv),
                              at<const float>("A_log", a_log), at<const float>("dt_bias", dt_bias),
                              at<const float>("a norm", out_norm), qkv, z, a, b, out};
  new (self) DeltaBlock(pool, spec, Scratch(at<float>("scratch", scratch), scratch_nbytes));
}

void run_delta(const DeltaBlock& block, Matrix x, const DeltaState& state, bool first) {
  const int64_t tokens = static_cast<int64_t>(x.shape(0));
  if (static_cast<int64_t>(x.shape(1)) != block.hidden())
    refuse("x has " + std::to_string(x.shape(1)) + " columns but must have " +
           std::to_string(block.hidden()));
  if (!block.fits(state)) refuse("the recurrent state was made for other sizes than this layer's");
  float* data = data_of("x", x);
  const auto run = [&] {
    if (first) std::memset(state.heads, 0, static_cast<size_t>(state.numbers) * 4);
    block.run(data, tokens, state);
  };
  // A single row takes microseconds and keeps the GIL: getting it back could take milliseconds.
  if (tokens <= 1) {
    run();
  } else {
    nb::gil_scoped_release release;
    run();
  }
}

}  // namespace

void bind_delta(nb::module_& m) {
  nb::class_<DeltaState>(m, "DeltaState")
      .def("__init__",
           [](DeltaState* self, uintptr_t address, int64_t head_numbers, int64_t numbers) {
             new (self) DeltaState(make_state(address, head_numbers, numbers));
           },
           nb::arg("address"), nb::arg("head_numbers"), nb::arg("numbers"));
  nb::class_<DeltaBlock>(m, "Delta")
      .def("__init__", &make_delta, nb::arg("pool"), nb::arg("hidden"), nb::arg("key_heads"),
           nb::arg("value_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("taps"),
           nb::arg("max_tokens"), nb::arg("eps"), nb::arg("norm"), nb::arg("conv"),
           nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("out_norm"), nb::arg("qkv"), nb::arg("z"),
           nb::arg("a"), nb::arg("b"), nb::arg("out"), nb::arg("scratch"),
           nb::arg("scratch_nbytes"), nb::keep_alive<1, 2>())
      .def("__call__", &run_delta, nb::arg("x").noconvert(), nb::arg("state"), nb::arg("first"));
}
