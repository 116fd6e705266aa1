#include "python/answers.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

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

uint32_t soft_ms_of(double soft_pin_s) {
    constexpr double kSoftMsMax = 4294967295.0;  // 49 days
    return static_cast<uint32_t>(std::clamp(soft_pin_s * 1000, 0.0, kSoftMsMax));
}

std::vector<PutItem> put_items(const Names& names, const Buffers& parts, const Names& parents,
                               const Names& groups, double soft_pin_s) {
    const uint32_t soft_ms = soft_ms_of(soft_pin_s);
    std::vector<PutItem> items;
    items.reserve(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
        items.push_back({names.views()[i], parents.size() == 0 ? std::string_view() : parents.views()[i],
                         parts.parts(i), groups.size() == 0 ? std::string_view() : groups.views()[i],
                         soft_ms});
    }
    return items;
}

std::vector<std::string> node_names(const py::object& nodes) {
    if (nodes.is_none()) return {};
    if (py::isinstance<py::str>(nodes)) return {nodes.cast<std::string>()};
    return nodes.cast<std::vector<std::string>>();
}

std::vector<GetItem> get_items(const Names& names, const Buffers& parts) {
    std::vector<GetItem> items;
    items.reserve(names.size());
    for (size_t i = 0; i < names.size(); ++i) items.push_back({names.views()[i], parts.parts(i)});
    return items;
}

py::tuple remove_answer(const RemoveReport& report) {
    return py::make_tuple(to_bytes(report.flags), report.unsure);
}

py::tuple put_answer(const PutReport& report) {
    return py::make_tuple(to_bytes(report.outcomes), report.refusal, to_bytes(report.copies),
                          report.short_of_copies, report.unsure);
}

py::list get_answer(const std::vector<int64_t>& sizes) {
    py::list out(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
        out[i] = sizes[i] == kMiss ? py::object(py::none()) : py::object(py::int_(sizes[i]));
    }
    return out;
}

py::list views_answer(const std::vector<ObjectView>& views) {
    py::list out(views.size());
    for (size_t i = 0; i < views.size(); ++i) {
        const ObjectView& view = views[i];
        out[i] = view.owner == nullptr ? py::object(py::none())
                                       : make_view(view_type, view.owner, view.data, view.size);
    }
    return out;
}

py::tuple pin_answer(Pinned pinned, const Names& names) {
    std::string hits;
    for (size_t i = 0; i < pinned.under.size(); ++i) hits.push_back(pinned.has(i));
    if (hits.find('\1') == std::string::npos) return py::make_tuple(py::bytes(hits), py::none());
    auto pin = std::make_shared<PyPin>();
    pin->names.assign(names.views().begin(), names.views().end());
    pin->held = std::move(pinned);
    return py::make_tuple(py::bytes(hits), pin);
}

py::list PyPin::objects() const {
    py::list rows;
    for (size_t i = 0; i < names.size() && !held.pins.empty(); ++i) {
        bool there = held.has(i);
        if (auto striped = held.striped.find(i); there && striped != held.striped.end()) {
            rows.append(py::make_tuple(static_cast<int64_t>(striped->second.manifest.size), true));
            continue;
        }
        rows.append(py::make_tuple(
            there ? static_cast<int64_t>(held.descriptors[i].size) : kMiss,
            there && held.pin_of(i)->session()->path().in_place(held.descriptors[i]) == nullptr));
    }
    return rows;
}

py::tuple PyPin::hand_over() const {
    Handover handover = held.pins.empty() ? Handover{} : Client::hand_over(held, asked_first);
    return py::make_tuple(py::bytes(handover.holders), to_bytes(handover.descriptors));
}

py::tuple prefix_answer(Prefix prefix, const Names& names, uint32_t width) {
    py::list holders;
    for (size_t block = 0; block < prefix.blocks; ++block) {
        size_t i = block * width;
        if (i < prefix.under.size() && prefix.has(i)) {
            const std::shared_ptr<Session>& session = prefix.pin_of(i)->session();
            holders.append(py::make_tuple(session->node_name(), session->host_id()));
        } else if (block < prefix.found_at.size()) {
            const auto& [name, host] = prefix.found_at[block];
            holders.append(py::make_tuple(name, host));
        } else {
            holders.append(py::make_tuple("", ""));
        }
    }
    uint64_t blocks = prefix.blocks;
    std::string why = prefix.why;
    if (prefix.pins.empty()) return py::make_tuple(blocks, py::none(), holders, why);
    auto pin = std::make_shared<PyPin>();
    for (size_t i = 0; i < prefix.descriptors.size(); ++i) pin->names.emplace_back(names.views()[i]);
    pin->asked_first = prefix.incarnation;
    pin->held = std::move(prefix);
    return py::make_tuple(blocks, pin, holders, why);
}

}  // namespace moonpool::python
