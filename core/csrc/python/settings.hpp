// Settings as Python has them, a dict of values by name, into the options of a C++ object. One function for
// each kind of options is the table: it shows a visitor the name and the field of every setting,
//
//     template <class Visitor> void visit(Options& options, Visitor& visitor) {
//         visitor.field("key_bytes_max", options.limits.key_bytes);     // of the same unit
//         visitor.seconds("stop_s", options.stop_ms);                   // of milliseconds
//     }
//
// The values, their defaults and bounds are the caller's: SettingValues takes every setting of the table, and
// no other.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "python/module.hpp"
#include "python/raise.hpp"

namespace moonpool::python {

struct SettingNames {
    std::vector<std::string> names;

    template <class T>
    void field(const char* name, T&) {
        names.emplace_back(name);
    }
    template <class T>
    void seconds(const char* name, T&) {
        names.emplace_back(name);
    }
};

// Raises InvalidArgument where a setting is missing or does not fit its field; check(): or is none of the
// table.
class SettingValues {
   public:
    SettingValues(const py::dict& values, const char* operation)
        : left_(py::reinterpret_steal<py::dict>(PyDict_Copy(values.ptr()))), operation_(operation) {}

    template <class T>
    void field(const char* name, T& into) {
        into = take<T>(name);
    }
    template <class T>
    void seconds(const char* name, T& into_ms) {
        into_ms = static_cast<T>(milliseconds(take<double>(name)));
    }
    void check() const {
        for (const auto& [name, value] : left_) bad("there is no setting " + std::string(py::str(name)));
    }

   private:
    template <class T>
    T take(const char* name) {
        if (!left_.contains(name)) bad(std::string("the setting ") + name + " is missing");
        py::object value = left_.attr("pop")(name);
        try {
            return py::cast<T>(value);
        } catch (const py::cast_error&) {
            bad(std::string("the setting ") + name + " cannot be " + std::string(py::repr(value)));
        }
    }
    [[noreturn]] void bad(std::string text) const {
        raise(Error{Code::kInvalidArgument, std::move(text)}, operation_);
    }

    py::dict left_;
    const char* operation_;
};

}  // namespace moonpool::python
