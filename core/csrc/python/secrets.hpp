// The cluster token as Python gives it: bytes, or a ClusterToken (core/config/cluster_token.py), which knows
// its file.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "wire/secrets.hpp"

namespace moonpool::python {

inline Secrets secrets_of(const py::bytes& token) {
    auto file = py::hasattr(token, "file") ? token.attr("file").cast<std::string>() : std::string();
    if (!file.empty()) return unwrap(Secrets::of_file(file), "token", file);
    std::string text(token);
    if (text.empty()) return {};  // what needs one says so
    return unwrap(Secrets::of_text(text, "the cluster token"), "token");
}

}  // namespace moonpool::python
