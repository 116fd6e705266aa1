// moonpool._native.AcceptQueue: connections for a server in Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "wire/accept_queue.hpp"

namespace moonpool::python {

namespace {

std::unique_ptr<AcceptQueue> accept_queue(int listening, size_t places) {
    Fd own(::dup(listening));
    if (!own.valid()) raise(os_error("dup"), "listen");
    std::unique_ptr<AcceptQueue> queue = unwrap(AcceptQueue::create(std::move(own), places), "listen");
    unwrap(queue->start(), "listen");
    return queue;
}

}  // namespace

void bind_accept(py::module_& m) {
    py::class_<AcceptQueue>(m, "AcceptQueue",
                            "Accepts connections on a thread of its own, and keeps some for a server that is "
                            "slower than a flood of them: of each address one in turn.")
        .def(py::init(&accept_queue), py::arg("listening"), py::arg("places") = 64,
             "listening: the descriptor of a socket that listens; it stays the caller's. places: for "
             "connections that wait; beyond them the address that has most makes room.")
        .def("fileno", &AcceptQueue::wake_fd, "Readable while connections wait.")
        .def(
            "take",
            [](AcceptQueue& queue, size_t most) {
                std::vector<int> fds;
                for (Fd& fd : queue.take(most)) fds.push_back(fd.release());
                return fds;
            },
            py::arg("most"), "Descriptors of at most so many connections, the caller's from then on.")
        .def_property_readonly("dropped_total", &AcceptQueue::dropped_total, "Connections that made room.")
        .def("close", &AcceptQueue::stop, py::call_guard<py::gil_scoped_release>(),
             "Accepts no more, and closes those that wait. Idempotent.");
}

}  // namespace moonpool::python
