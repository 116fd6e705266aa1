// The proxy's parts of moonpool._native: each *_module.cpp binds the classes of one idea.
#pragma once

#include "python/module.hpp"

namespace moonpool::python {

void bind_proxy(py::module_& m);  // all that follow
void bind_conductor(py::module_& m);
void bind_cost_models(py::module_& m);
void bind_workers(py::module_& m);
void bind_parsers(py::module_& m);
void bind_relay(py::module_& m);

}  // namespace moonpool::python
