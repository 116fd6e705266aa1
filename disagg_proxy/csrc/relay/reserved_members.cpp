#include "relay/reserved_members.hpp"

#include <algorithm>
#include <deque>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "json/splice.hpp"
#include "json/values.hpp"

namespace moonpool::relay {

namespace {

// Of the body itself.
constexpr std::string_view kMembers[] = {
    // vLLM: what a connector is told, for KV and for encoders; which rank; the request's name inside.
    "kv_transfer_params",
    "ec_transfer_params",
    "data_parallel_rank",
    "request_id",
    // SGLang: where prefill and decode meet; which ranks; the request's name inside.
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "decode_tp_size",
    "rid",
    // TensorRT-LLM.
    "disaggregated_params",
};
// Of the body, objects out of which engines take further arguments of the kinds above.
constexpr std::string_view kHolders[] = {"vllm_xargs", "extra_args", "extra_body", "sampling_params"};
constexpr size_t kDepthMax = 4;  // of holders in each other

constexpr std::string_view kFields[] = {
    "x-data-parallel-rank",           // vLLM
    "x-data-parallel-host-port",      // sidecars in front of vLLM
    "x-prefiller-host-port",          // the same: whom the sidecar asks for the prefill
    "x-prefiller-url",                //
    "x-encoder-hosts-ports",          //
    "x-gateway-destination-endpoint"  // inference gateways
};
constexpr std::string_view kFieldStart = "x-override-";  // SGLang may believe such rather than the body
// The proxy's clients show theirs to the proxy; an engine has one of its own, or none.
constexpr std::string_view kCredentials[] = {"authorization", "x-api-key", "api-key", "cookie"};
// vLLM's P2pNcclConnector reads addresses out of the request's id.
constexpr std::string_view kAddressesInId[] = {"___prefill_addr_", "___decode_addr_"};

bool is_one_of(std::string_view field, std::span<const std::string_view> names) {
    return std::any_of(names.begin(), names.end(),
                       [&](std::string_view name) { return http::same_name(field, name); });
}

std::optional<std::string> cleaned(const json::Object& object, size_t members_max, size_t depth);

// The same of a holder's value: an object, or a list of them. nullopt: nothing in it is reserved.
std::optional<std::string> cleaned_holder(const json::Member& holder, size_t members_max, size_t depth) {
    if (holder.kind == json::Kind::kObject) {
        json::Object inner;
        if (depth == kDepthMax || !inner.scan(holder.value, members_max)) return "{}";
        return cleaned(inner, members_max, depth + 1);
    }
    if (holder.kind != json::Kind::kArray) return std::nullopt;
    if (json::count_elements(holder.value, members_max) > members_max) return "[]";
    std::vector<std::string_view> elements;
    json::elements_of(holder.value, elements);
    std::string out = "[";
    bool any = false;
    for (std::string_view element : elements) {
        bool object = element.starts_with('{');
        json::Member one{{}, element, object ? json::Kind::kObject : json::Kind::kNull};
        auto value = cleaned_holder(one, members_max, depth);
        any = any || value.has_value();
        out.append(out.size() > 1 ? "," : "").append(value ? *value : element);
    }
    return any ? std::optional(out += ']') : std::nullopt;
}

std::optional<std::string> cleaned(const json::Object& object, size_t members_max, size_t depth) {
    std::vector<json::Edit> edits;
    std::deque<std::string> values;  // what edits set
    auto edit = [&](std::string_view name) -> json::Edit* {
        for (json::Edit& known : edits) {
            if (known.key == name) return &known;
        }
        return &edits.emplace_back(json::Edit{json::Edit::kDrop, name});
    };
    for (const json::Member& member : object.members()) {
        // Names are longer than that of most members, and few begin as they do: one look settles most.
        if (!member.key_escaped && (member.key.size() < 3 || member.key.size() > 22)) continue;
        for (std::string_view name : kMembers) {
            if (json::key_is(member, name)) edit(name);
        }
        for (std::string_view name : kHolders) {
            if (!json::key_is(member, name)) continue;
            auto value = cleaned_holder(member, members_max, depth);
            if (!value) continue;
            // Of several of one name engines take the last, and that alone is left.
            json::Edit* change = edit(name);
            change->action = json::Edit::kSet;
            change->value = values.emplace_back(std::move(*value));
        }
    }
    if (edits.empty()) return std::nullopt;
    json::Splice splice;
    splice.make(object, edits);
    return splice.joined();
}

}  // namespace

std::optional<std::string> without_reserved(const json::Object& body, size_t members_max) {
    return cleaned(body, members_max, 0);
}

size_t hold_back_reserved(http::Fields& fields) {
    size_t held = 0;
    for (http::Field& field : fields) {
        if (field.kind != http::FieldKind::kOther || !field.forward) continue;
        if (is_one_of(field.name, kCredentials)) {
            field.forward = false;
        } else if (is_one_of(field.name, kFields) ||
                   http::same_name(field.name.substr(0, kFieldStart.size()), kFieldStart)) {
            field.forward = false;
            ++held;
        }
    }
    return held;
}

bool is_reserved_id(std::string_view request_id) {
    return std::any_of(std::begin(kAddressesInId), std::end(kAddressesInId), [&](std::string_view mark) {
        return request_id.find(mark) != std::string_view::npos;
    });
}

}  // namespace moonpool::relay
