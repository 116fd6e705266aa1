// Memory of cards that Python names by address, where no object is put or got: what it is, and copies between
// it and memory of the host.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/address.hpp"
#include "device/device_memory.hpp"
#include "python/arguments.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "store/client/card_ranges.hpp"

namespace moonpool::python {

namespace {

// None: no card's memory.
std::optional<int> card_of(uint64_t address, uint64_t length) {
    const device::Address found = unwrap(device::classify(address, length), "memory");
    if (found.kind != device::AddressKind::kDevice) return std::nullopt;
    return found.device;
}

device::DeviceMemory allocate(int card, uint64_t bytes) {
    auto made = [&]() -> Result<device::DeviceMemory> {
        py::gil_scoped_release nogil;
        Result<std::shared_ptr<device::Device>> opened = device::Device::open(card);
        if (!opened) return opened.error();
        return device::DeviceMemory::allocate(std::move(*opened), bytes);
    };
    return unwrap(made(), "allocate");
}

// How libraries of Python tell each other of memory of a card: here as bytes.
py::dict array_interface(const device::DeviceMemory& memory) {
    py::dict array;
    array["shape"] = py::make_tuple(memory.bytes());
    array["typestr"] = "|u1";
    array["data"] = py::make_tuple(memory.address(), false);
    array["version"] = 3;
    return array;
}

std::vector<MemoryRef> ranges_of(const Buffers& buffers) {
    std::vector<MemoryRef> ranges;
    for (size_t i = 0; i < buffers.size(); ++i) {
        ranges.insert(ranges.end(), buffers.parts(i).begin(), buffers.parts(i).end());
    }
    return ranges;
}

class CardCopies {
   public:
    void copy(const py::object& targets, const py::object& sources, double timeout_s) {
        Buffers to(targets, true), from(sources, false);
        const std::vector<MemoryRef> into = ranges_of(to), out_of = ranges_of(from);
        if (into.size() != out_of.size()) {
            raise(Error{Code::kInvalidArgument, "as many targets as sources make a copy"}, "copy");
        }
        py::gil_scoped_release nogil;
        Status copied = copy_ranges(cards_, into, out_of, milliseconds(timeout_s));
        py::gil_scoped_acquire gil;
        unwrap(std::move(copied), "copy");
    }

   private:
    device::CardCopiers cards_;
};

}  // namespace

void bind_card_memory(py::module_& m) {
    m.def("card_of", &card_of, py::arg("address"), py::arg("length"),
          "The ordinal of the CUDA card whose memory the range is; None: it is none. Opens no driver.");
    py::class_<device::DeviceMemory>(m, "CardMemory",
                                     "Memory of a CUDA card of this process, freed with the object.")
        .def(py::init(&allocate), py::arg("card"), py::arg("nbytes"))
        .def_property_readonly("__cuda_array_interface__", &array_interface);
    py::class_<CardCopies>(m, "CardCopies",
                           "Copies between memory of cards and of the host, with pinned memory of their own.")
        .def(py::init<>())
        .def("copy", &CardCopies::copy, py::arg("targets"), py::arg("sources"), py::arg("timeout_s"),
             "Each source, a buffer or (address, length), to the target at the same place, which is as long. "
             "All targets or all sources are of the host. The bytes are there on return.");
}

}  // namespace moonpool::python
