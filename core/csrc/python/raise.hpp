// Errors become exceptions here and nowhere else: each Code is one class of moonpool.core.errors.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "base/result.hpp"

namespace moonpool::python {

namespace py = pybind11;

inline const char* class_of(Code code) {
    switch (code) {
        case Code::kInvalidArgument:
            return "InvalidArgument";
        case Code::kUnavailable:
            return "Unavailable";
        case Code::kAuth:
            return "AuthError";
        case Code::kTimeout:
            return "Timeout";
        case Code::kClosed:
            return "Closed";
        case Code::kForked:
            return "Forked";
        case Code::kProtocol:
            return "ProtocolError";
        case Code::kTooLarge:
            return "TooLarge";
        case Code::kCorrupt:
            return "CorruptObject";
        case Code::kOs:
            return "Error";
    }
    return "Error";
}

// With the GIL held.
[[noreturn]] inline void raise(const Error& error, const char* operation, const std::string& peer = {}) {
    py::object type = py::module_::import("moonpool.core.errors").attr(class_of(error.code));
    py::dict fields;
    fields["operation"] = operation;
    if (!peer.empty()) fields["peer"] = peer;
    // The text may be a peer's: whatever it is, it becomes a sentence.
    auto text = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(error.text.data(), static_cast<Py_ssize_t>(error.text.size()), "replace"));
    if (!text) throw py::error_already_set();
    py::object exception = type(text, **fields);
    PyErr_SetObject(type.ptr(), exception.ptr());
    throw py::error_already_set();
}

template <class T>
T unwrap(Result<T>&& result, const char* operation, const std::string& peer = {}) {
    if (!result) raise(result.error(), operation, peer);
    return std::move(*result);
}

}  // namespace moonpool::python
