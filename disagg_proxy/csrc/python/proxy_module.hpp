// The proxy's parts of moonpool._native: each *_module.cpp binds the classes of one idea.
#pragma once

#include <string>

#include "python/module.hpp"

namespace moonpool::python {

void bind_proxy(py::module_& m);  // all that follow
void bind_conductor(py::module_& m);
void bind_cost_models(py::module_& m);
void bind_workers(py::module_& m);
void bind_parsers(py::module_& m);
void bind_relay(py::module_& m);

// AssertionError with what a check_integrity() found; nothing where that is empty.
inline void raise_if(const std::string& wrong) {
    if (wrong.empty()) return;
    PyErr_SetString(PyExc_AssertionError, wrong.c_str());
    throw py::error_already_set();
}

}  // namespace moonpool::python
