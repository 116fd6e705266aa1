// Memory of cards that Python names by address, where no object is put or got: what it is, and copies between
// it and memory of the host.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "device/address.hpp"
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
    py::class_<CardCopies>(m, "CardCopies",
                           "Copies between memory of cards and of the host, with pinned memory of their own.")
        .def(py::init<>())
        .def("copy", &CardCopies::copy, py::arg("targets"), py::arg("sources"), py::arg("timeout_s"),
             "Each source, a buffer or (address, length), to the target at the same place, which is as long. "
             "All targets or all sources are of the host. The bytes are there on return.");
}

}  // namespace moonpool::python
