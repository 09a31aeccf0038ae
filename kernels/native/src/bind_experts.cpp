#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_experts(nb::module_&) {}
