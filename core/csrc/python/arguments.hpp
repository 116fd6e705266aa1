// Arguments from Python, held for as long as C++ uses them without the GIL: keys as string views into the
// caller's bytes or str objects, buffers as Py_buffers (which pin a bytearray against being resized).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memory/address.hpp"
#include "python/raise.hpp"
#include "store/client/client.hpp"

namespace moonpool::python {

class Names {
   public:
    Names() = default;
    explicit Names(const py::object& keys)
        : held_(py::reinterpret_steal<py::object>(PySequence_Tuple(keys.ptr()))) {
        if (!held_) throw py::error_already_set();
        Py_ssize_t n = PyTuple_GET_SIZE(held_.ptr());
        views_.reserve(static_cast<size_t>(n));
        for (Py_ssize_t i = 0; i < n; ++i) views_.push_back(view(PyTuple_GET_ITEM(held_.ptr(), i)));
    }

    std::span<const std::string_view> views() const { return views_; }
    size_t size() const { return views_.size(); }

   private:
    static std::string_view view(PyObject* key) {
        if (PyBytes_CheckExact(key))
            return {PyBytes_AS_STRING(key), static_cast<size_t>(PyBytes_GET_SIZE(key))};
        if (PyUnicode_Check(key)) {
            Py_ssize_t size;
            const char* text = PyUnicode_AsUTF8AndSize(key, &size);
            if (text == nullptr) throw py::error_already_set();
            return {text, static_cast<size_t>(size)};
        }
        if (key == Py_None) return {};
        raise(Error{Code::kInvalidArgument,
                    std::string("a key must be bytes or str, not ") + Py_TYPE(key)->tp_name},
              "key");
    }

    py::object held_;
    std::vector<std::string_view> views_;
};

// The parts of each object of a call. An element is a buffer, an (address, length) pair, a list of those, or
// a pair of lists ([address, ...], [length, ...]), which costs the least.
class Buffers {
   public:
    Buffers(const py::object& buffers, bool writable) : writable_(writable) {
        auto items = py::reinterpret_steal<py::object>(
            PySequence_Fast(buffers.ptr(), "buffers must be a list, one element for each key"));
        if (!items) throw py::error_already_set();
        Py_ssize_t n = PySequence_Fast_GET_SIZE(items.ptr());
        for (Py_ssize_t i = 0; i < n; ++i) {
            size_t first = parts_.size();
            PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
            if (PyList_Check(item)) {
                for (Py_ssize_t k = 0; k < PyList_GET_SIZE(item); ++k) add(PyList_GET_ITEM(item, k));
            } else if (is_pair_of_lists(item)) {
                add_columns(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1));
            } else {
                add(item);
            }
            ranges_.emplace_back(first, parts_.size() - first);
        }
    }
    Buffers(const Buffers&) = delete;

    size_t size() const { return ranges_.size(); }
    std::span<const MemoryRef> parts(size_t i) const {
        return {parts_.data() + ranges_[i].first, ranges_[i].second};
    }

   private:
    // Owns what was taken, also when the constructor of Buffers throws half way.
    struct Views
        : std::deque<Py_buffer> {  // their addresses must not change: PyBuffer_FillInfo may point into them
        ~Views() {
            for (Py_buffer& view : *this) PyBuffer_Release(&view);
        }
    };

    static bool is_pair_of_lists(PyObject* item) {
        return PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2 &&
               PyList_Check(PyTuple_GET_ITEM(item, 0)) && PyList_Check(PyTuple_GET_ITEM(item, 1));
    }

    void add_columns(PyObject* addresses, PyObject* lengths) {
        Py_ssize_t n = PyList_GET_SIZE(addresses);
        if (PyList_GET_SIZE(lengths) != n) {
            raise(Error{Code::kInvalidArgument, "as many lengths as addresses make the parts of an object"},
                  "buffer");
        }
        for (Py_ssize_t k = 0; k < n; ++k) {
            add_range(PyList_GET_ITEM(addresses, k), PyList_GET_ITEM(lengths, k));
        }
    }

    void add_range(PyObject* address, PyObject* length) {
        auto start = PyLong_AsUnsignedLongLong(address);
        auto size = PyLong_AsUnsignedLongLong(length);
        if (PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            raise(Error{Code::kInvalidArgument, "an address and a length must be numbers from 0 to 2**64"},
                  "buffer");
        }
        Result<MemoryRef> part = kinds_.describe(start, size);
        if (!part) raise(part.error(), "buffer");
        parts_.push_back(*part);
    }

    void add(PyObject* item) {
        if (PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2 && PyLong_Check(PyTuple_GET_ITEM(item, 0))) {
            add_range(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1));
            return;
        }
        views_.emplace_back();
        if (PyObject_GetBuffer(item, &views_.back(), writable_ ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
            views_.pop_back();
            PyErr_Clear();
            raise(Error{Code::kInvalidArgument, std::string("a ") + Py_TYPE(item)->tp_name +
                                                    (writable_ ? " is no writable" : " is no") +
                                                    " contiguous buffer"},
                  "buffer");
        }
        parts_.push_back(MemoryRef::host(views_.back().buf, static_cast<uint64_t>(views_.back().len)));
    }

    bool writable_;
    Views views_;
    MemoryKinds kinds_;
    std::vector<MemoryRef> parts_;
    std::vector<std::pair<size_t, size_t>> ranges_;
};

// A contiguous array of T given as any buffer of that many bytes.
template <class T>
class ArrayOf {
   public:
    ArrayOf(const py::object& object, const char* what) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
        if (static_cast<size_t>(view_.len) % sizeof(T) != 0) {
            PyBuffer_Release(&view_);
            raise(Error{Code::kInvalidArgument, std::string(what) + " must hold whole items of " +
                                                    std::to_string(sizeof(T)) + " bytes"},
                  "buffer");
        }
    }
    ~ArrayOf() { PyBuffer_Release(&view_); }
    ArrayOf(const ArrayOf&) = delete;

    std::span<const T> span() const {
        return {static_cast<const T*>(view_.buf), static_cast<size_t>(view_.len) / sizeof(T)};
    }

   private:
    Py_buffer view_;
};

}  // namespace moonpool::python
