// The KV cache of an engine, as Python describes it to the native threads that copy objects to and from it:
// moonpool._native.PartTable in memory of this process, DeviceKv in that of a card. And PinnedArena, the
// node's memory for engines that copy to a card by themselves.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "device/device.hpp"
#include "device/driver.hpp"
#include "python/client_module.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "store/device/device_kv.hpp"
#include "store/device/pinned_arena.hpp"

namespace moonpool::python {

namespace {

// blocks: of each column, or one number for all.
std::shared_ptr<DeviceKv> open_device_kv(int device, const PartTable& parts,
                                         const std::variant<uint32_t, std::vector<uint32_t>>& blocks,
                                         uint64_t ring_bytes, uint32_t copy_threads) {
    Result<std::shared_ptr<DeviceKv>> kv = [&] {
        py::gil_scoped_release nogil;
        return std::visit(
            [&](const auto& each) {
                return DeviceKv::open(device, parts, each,
                                      {.ring_bytes = ring_bytes, .load_lanes = copy_threads});
            },
            blocks);
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

// Parts of the arena of a client's own node, and that client's objects in them.
class PyPinnedArena {
   public:
    PyPinnedArena(int device, const PyClient& client, uint64_t part_bytes)
        : client_(client.client()), peer_(client.peer()) {
        Result<std::shared_ptr<PinnedArena>> opened = [&]() -> Result<std::shared_ptr<PinnedArena>> {
            py::gil_scoped_release nogil;
            auto card = device::Device::open(device);
            if (!card) return card.error();
            return PinnedArena::open(*card, *client_, {.part_bytes = part_bytes});
        }();
        arena_ = unwrap(std::move(opened), "pin the memory of a node");
    }

    ~PyPinnedArena() {
        py::gil_scoped_release nogil;  // the driver takes a while to unpin
        arena_.reset();
    }
    PyPinnedArena(const PyPinnedArena&) = delete;

    ArenaPins grow(uint64_t bytes) {
        py::gil_scoped_release nogil;
        return arena_->grow(bytes);
    }

    bool alive() const {
        py::gil_scoped_release nogil;
        return arena_->alive(*client_);
    }

    py::list views(const py::object& keys) {
        Names names(keys);
        Result<std::vector<ObjectView>> views = [&] {
            py::gil_scoped_release nogil;
            return arena_->views(*client_, names.views());
        }();
        return views_answer(unwrap(std::move(views), "get", peer_));
    }

   private:
    std::shared_ptr<Client> client_;
    std::string peer_;
    std::shared_ptr<PinnedArena> arena_;
};

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
             py::arg("ring_bytes"), py::arg("copy_threads"),
             "blocks: how many there are, or how many each column has.")
        .def("mark", &mark, py::arg("stream"))
        .def("pin_arena", &pin_arena, py::arg("client"), py::arg("bytes"))
        .def("close", &close_device_kv, py::arg("timeout_s"))
        .def_property_readonly("lost", &DeviceKv::lost)
        .def_property_readonly("device_name", [](const DeviceKv& kv) { return kv.facts().name; });
    py::class_<PyPinnedArena>(m, "PinnedArena",
                              "The arena of the own node's present life, mapped read-only and pinned for a "
                              "card from its front on.")
        .def(py::init<int, const PyClient&, uint64_t>(), py::arg("device"), py::arg("client"),
             py::arg("part_bytes"),
             "part_bytes: as much as one call of the driver pins; a multiple of the page size.")
        .def("grow", &PyPinnedArena::grow, py::arg("bytes"), "Pins more, until so many are pinned.")
        .def("views", &PyPinnedArena::views, py::arg("keys"),
             "For each key the object's bytes where they lie, for this process and the card to read; None "
             "for what does not lie in one pinned part.")
        .def_property_readonly("alive", &PyPinnedArena::alive,
                               "Whether the node lives on, in that life. Where the connection has ended, it "
                               "is dialled.");
    m.def("use_driver_for_tests", &device::Driver::use_library_for_tests, py::arg("path"),
          "Opens this library in place of libcuda.so.1 from now on; empty: that one again.");
}

}  // namespace moonpool::python
