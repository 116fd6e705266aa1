// The KV cache of an engine, as Python describes it to the native threads that copy objects to and from it:
// moonpool._native.PartTable in memory of this process, DeviceKv in that of a card.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "device/driver.hpp"
#include "python/client_module.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "store/device/device_kv.hpp"

namespace moonpool::python {

namespace {

std::shared_ptr<DeviceKv> open_device_kv(int device, const PartTable& parts, uint32_t blocks,
                                         uint64_t ring_bytes, uint32_t copy_threads) {
    Result<std::shared_ptr<DeviceKv>> kv = [&] {
        py::gil_scoped_release nogil;
        return DeviceKv::open(device, parts, blocks, {.ring_bytes = ring_bytes, .load_lanes = copy_threads});
    }();
    return unwrap(std::move(kv), "open a card's KV cache");
}

Mark mark(DeviceKv& kv, uint64_t stream) {
    Result<Mark> mark = [&] {
        py::gil_scoped_release nogil;
        return kv.mark(stream);
    }();
    return unwrap(std::move(mark), "mark a stream");
}

bool wait_for_mark(const device::Event& mark, double timeout_s) {
    Result<bool> over = [&] {
        py::gil_scoped_release nogil;
        return mark.wait(milliseconds(timeout_s));
    }();
    return unwrap(std::move(over), "wait for a mark");
}

ArenaPins pin_arena(DeviceKv& kv, const PyClient& client, uint64_t bytes) {
    py::gil_scoped_release nogil;
    return kv.pin_arena(*client.client(), bytes);
}

void close_device_kv(DeviceKv& kv, double timeout_s) {
    Status closed = [&] {
        py::gil_scoped_release nogil;
        return kv.close(milliseconds(timeout_s));
    }();
    unwrap(std::move(closed), "close a card's KV cache");
}

}  // namespace

void bind_kv_memory(py::module_& m) {
    py::class_<PartTable, std::shared_ptr<PartTable>>(
        m, "PartTable", "Strided memory: columns of (address, stride, length) rows.")
        .def(py::init([](const std::vector<std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>>& columns) {
                 std::vector<std::vector<StridedRow>> rows(columns.size());
                 for (size_t c = 0; c < columns.size(); ++c) {
                     for (const auto& [address, stride, length] : columns[c])
                         rows[c].push_back({address, stride, length});
                 }
                 return std::make_shared<PartTable>(std::move(rows));
             }),
             py::arg("columns"))
        .def("object_bytes", &PartTable::object_bytes, py::arg("column"));

    py::class_<device::Event, std::shared_ptr<device::Event>>(
        m, "Mark", "A point in a stream of an engine: loads and saves wait for it on the card.")
        .def("wait", &wait_for_mark, py::arg("timeout_s"));
    py::class_<ArenaPins>(m, "ArenaPins", "How much of a node's arena is pinned, and why it is no more.")
        .def_readonly("pinned_bytes", &ArenaPins::pinned_bytes)
        .def_readonly("arena_bytes", &ArenaPins::arena_bytes)
        .def_readonly("why", &ArenaPins::why);
    py::class_<DeviceKv, std::shared_ptr<DeviceKv>>(
        m, "DeviceKv", "A paged KV cache in the memory of a card; the PartTable has device addresses.")
        .def(py::init(&open_device_kv), py::arg("device"), py::arg("parts"), py::arg("blocks"),
             py::arg("ring_bytes"), py::arg("copy_threads"))
        .def("mark", &mark, py::arg("stream"))
        .def("pin_arena", &pin_arena, py::arg("client"), py::arg("bytes"))
        .def("close", &close_device_kv, py::arg("timeout_s"))
        .def_property_readonly("lost", &DeviceKv::lost)
        .def_property_readonly("device_name", [](const DeviceKv& kv) { return kv.facts().name; });
    m.def("use_driver_for_tests", &device::Driver::use_library_for_tests, py::arg("path"),
          "Opens this library in place of libcuda.so.1 from now on; empty: that one again.");
}

}  // namespace moonpool::python
