#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_linear(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_delta(nb::module_& m);
void bind_read_pool(nb::module_& m);
void bind_crc32(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels: linear layers, experts, attention, routing and direct reads.";
    // Objects that live until the interpreter ends are no leak worth a message on stderr.
    nb::set_leak_warnings(false);
    bind_linear(m);
    bind_experts(m);
    bind_attention(m);
    bind_delta(m);
    bind_read_pool(m);
    bind_crc32(m);
}
