// Python bindings of the reader threads.
#include "read_pool.h"

#include <exception>

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace {

using aegis::ReadPool;

// Waits in short turns without the GIL, so that Ctrl-C is seen between them.
constexpr int kTurnMs = 50;

std::vector<ReadPool::Ticket> wait_any(ReadPool& pool, const std::vector<ReadPool::Ticket>& tickets,
                                       bool block) {
    std::vector<ReadPool::Ticket> ended;
    if (!block) {
        pool.poll(tickets, ended, 0);
        return ended;
    }
    while (ended.empty() && !tickets.empty()) {
        {
            nb::gil_scoped_release release;
            pool.poll(tickets, ended, kTurnMs);
        }
        if (ended.empty() && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    return ended;
}

// As a dictionary says it, and as the Python twin does.
void raise_key_error(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const aegis::UnknownTicket& error) {
        PyErr_SetString(PyExc_KeyError, error.what());
    }
}

}  // namespace

void bind_read_pool(nb::module_& m) {
    nb::register_exception_translator(raise_key_error);
    nb::class_<ReadPool>(m, "ReadPool", "Reader threads with two queues: demand before guess.")
        .def(
            "__init__",
            [](ReadPool* self, int threads, bool drop_cache, std::uintptr_t read) {
                new (self) ReadPool(threads, drop_cache, reinterpret_cast<ReadPool::ReadCall>(read));
            },
            nb::arg("threads"), nb::arg("drop_cache") = false, nb::arg("read") = 0,
            "read: the address of a function to call in place of preadv; for tests.")
        .def(
            "submit",
            [](ReadPool& pool, int fd, std::int64_t offset, std::int64_t nbytes,
               std::uintptr_t address, bool demand, std::int64_t checksum) {
                return pool.submit(fd, offset, nbytes, {address}, demand, {checksum});
            },
            nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("address"), nb::arg("demand"),
            nb::arg("checksum") = ReadPool::kUnchecked)
        .def("submit_run", &ReadPool::submit, nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"),
             nb::arg("addresses"), nb::arg("demand"),
             nb::arg("checksums") = std::vector<std::int64_t>{})
        .def("promote", &ReadPool::promote, nb::arg("ticket"))
        .def("cancel", &ReadPool::cancel, nb::arg("ticket"))
        .def("done", &ReadPool::done, nb::arg("ticket"))
        .def(
            "wait", [](ReadPool& pool, ReadPool::Ticket ticket) { wait_any(pool, {ticket}, true); },
            nb::arg("ticket"))
        .def("wait_any", &wait_any, nb::arg("tickets"), nb::arg("block") = true)
        .def("damaged", &ReadPool::damaged, nb::arg("ticket"))
        .def("result", &ReadPool::result, nb::arg("ticket"))
        .def_prop_ro("read_nbytes", &ReadPool::read_nbytes)
        .def_prop_ro("depth", &ReadPool::depth)
        .def_prop_ro("busy_s", &ReadPool::busy_s)
        .def("close", &ReadPool::close, nb::call_guard<nb::gil_scoped_release>());
}
