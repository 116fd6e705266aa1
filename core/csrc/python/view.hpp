// View: read-only bytes of an object as a Python buffer, without a copy: in the arena under a pin, or where
// they arrived from another host. It holds its owner, which is let go when the last view (memoryviews and
// slices of it included) is gone. A plain C type: pybind11's buffer protocol allocates for every export, and
// a batch makes hundreds.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <new>

#include "store/client/client.hpp"

namespace moonpool::python {

struct ViewObject {
    PyObject_HEAD std::shared_ptr<const void> owner;
    const std::byte* data;
    Py_ssize_t size;
};

inline int view_getbuffer(PyObject* self, Py_buffer* buffer, int flags) {
    auto* view = reinterpret_cast<ViewObject*>(self);
    return PyBuffer_FillInfo(buffer, self, const_cast<std::byte*>(view->data), view->size, 1, flags);
}

inline void view_dealloc(PyObject* self) {
    reinterpret_cast<ViewObject*>(self)->owner.~shared_ptr();
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

inline PyTypeObject* make_view_type() {
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(view_dealloc)},
        {Py_bf_getbuffer, reinterpret_cast<void*>(view_getbuffer)},
        {Py_tp_doc, const_cast<char*>("Read-only bytes of the pool; holds their pin.")},
        {0, nullptr},
    };
    static PyType_Spec spec = {"moonpool._native.View", sizeof(ViewObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// A memoryview of [data, data + size), pinned.
inline py::object make_view(PyTypeObject* type, std::shared_ptr<const void> holder, const std::byte* data,
                            uint64_t size) {
    auto* view = reinterpret_cast<ViewObject*>(type->tp_alloc(type, 0));
    if (view == nullptr) throw py::error_already_set();
    new (&view->owner) std::shared_ptr<const void>(std::move(holder));
    view->data = data;
    view->size = static_cast<Py_ssize_t>(size);
    auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(view));
    auto memory = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(owner.ptr()));
    if (!memory) throw py::error_already_set();
    return memory;
}

}  // namespace moonpool::python
