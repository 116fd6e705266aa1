#include "python/answers.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <numeric>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "python/view.hpp"

namespace moonpool::python {

namespace {

PyTypeObject* view_type = nullptr;

}  // namespace

void prepare_views() { view_type = make_view_type(); }

void check_counts(size_t keys, size_t others, const char* what) {
    if (keys == others) return;
    raise(Error{Code::kInvalidArgument,
                std::to_string(keys) + " keys came with " + std::to_string(others) + " " + what},
          "arguments");
}

std::vector<PutItem> put_items(const Names& names, const Buffers& parts, const Names& parents) {
    std::vector<PutItem> items;
    items.reserve(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
        items.push_back({names.views()[i], parents.size() == 0 ? std::string_view() : parents.views()[i],
                         parts.parts(i)});
    }
    return items;
}

std::vector<GetItem> get_items(const Names& names, const Buffers& parts) {
    std::vector<GetItem> items;
    items.reserve(names.size());
    for (size_t i = 0; i < names.size(); ++i) items.push_back({names.views()[i], parts.parts(i)});
    return items;
}

py::tuple put_answer(const PutReport& report) {
    return py::make_tuple(to_bytes(report.outcomes), report.refusal);
}

py::list get_answer(const std::vector<int64_t>& sizes) {
    py::list out(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
        out[i] = sizes[i] == kMiss ? py::object(py::none()) : py::object(py::int_(sizes[i]));
    }
    return out;
}

Result<Pinned> pin_and_verify(Client& client, const Names& names, bool verify) {
    Result<Pinned> pinned = client.pin(names.views());
    if (!pinned || !verify) return pinned;
    Status status = Client::verify(*pinned, all_places(names.size()), names.views());
    return status ? std::move(pinned) : Result<Pinned>(status.error());
}

std::vector<size_t> all_places(size_t n) {
    std::vector<size_t> places(n);
    std::iota(places.begin(), places.end(), 0);
    return places;
}

py::list views_answer(const Pinned& pinned, const std::vector<size_t>& places) {
    py::list out(places.size());
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] == kNotPinned || pinned.descriptors[places[i]].generation == 0) {
            out[i] = py::none();
            continue;
        }
        const Descriptor& d = pinned.descriptors[places[i]];
        const std::shared_ptr<Pin>& pin = pinned.pin_of(places[i]);
        pin->session()->note_read(d.slot, d.size);
        out[i] = make_view(view_type, pin, pin->session()->arena() + d.offset, d.size);
    }
    return out;
}

py::tuple pin_answer(Pinned pinned, const Names& names) {
    std::string hits;
    for (const Descriptor& d : pinned.descriptors) hits.push_back(d.generation != 0);
    if (hits.find('\1') == std::string::npos) return py::make_tuple(py::bytes(hits), py::none());
    auto pin = std::make_shared<PyPin>();
    pin->names.assign(names.views().begin(), names.views().end());
    pin->held = std::move(pinned);
    return py::make_tuple(py::bytes(hits), pin);
}

py::tuple prefix_answer(Prefix prefix, const Names& names) {
    if (prefix.pins.empty()) return py::make_tuple(prefix.blocks, py::none());
    auto pin = std::make_shared<PyPin>();
    for (size_t i = 0; i < prefix.descriptors.size(); ++i) pin->names.emplace_back(names.views()[i]);
    pin->held = std::move(prefix);
    return py::make_tuple(prefix.blocks, pin);
}

}  // namespace moonpool::python
