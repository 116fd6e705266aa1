// The cluster token as Python gives it: bytes, or a ClusterToken (core/config/cluster_token.py), which knows
// its file.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "wire/secrets.hpp"

namespace moonpool::python {

inline Secrets secrets_of(const py::bytes& token) {
    if (py::hasattr(token, "file")) {
        auto file = token.attr("file").cast<std::string>();
        auto known = token.attr("secrets")().cast<std::vector<std::string>>();
        if (!file.empty()) return Secrets::following(file, std::move(known));
    }
    std::string text(token);
    if (text.empty()) return {};  // what needs one says so
    return unwrap(Secrets::of_text(text, "the cluster token"), "token");
}

}  // namespace moonpool::python
