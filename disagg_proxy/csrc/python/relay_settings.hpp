// Which field of a relay's settings each setting of the configuration fills.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "python/module.hpp"
#include "relay/settings.hpp"

namespace moonpool::python {

std::vector<std::string> relay_setting_names();

// values: one for each of relay_setting_names(). Raises InvalidArgument for a missing and for an unknown one.
void fill(const py::dict& values, relay::Settings& settings);

}  // namespace moonpool::python
