#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <optional>
#include <tuple>

#include "bind_checks.h"
#include "experts.h"

namespace nb = nanobind;
using namespace aegis;

namespace {

using Floats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstInts = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t check_rows(const ExpertsShape& shape, const Floats& x, const ConstFloats& normed, const ConstInts& experts,
                   const ConstFloats& weights) {
    const size_t rows = x.shape(0), hidden = static_cast<size_t>(shape.hidden);
    const size_t choices = static_cast<size_t>(shape.per_token);
    if (x.shape(1) != hidden || normed.shape(0) != rows || normed.shape(1) != hidden || experts.shape(0) != rows ||
        experts.shape(1) != choices || weights.shape(0) != rows || weights.shape(1) != choices)
        throw nb::value_error("experts: x and normed must be [T, hidden_size], experts and weights [T, num_experts_per_tok]");
    check_array("x", x);
    check_array("normed", normed);
    check_array("experts", experts);
    check_array("weights", weights);
    return static_cast<int64_t>(rows);
}

void check_ids(const Ids& experts, const Ids& slots) {
    if (experts.shape(0) != slots.shape(0)) throw nb::value_error("experts and slots must have the same length");
    check_array("experts", experts);
    check_array("slots", slots);
}

// Keeps the shape for checks, and one call's arrays alive from begin to finish.
class ExpertsBinding {
public:
    ExpertsBinding(Pool& pool, const ExpertsShape& shape, const SlotRange& slots, const ExpertDescs& routed,
                   const ExpertDescs* shared, const LinearDesc* gate, uint8_t* scratch, int64_t scratch_nbytes,
                   float residual, std::optional<SwigluClamp> clamp)
        : shape_(shape), experts_(pool, shape, slots, routed, shared, gate, scratch, scratch_nbytes, residual, clamp) {}

    void begin(Floats x, ConstFloats normed, ConstInts experts, ConstFloats weights) {
        const int64_t rows = check_rows(shape_, x, normed, experts, weights);
        held_.emplace(x, normed, experts, weights);
        nb::gil_scoped_release release;
        experts_.begin(x.data(), normed.data(), experts.data(), weights.data(), rows);
    }

    void add(Ids experts, Ids slots) {
        check_ids(experts, slots);
        nb::gil_scoped_release release;
        experts_.add(experts.data(), slots.data(), static_cast<int64_t>(experts.shape(0)));
    }

    void finish() {
        {
            nb::gil_scoped_release release;
            experts_.finish();
        }
        held_.reset();
    }

    void run(Floats x, ConstFloats normed, ConstInts chosen, ConstFloats weights, Ids experts, Ids slots) {
        const int64_t rows = check_rows(shape_, x, normed, chosen, weights);
        check_ids(experts, slots);
        nb::gil_scoped_release release;
        experts_.run(x.data(), normed.data(), chosen.data(), weights.data(), rows, experts.data(), slots.data(),
                     static_cast<int64_t>(experts.shape(0)));
    }

private:
    ExpertsShape shape_;
    Experts experts_;
    std::optional<std::tuple<Floats, ConstFloats, ConstInts, ConstFloats>> held_;
};

ExpertsShape shape_of(const nb::tuple& t) {
    if (t.size() != 6) throw nb::value_error("an experts shape has six numbers");
    const auto at = [&](size_t i) { return nb::cast<int64_t>(t[i]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5)};
}

ExpertDescs descs_of(const nb::tuple& t) {
    if (t.size() != 3) throw nb::value_error("an expert has three linears: gate, up, down");
    return {nb::cast<LinearDesc&>(t[0]), nb::cast<LinearDesc&>(t[1]), nb::cast<LinearDesc&>(t[2])};
}

void check_expert(const ExpertDescs& e, int64_t hidden, int64_t intermediate) {
    for (const LinearDesc* d : {&e.gate, &e.up})
        if (d->rows != intermediate || d->in_features != hidden)
            throw nb::value_error("gate_proj and up_proj must be (intermediate, hidden_size)");
    if (e.down.rows != hidden || e.down.in_features != intermediate)
        throw nb::value_error("down_proj must be (hidden_size, intermediate)");
}

void init_experts(ExpertsBinding* self, Pool& pool, const nb::tuple& shape_tuple, uintptr_t slot_base, int64_t slot_stride,
                  int64_t slot_count, const nb::tuple& routed_tuple, const nb::object& shared_tuple,
                  const nb::object& gate, uintptr_t scratch, int64_t scratch_nbytes, float residual,
                  std::optional<std::pair<float, float>> clamp) {
    const ExpertsShape shape = shape_of(shape_tuple);
    const ExpertDescs routed = descs_of(routed_tuple);
    check_expert(routed, shape.hidden, shape.intermediate);
    ExpertDescs shared;
    const bool has_shared = !shared_tuple.is_none();
    if (has_shared) {
        shared = descs_of(nb::cast<nb::tuple>(shared_tuple));
        check_expert(shared, shape.hidden, shape.shared_intermediate);
    }
    const LinearDesc* gate_desc = gate.is_none() ? nullptr : nb::cast<LinearDesc*>(gate);
    if (gate_desc && (gate_desc->rows != 1 || gate_desc->in_features != shape.hidden))
        throw nb::value_error("shared_expert_gate must be (1, hidden_size)");
    std::optional<SwigluClamp> limits;
    if (clamp) limits = {clamp->first, clamp->second};
    check_address("a slot", slot_base | static_cast<uintptr_t>(slot_stride));
    const SlotRange slots{reinterpret_cast<uint8_t*>(slot_base), slot_stride, slot_count};
    new (self) ExpertsBinding(pool, shape, slots, routed, has_shared ? &shared : nullptr, gate_desc,
                              at<uint8_t>("scratch", scratch), scratch_nbytes, residual, limits);
}

}  // namespace

void bind_experts(nb::module_& m) {
    m.attr("UNORDERED_ROWS") = kUnorderedRows;
    m.def("experts_scratch_nbytes", [](const nb::tuple& shape) { return Experts::scratch_nbytes(shape_of(shape)); },
          nb::arg("shape"));
    nb::class_<ExpertsBinding>(m, "Experts")
        .def("__init__", &init_experts, nb::keep_alive<1, 2>(), nb::arg("pool"), nb::arg("shape"), nb::arg("slot_base"),
             nb::arg("slot_stride"), nb::arg("slot_count"), nb::arg("routed"), nb::arg("shared").none(),
             nb::arg("shared_gate").none(), nb::arg("scratch"), nb::arg("scratch_nbytes"),
             nb::arg("residual") = 1.0f, nb::arg("clamp") = nb::none())
        .def("begin", &ExpertsBinding::begin, nb::arg("x").noconvert(), nb::arg("normed").noconvert(),
             nb::arg("experts").noconvert(), nb::arg("weights").noconvert())
        .def("add", &ExpertsBinding::add, nb::arg("experts").noconvert(), nb::arg("slots").noconvert())
        .def("finish", &ExpertsBinding::finish)
        .def("run", &ExpertsBinding::run, nb::arg("x").noconvert(), nb::arg("normed").noconvert(),
             nb::arg("chosen").noconvert(), nb::arg("weights").noconvert(), nb::arg("experts").noconvert(),
             nb::arg("slots").noconvert());
}
