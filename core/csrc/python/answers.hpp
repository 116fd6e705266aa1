// What a client's call takes from its arguments and hands back, the same whether the caller waits for it
// (Client) or a worker thread runs it (Worker).
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "python/arguments.hpp"
#include "store/client/client.hpp"

namespace moonpool::python {

struct PyPin {
    Pinned held;
    std::vector<std::string> names;  // one for each descriptor; generation 0: was not found, is not pinned
    Incarnation asked_first{};       // the node that was, of a prefix

    void release() { held.pins.clear(); }  // views that were made under it go on holding it
    py::list objects() const;
    py::tuple hand_over() const;
};

// Makes the type of the views; once, at import.
void prepare_views();

void check_counts(size_t keys, size_t others, const char* what);
uint32_t soft_ms_of(double soft_pin_s);  // of a PutItem
std::vector<PutItem> put_items(const Names& names, const Buffers& parts, const Names& parents,
                               const Names& groups, double soft_pin_s);
// None, one node's name or address, or several.
std::vector<std::string> node_names(const py::object& nodes);
std::vector<GetItem> get_items(const Names& names, const Buffers& parts);
// (one outcome byte per key: 0 stored, 1 exists, 2 refused; why refused; copies of each, or empty: one; why
// there are fewer copies than asked for)
py::tuple put_answer(const PutReport& report);
py::tuple remove_answer(const RemoveReport& report);
py::list get_answer(const std::vector<int64_t>& sizes);
py::list views_answer(const std::vector<ObjectView>& views);
py::tuple pin_answer(Pinned pinned, const Names& names);
// (blocks, pin, the node that holds the first object of each block, why there may be more)
py::tuple prefix_answer(Prefix prefix, const Names& names, uint32_t width);

}  // namespace moonpool::python
