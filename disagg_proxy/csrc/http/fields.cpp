#include "http/fields.hpp"

#include <algorithm>
#include <array>

#include "http/octets.hpp"

namespace moonpool::http {

namespace {

constexpr size_t kNamedMax = 64;

struct Known {
    std::string_view name;
    FieldKind kind;
};

// In the order of their lengths, so that a name is compared with those of its own length only.
constexpr Known kKnown[] = {
    {"te", FieldKind::kHopByHop},
    {"host", FieldKind::kHost},
    {"expect", FieldKind::kExpect},
    {"trailer", FieldKind::kHopByHop},
    {"upgrade", FieldKind::kHopByHop},
    {"connection", FieldKind::kConnection},
    {"keep-alive", FieldKind::kHopByHop},
    {"content-type", FieldKind::kContentType},
    {"x-request-id", FieldKind::kRequestId},
    {"content-length", FieldKind::kContentLength},
    {"http2-settings", FieldKind::kHopByHop},
    {"proxy-connection", FieldKind::kHopByHop},
    {"transfer-encoding", FieldKind::kTransferEncoding},
    {"proxy-authenticate", FieldKind::kHopByHop},
    {"proxy-authorization", FieldKind::kHopByHop},
};

}  // namespace

FieldKind kind_of(std::string_view name) {
    for (const Known& known : kKnown) {
        if (known.name.size() < name.size()) continue;
        if (known.name.size() > name.size()) break;
        if (same_name(known.name, name)) return known.kind;
    }
    return FieldKind::kOther;
}

bool same_name(std::string_view a, std::string_view b) {
    return a.size() == b.size() &&
           std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) { return lower(x) == lower(y); });
}

const Field* find_field(std::span<const Field> fields, std::string_view name) {
    auto found =
        std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return same_name(f.name, name); });
    return found == fields.end() ? nullptr : &*found;
}

bool is_field_name(std::string_view text) {
    return !text.empty() && std::all_of(text.begin(), text.end(), is_token_octet);
}

bool is_field_value(std::string_view text) { return std::none_of(text.begin(), text.end(), is_control); }

bool apply_connection(std::span<Field> fields, bool& close) {
    close = false;
    size_t count = 0;
    for (const Field& connection : fields) {
        if (connection.kind != FieldKind::kConnection) continue;
        each_token(connection.value, [&](std::string_view word) {
            if (++count > kNamedMax) return;
            if (same_name(word, "close")) close = true;
            if (same_name(word, "keep-alive")) return;  // ends here anyway, and is what most clients say
            for (Field& field : fields) {
                if (field.kind != FieldKind::kContentLength && same_name(field.name, word))
                    field.forward = false;
            }
        });
    }
    return count <= kNamedMax;
}

}  // namespace moonpool::http
