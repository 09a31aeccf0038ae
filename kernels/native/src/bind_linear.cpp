// Python bindings of the pool, the tables and the linear layers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "bind_checks.h"
#include "kernel_table.h"
#include "linear.h"

namespace nb = nanobind;
using namespace aegis;

namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Kind kind_of(int bits, DType dtype) {
    if (dtype == DType::e8m0) {
        if (bits != 4) throw nb::value_error("scales of e8m0 belong to codes of 4 bits");
        return Kind::mxfp4;
    }
    if (bits != 0 && (bits < 2 || bits > 8 || bits == 7))
        throw nb::value_error(
            ("no native kernel for " + std::to_string(bits) + "-bit codes; 2, 3, 4, 5, 6 and 8 have one").c_str());
    return static_cast<Kind>(bits);
}

DType dtype_of(const std::string& name) {
    if (name == "bf16") return DType::bf16;
    if (name == "f16") return DType::f16;
    if (name == "f32") return DType::f32;
    if (name == "e8m0") return DType::e8m0;
    throw nb::value_error(("number type " + name + " is not bf16, f16, f32 or e8m0").c_str());
}

LinearDesc make_desc(uintptr_t address, int64_t rows, int64_t in_features, int bits, const std::string& dtype,
                     uintptr_t bias, int64_t group_size) {
    if (group_size != kGroup && (bits == 0 || (group_size != 32 && group_size != kMostGroup)))
        throw nb::value_error(("groups of " + std::to_string(group_size) + " have no native kernel; 32, 64 and 128 have one").c_str());
    const int64_t step = std::max(group_size, kGroup);
    if (rows <= 0 || in_features <= 0 || in_features % step != 0)
        throw nb::value_error(("a linear of " + std::to_string(rows) + " rows and " + std::to_string(in_features) +
                               " input features cannot be computed: rows must be positive and input features a "
                               "multiple of " + std::to_string(step))
                                  .c_str());
    LinearDesc desc;
    desc.data = at<const uint8_t>("a weight", address);
    desc.rows = rows;
    desc.in_features = in_features;
    desc.dtype = dtype_of(dtype);
    desc.kind = kind_of(bits, desc.dtype);
    desc.bias = at<const float>("a bias", bias);
    desc.group_size = group_size;
    return desc;
}

// y = W x [+ bias] for x [T, in] and y [T, rows].
void run_linear(Pool& pool, const LinearDesc& desc, Matrix x, Matrix out) {
    const int64_t tokens = static_cast<int64_t>(x.shape(0));
    if (static_cast<int64_t>(x.shape(1)) != desc.in_features || static_cast<int64_t>(out.shape(1)) != desc.rows ||
        static_cast<int64_t>(out.shape(0)) != tokens)
        throw nb::value_error("linear: x must be [T, in_features] and out [T, rows]");
    const float* rows = data_of("x", x);
    float* results = data_of("out", out);
    std::vector<float> sums(static_cast<size_t>(tokens * desc.groups()));
    nb::gil_scoped_release release;
    const FpEnvironment environment;
    for (int64_t t = 0; t < tokens; ++t)
        kernels().row_sums(rows + t * desc.in_features, desc.in_features, sums.data() + t * desc.groups());
    const LinearJob job{&desc, {rows, desc.in_features, sums.data(), desc.groups()}, results, desc.rows};
    linear(pool, &job, 1, tokens);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Some 100 us of work in registers, so that what is timed next finds the workers awake.
void wake(Pool& pool) {
    pool.run([](Team& team) {
        team.each(8 * team.size, 1, [](int64_t begin, int64_t end) {
            float sink[18] = {};
            kernels().fma_probe(4000 * (end - begin), sink);
        });
    });
}

// Best seconds of `repeats` passes over all descriptors.
double time_linears(Pool& pool, const std::vector<LinearDesc*>& descs, int64_t tokens, int repeats) {
    int64_t in = 0, rows = 0;
    for (const auto* d : descs) in = std::max(in, d->in_features), rows = std::max(rows, d->rows);
    const int64_t ld = padded_ld(in);
    std::vector<float> x(static_cast<size_t>(tokens * ld)), sums(static_cast<size_t>(tokens * in / kGroup));
    std::vector<float> out(static_cast<size_t>(tokens * rows));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i * 2654435761u >> 20 & 1023) - 512) / 512;
    for (int64_t t = 0; t < tokens; ++t) kernels().row_sums(&x[t * ld], in, &sums[t * (in / kGroup)]);
    nb::gil_scoped_release release;
    double best = 1e30;
    for (int r = 0; r < repeats; ++r) {
        wake(pool);
        const auto start = std::chrono::steady_clock::now();
        for (const auto* d : descs) {
            const LinearJob job{d, {x.data(), ld, sums.data(), in / kGroup}, out.data(), rows};
            linear(pool, &job, 1, tokens);
        }
        best = std::min(best, seconds_since(start));
    }
    return best;
}

// Best seconds of reading [address, address + nbytes) once with the whole pool.
double time_read(Pool& pool, uintptr_t address, int64_t nbytes, int repeats) {
    nb::gil_scoped_release release;
    const auto* data = at<const float>("the memory to read", address);
    const int64_t pieces = nbytes / (1 << 18);
    std::atomic<int> guard{0};
    double best = 1e30;
    for (int r = 0; r < repeats; ++r) {
        wake(pool);
        const auto start = std::chrono::steady_clock::now();
        pool.run([&](Team& team) {
            team.each(pieces, 1, [&](int64_t begin, int64_t end) {
                const float sum = kernels().read_probe(data + (begin << 16), (end - begin) << 16);
                if (sum == 12345.0f) guard.fetch_add(1);
            });
        });
        best = std::min(best, seconds_since(start));
    }
    return best;
}

// Best FLOP per second of independent multiply-adds in registers over the whole pool.
double fma_peak(Pool& pool, int repeats) {
    nb::gil_scoped_release release;
    double best = 0;
    for (int r = 0; r < repeats; ++r) {
        std::atomic<int64_t> count{0};
        wake(pool);
        const auto start = std::chrono::steady_clock::now();
        pool.run([&](Team& team) {
            team.each(16 * team.size, 1, [&](int64_t begin, int64_t end) {
                float sink[18];
                for (int i = 0; i < 18; ++i) sink[i] = 0.5f;
                count.fetch_add(kernels().fma_probe(20000 * (end - begin), sink));
            });
        });
        best = std::max(best, 2.0 * static_cast<double>(count.load()) / seconds_since(start));
    }
    return best;
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (int n = 0; available_isa(n); ++n) names.emplace_back(available_isa(n));
    return names;
}

void choose_isa(const std::string& name) {
    if (!select_isa(name.c_str())) throw nb::value_error(("instruction set " + name + " is not available here").c_str());
}

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<Pool>(m, "Pool")
        .def(nb::init<int>(), nb::arg("threads"))
        .def_prop_ro("threads", &Pool::threads)
        .def("set_threads", &Pool::set_threads, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
    nb::class_<LinearDesc>(m, "LinearDesc")
        .def("__init__",
             [](LinearDesc* self, uintptr_t address, int64_t rows, int64_t in_features, int bits,
                const std::string& dtype, uintptr_t bias, int64_t group_size) {
                 new (self) LinearDesc(make_desc(address, rows, in_features, bits, dtype, bias, group_size));
             },
             nb::arg("address"), nb::arg("rows"), nb::arg("in_features"), nb::arg("bits"), nb::arg("dtype"),
             nb::arg("bias") = 0, nb::arg("group_size") = kGroup)
        .def_ro("rows", &LinearDesc::rows)
        .def_ro("in_features", &LinearDesc::in_features)
        .def_prop_ro("nbytes", [](const LinearDesc& d) { return d.nbytes(); });
    m.def("linear", &run_linear, nb::arg("pool"), nb::arg("desc"), nb::arg("x").noconvert(), nb::arg("out").noconvert());
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("isas", &isas);
    m.def("select_isa", &choose_isa, nb::arg("name"));
    m.def("usable_processors", &usable_processors);
    m.def("wake", &wake, nb::arg("pool"), nb::call_guard<nb::gil_scoped_release>());
    m.def("time_linears", &time_linears, nb::arg("pool"), nb::arg("descs"), nb::arg("tokens"), nb::arg("repeats"));
    m.def("time_read", &time_read, nb::arg("pool"), nb::arg("address"), nb::arg("nbytes"), nb::arg("repeats"));
    m.def("fma_peak", &fma_peak, nb::arg("pool"), nb::arg("repeats"));
}
