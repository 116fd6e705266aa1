// Ranges of addresses that callers have vouched for, and whether lists of (address, length) lie in them:
// asked for each call of thousands of numbers, where a step of Python a number would cost more than the call.
// Memory of a card may be freed, and its address is then one that the CPU must not touch: the driver is asked
// about such a range in each call that meets it. The GIL is the lock.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <iterator>
#include <map>

#include "device/address.hpp"
#include "python/module.hpp"

namespace moonpool::python {

namespace {

class Ranges {
   public:
    // False for an overlap with one that is there, for no bytes and for an end beyond 2**64.
    bool add(uint64_t address, uint64_t length) {
        uint64_t end = address + length;
        if (end <= address) return false;
        auto after = ranges_.lower_bound(address);
        if (after != ranges_.end() && after->first < end) return false;
        if (after != ranges_.begin() && std::prev(after)->second.end > address) return false;
        ranges_.emplace(address, Range{end, lies_on_card(address, length)});
        return true;
    }

    bool remove(uint64_t address) { return ranges_.erase(address) == 1; }
    void clear() { ranges_.clear(); }

    // The pairs of the two lists when each lies in one range. None for what is no list of numbers, for lists
    // of different lengths and for empty ones. Another thread may change the lists, so what was looked at is
    // given back, and callers use nothing else.
    py::object hold(const py::object& addresses, const py::object& lengths) {
        begin_call();
        if (!same_lists(addresses.ptr(), lengths.ptr())) return py::none();
        py::list these = copy(addresses.ptr());
        py::list those = copy(lengths.ptr());
        if (these.size() != those.size() || !hold_pairs(these.ptr(), those.ptr())) return py::none();
        py::list pairs(these.size());
        for (size_t i = 0; i < these.size(); ++i) pairs[i] = py::make_tuple(these[i], those[i]);
        return pairs;
    }

    // The same for each pair of lists in the two lists; a pair of lists, copies, for each.
    py::object hold_lists(const py::object& addresses, const py::object& lengths) {
        begin_call();
        if (!same_lists(addresses.ptr(), lengths.ptr())) return py::none();
        py::list all = copy(addresses.ptr());
        py::list all_lengths = copy(lengths.ptr());
        if (all.size() != all_lengths.size()) return py::none();
        py::list pairs(all.size());
        for (size_t i = 0; i < all.size(); ++i) {
            py::object row = all[i];
            py::object row_lengths = all_lengths[i];
            if (!same_lists(row.ptr(), row_lengths.ptr())) return py::none();
            py::list these = copy(row.ptr());
            py::list those = copy(row_lengths.ptr());
            if (these.size() != those.size() || !hold_pairs(these.ptr(), those.ptr())) return py::none();
            pairs[i] = py::make_tuple(these, those);
        }
        return pairs;
    }

   private:
    static bool same_lists(PyObject* these, PyObject* those) {
        return PyList_CheckExact(these) && PyList_CheckExact(those) && PyList_GET_SIZE(these) > 0 &&
               PyList_GET_SIZE(these) == PyList_GET_SIZE(those);
    }

    static py::list copy(PyObject* list) {
        auto made = py::reinterpret_steal<py::list>(PyList_GetSlice(list, 0, PyList_GET_SIZE(list)));
        if (!made) throw py::error_already_set();
        return made;
    }

    bool hold_pairs(PyObject* addresses, PyObject* lengths) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(addresses); ++i) {
            uint64_t address = 0;
            uint64_t length = 0;
            if (!number(PyList_GET_ITEM(addresses, i), &address) ||
                !number(PyList_GET_ITEM(lengths, i), &length) || !hold_one(address, length)) {
                return false;
            }
        }
        return true;
    }

    struct Range {
        uint64_t end;
        bool on_card;
        uint64_t asked_in_call = 0;  // whether it still is
    };

    static bool lies_on_card(uint64_t address, uint64_t length) {
        Result<device::Address> found = device::classify(address, length);
        return found && found->kind == device::AddressKind::kDevice;
    }

    void begin_call() {
        ++call_;
        last_start_ = last_end_ = 0;
    }

    // The range that was met last comes first: neighbours in a list mostly lie in one.
    bool hold_one(uint64_t address, uint64_t length) {
        if (address < last_start_ || address >= last_end_) {
            auto after = ranges_.upper_bound(address);
            if (after == ranges_.begin()) return false;
            auto& [start, range] = *std::prev(after);
            if (address >= range.end) return false;
            if (range.on_card && range.asked_in_call != call_) {
                if (!lies_on_card(start, range.end - start)) return false;
                range.asked_in_call = call_;
            }
            last_start_ = start;
            last_end_ = range.end;
        }
        return length > 0 && length <= last_end_ - address;
    }

    static bool number(PyObject* item, uint64_t* value) {
        if (!PyLong_CheckExact(item)) return false;
        *value = PyLong_AsUnsignedLongLong(item);
        if (*value == static_cast<uint64_t>(-1) && PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            return false;
        }
        return true;
    }

    std::map<uint64_t, Range> ranges_;  // by their start; they never overlap
    uint64_t call_ = 0;
    uint64_t last_start_ = 0, last_end_ = 0;  // of this call
};

}  // namespace

void bind_ranges(py::module_& m) {
    py::class_<Ranges>(m, "Ranges", "Ranges of addresses, which never overlap.")
        .def(py::init<>())
        .def("add", &Ranges::add, py::arg("address"), py::arg("length"),
             "False, and nothing is added, for an overlap and for no bytes.")
        .def("remove", &Ranges::remove, py::arg("address"), "Whether one starts there; it is gone now.")
        .def("clear", &Ranges::clear)
        .def(
            "hold", &Ranges::hold, py::arg("addresses"), py::arg("lengths"),
            "The (address, length) of the two lists when each lies in one range. None for anything else than "
            "lists of int of the same length, and for empty ones.")
        .def("hold_lists", &Ranges::hold_lists, py::arg("addresses"), py::arg("lengths"),
             "The same for lists of such lists: a pair of copies for each.");
}

}  // namespace moonpool::python
