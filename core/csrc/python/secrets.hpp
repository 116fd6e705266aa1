// The cluster token as Python gives it: bytes, or a ClusterToken (core/config/cluster_token.py), which knows
// its file.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "wire/secrets.hpp"
#include "wire/tenant_keys.hpp"

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

// A row of the file of tenants: (tenant, role, keys); core/config/tenants_file.py has checked it.
using TenantKeyRow = std::tuple<std::string, std::string, std::vector<std::string>>;

inline std::vector<TenantRow> tenant_rows(const std::vector<TenantKeyRow>& rows) {
    std::vector<TenantRow> made;
    for (const auto& [tenant, role, keys] : rows) {
        bool known = false;
        for (TenantRole each : {TenantRole::kReader, TenantRole::kWriter, TenantRole::kAdmin}) {
            if (role != name_of(each)) continue;
            made.push_back({tenant, each, keys});
            known = true;
        }
        if (!known) raise(Error{Code::kInvalidArgument, "there is no role \"" + role + "\""}, "tenants");
    }
    return made;
}

}  // namespace moonpool::python
