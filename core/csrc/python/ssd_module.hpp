#pragma once

#include <pybind11/pybind11.h>

namespace moonpool::python {

void bind_ssd(pybind11::module_& m);

}  // namespace moonpool::python
