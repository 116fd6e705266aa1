// What a journal holds, as Python logs it.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/journal.hpp"
#include "python/module.hpp"

namespace moonpool::python {

// A peer's words may be part of it, and need not be UTF-8.
inline py::object text_of_any_bytes(const std::string& text) {
    return py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

inline py::list notes_of(Journal& journal) {
    py::list rows;
    for (const Note& note : journal.take()) {
        rows.append(py::make_tuple(static_cast<int>(note.level), note.kind, text_of_any_bytes(note.peer),
                                   text_of_any_bytes(note.text), note.left_out));
    }
    return rows;
}

}  // namespace moonpool::python
