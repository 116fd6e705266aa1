// moonpool._native.Engine; called once from the module's initialisation.
#pragma once

#include <pybind11/pybind11.h>

namespace moonpool::python {

void bind_engine(pybind11::module_& m);

}  // namespace moonpool::python
