// What clients ask a master, as frames. A process that passes questions on looks at their form first: a
// master ends the connection on which a malformed one came, and with it the questions of all others.
#pragma once

#include <string_view>
#include <vector>

#include "directory/protocol.hpp"

namespace moonpool {

inline constexpr uint32_t kQuestionKeysMax = 16384;      // of one frame
inline constexpr uint32_t kQuestionBytesMax = 8u << 20;  // and its body

// Whether the question is a part of a put, a replacement or a removal: a tenant's reader may not ask it.
inline bool changes_objects(Kind kind, Reader body) {
    switch (kind) {
        case Kind::kPlace:
        case Kind::kForget:
        case Kind::kOrdered:
            return true;
        case Kind::kLocate:
            return (LocateHead::read(body).flags & kLocateOrder) != 0;
        default:
            return false;
    }
}

inline bool fits_question(Kind kind, Reader body) {
    switch (kind) {
        case Kind::kMembers:
            body.number<uint64_t>();
            return body.ok();
        case Kind::kLocate: {
            LocateHead head = LocateHead::read(body);
            return body.ok() && head.n <= kQuestionKeysMax &&
                   body.left() == uint64_t{head.n} * sizeof(Hash128);
        }
        case Kind::kPlace: {
            body.bytes(12);  // bytes, nodes wanted, flags
            auto nodes = body.number<uint16_t>();
            auto hosts = body.number<uint16_t>();
            body.bytes(size_t{nodes} * sizeof(NodeId));
            for (uint16_t i = 0; body.ok() && i < hosts; ++i) body.text16();
            return body.ok();
        }
        case Kind::kForget: {
            auto n = body.number<uint32_t>();
            auto nodes = body.number<uint16_t>();
            body.number<uint16_t>();
            return body.ok() && n <= kQuestionKeysMax &&
                   body.left() == uint64_t{nodes} * sizeof(NodeId) + uint64_t{n} * sizeof(Hash128);
        }
        case Kind::kOrdered: {
            std::optional<Ordered> ordered = Ordered::read(body);
            return ordered && ordered->keys() <= kQuestionKeysMax;
        }
        default:
            return false;
    }
}

// Of RELAY, before the question's own body.
struct RelayHead {
    static constexpr size_t kBytes = 8;
    uint32_t wait_ms = 0;  // the client waits no longer than that for the node's word
    Kind kind = Kind::kError;

    void write(Writer& w) const {
        w.number(wait_ms);
        w.number(kind);
        w.number(uint8_t{0});
        w.number(uint16_t{0});
    }
    static RelayHead read(Reader& r) {
        RelayHead head;
        head.wait_ms = r.number<uint32_t>();
        head.kind = r.number<Kind>();
        r.bytes(3);
        return head;
    }
};

}  // namespace moonpool
