// The parsers of the proxy's relay, as tests see them: tests/disagg_proxy/http compares them with httptools
// and with Python's json at random. The relay itself calls them in C++. json_token_ids is for queries of the
// proxy's, too.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "http/request_parser.hpp"
#include "json/splice.hpp"
#include "json/values.hpp"
#include "python/proxy_module.hpp"

namespace moonpool::python {

namespace {

// (method, target, forwarded fields, body, bytes taken) of the first request in data; None: it goes on behind
// data; (status, reason, sentence): refused. step: how many bytes arrive at once.
py::object parse_request(const py::bytes& data, size_t head_bytes_max, uint64_t body_bytes_max, size_t step) {
    std::string_view input(data);
    http::RequestParser parser({head_bytes_max, body_bytes_max});
    http::Step state = http::Step::kMore;
    for (size_t size = 0; state == http::Step::kMore && size < input.size();) {
        size = std::min(input.size(), size + std::max<size_t>(step, 1));
        state = parser.parse(input.substr(0, size));
    }
    auto refused = [](int status, const char* reason, const std::string& sentence) {
        return py::make_tuple(status, reason, sentence);
    };
    if (state == http::Step::kMore) return py::none();
    const http::Refusal& refusal = parser.refusal();
    if (state == http::Step::kRefused) return refused(refusal.status, refusal.reason, refusal.sentence);
    const http::RequestHead& head = parser.head();
    http::BodyReader reader(head.framing, head.content_length);
    std::string body;
    size_t at = head.bytes;
    while (at < input.size() && !reader.done()) {
        http::BodyReader::Piece piece = reader.take(input.substr(at, std::max<size_t>(step, 1)));
        if (piece.taken == 0) return refused(400, "malformed", reader.why());
        body += piece.content;
        at += piece.taken;
    }
    if (!reader.done()) return py::none();
    py::list fields;
    for (const http::Field& field : head.fields) {
        if (field.forward) fields.append(py::make_tuple(py::bytes(field.name), py::bytes(field.value)));
    }
    return py::make_tuple(py::bytes(head.method), py::bytes(head.target), fields, py::bytes(body), at);
}

// The members in their order as (key, value as text); None: the text is no JSON object.
py::object json_members(const py::bytes& text) {
    json::Object object;
    if (!object.scan(std::string_view(text))) return py::none();
    py::list members;
    for (const json::Member& member : object.members()) {
        std::string key;
        json::append_resolved(key, member.key);
        members.append(py::make_tuple(py::bytes(key), py::bytes(member.value)));
    }
    return members;
}

// What the last member of this name holds: int, bool, the bytes of a string, or the ids of a list of token
// ids; None for anything else.
py::object json_value(const py::bytes& text, const std::string& name) {
    json::Object object;
    const json::Member* member = object.scan(std::string_view(text)) ? object.find(name) : nullptr;
    if (member == nullptr) return py::none();
    if (auto number = json::integer_of(*member)) return py::int_(*number);
    if (auto truth = json::bool_of(*member)) return py::bool_(*truth);
    if (auto content = json::string_of(*member)) return py::bytes(*content);
    std::vector<uint32_t> ids;
    if (json::token_ids_of(*member, ids)) return py::cast(ids);
    return py::none();
}

// The ids of a list of token ids that the last member of this name is, u32 each; None for anything else.
py::object json_token_ids(const py::bytes& text, const std::string& name) {
    std::string_view view(text);
    std::vector<uint32_t> ids;
    bool found = false;
    {
        py::gil_scoped_release nogil;  // a prompt may be megabytes long
        json::Object object;
        const json::Member* member = object.scan(view) ? object.find(name) : nullptr;
        found = member != nullptr && json::token_ids_of(*member, ids);
    }
    return found ? py::object(to_bytes(ids)) : py::none();
}

// text with each (key, value) set, or dropped where the value is None; None: the text is no JSON object.
py::object json_edited(const py::bytes& text,
                       const std::vector<std::pair<std::string, std::optional<std::string>>>& changes) {
    json::Object object;
    if (!object.scan(std::string_view(text))) return py::none();
    std::vector<json::Edit> edits;
    for (const auto& [key, value] : changes) {
        edits.push_back({value ? json::Edit::kSet : json::Edit::kDrop, key,
                         value ? std::string_view(*value) : std::string_view()});
    }
    json::Splice splice;
    splice.make(object, edits);
    return py::bytes(splice.joined());
}

}  // namespace

void bind_parsers(py::module_& m) {
    m.def(
        "http_parse_request", &parse_request, py::arg("data"), py::arg("head_bytes_max") = 32 << 10,
        py::arg("body_bytes_max") = 64 << 20, py::arg("step") = 1 << 30,
        "For tests: the first request in data, fed `step` bytes at a time, as (method, target, fields, body, "
        "bytes taken); None when it is not whole; (status, reason, sentence) when it is refused.");
    m.def("json_members", &json_members, py::arg("text"),
          "For tests: the members of a JSON object as (key, text of the value), or None when it is none.");
    m.def(
        "json_value", &json_value, py::arg("text"), py::arg("name"),
        "For tests: the last member of this name as int, bool, bytes or token ids; None for anything else.");
    m.def("json_token_ids", &json_token_ids, py::arg("text"), py::arg("name"),
          "The last member of this name of an object, a list of token ids, as u32 each; None for anything "
          "else.");
    m.def("json_edited", &json_edited, py::arg("text"), py::arg("changes"),
          "For tests: the object's text with members set, or dropped where the value is None.");
}

}  // namespace moonpool::python
