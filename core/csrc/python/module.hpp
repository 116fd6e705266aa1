// The core's parts of moonpool._native: each *_module.cpp binds the classes of one idea, core_module.cpp
// calls them in order. What several of them need stands here.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace moonpool::python {

namespace py = pybind11;

void bind_core(py::module_& m);  // all that follow
void bind_server(py::module_& m);
void bind_client(py::module_& m);
void bind_kv_memory(py::module_& m);
void bind_worker(py::module_& m);
void bind_batch(py::module_& m);
void bind_directory(py::module_& m);
void bind_ssd(py::module_& m);
void bind_tls(py::module_& m);
void bind_accept(py::module_& m);
void bind_ranges(py::module_& m);
void bind_card_memory(py::module_& m);
void bind_topology(py::module_& m);

inline py::bytes to_bytes(const void* data, size_t size) {
    return py::bytes(static_cast<const char*>(data), size);
}

template <class T>
py::bytes to_bytes(const std::vector<T>& items) {
    return to_bytes(items.data(), items.size() * sizeof(T));
}

// At least one, since 0 means for ever to the kernel, and at most a day.
inline int milliseconds(double seconds) {
    return static_cast<int>(std::clamp(seconds, 0.001, 86400.0) * 1000);
}

}  // namespace moonpool::python
