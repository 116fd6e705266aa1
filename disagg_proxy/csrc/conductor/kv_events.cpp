// One reader for three dialects (docs/events.md): vLLM's events as maps, the same as arrays with the fields
// in a fixed order, and SGLang's and the pool's, which use a part of the fields. A field has one function
// that reads it into KvEvent; two tables say which name, or which place, is whose.
//
// Untrusted input: an engine may be of any version, or another process may publish on its port. Counts are
// compared with maxima before memory is reserved, sums over a batch too; MsgpackReader never reads behind
// the payload. Nothing is copied but numbers: texts and hashes are views into the payload, which the caller
// keeps.
//
// A wrong type in a known field refuses the batch, since what follows would be read at the wrong place. An
// unknown field or kind of event is passed over: newer engines have more of them.
#include "conductor/kv_events.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "base/msgpack.hpp"
#include "base/xxh3.hpp"

namespace moonpool {

namespace {

using Type = MsgpackReader::Type;

bool optional_text(MsgpackReader& in, std::optional<std::string_view>& out) {
    if (in.nil()) {
        out.reset();
        return true;
    }
    std::string_view text;
    if (!in.text(text)) return false;
    out = text;
    return true;
}

// vLLM names blocks by bytes or by integers, by its settings. Both become 64 bits; of the pool's events the
// bytes are the digest itself.
bool read_hash(MsgpackReader& in, EventHash& out) {
    bool negative = false;
    if (in.peek() == Type::kInteger) return in.integer(out.value, negative);
    if (!in.bytes(out.bytes) || out.bytes.empty()) return false;
    out.value = xxh3_64(out.bytes.data(), out.bytes.size());
    return true;
}

bool read_hashes(MsgpackReader& in, KvEvent& e) {
    uint32_t count = 0;
    if (!in.array(count) || count > kBatchBlocksMax) return false;
    e.hashes.resize(count);
    return std::all_of(e.hashes.begin(), e.hashes.end(),
                       [&](EventHash& hash) { return read_hash(in, hash); });
}

bool read_parent(MsgpackReader& in, KvEvent& e) {
    if (in.nil()) return true;
    EventHash hash;
    if (!read_hash(in, hash)) return false;
    e.parent = hash;
    return true;
}

// With EAGLE a token is a pair (token, next); the first is the prompt's.
bool read_token(MsgpackReader& in, uint64_t& token, bool& negative) {
    uint32_t count = 0;
    if (in.peek() != Type::kArray) return in.integer(token, negative);
    if (!in.array(count) || count == 0 || !in.integer(token, negative)) return false;
    for (uint32_t i = 1; i < count; ++i) {
        if (!in.skip(1)) return false;
    }
    return true;
}

bool read_tokens(MsgpackReader& in, KvEvent& e) {
    uint32_t count = 0;
    if (!in.array(count)) return false;
    e.tokens.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
        uint64_t token = 0;
        bool negative = false;
        if (!read_token(in, token, negative)) return false;
        // No id behind the first odd one is kept: how many blocks are whole before it is what counts.
        e.odd_tokens |= negative || token > UINT32_MAX;
        if (!e.odd_tokens) e.tokens.push_back(static_cast<uint32_t>(token));
    }
    return true;
}

bool read_block_tokens(MsgpackReader& in, KvEvent& e) {
    uint64_t size = 0;
    bool negative = false;
    if (!in.integer(size, negative)) return false;
    // 0 is the size of no index, so such an event is left out, not refused.
    e.block_tokens = negative || size > UINT32_MAX ? 0 : static_cast<uint32_t>(size);
    return true;
}

// Whether there is one is all that matters: the number means something at its engine only.
bool read_lora_id(MsgpackReader& in, KvEvent& e) {
    e.has_lora_id = in.peek() != Type::kNil;
    return in.skip();
}

// No medium is the device. What is neither GPU nor CPU (a file system, a store) counts as disk.
bool read_medium(MsgpackReader& in, KvEvent& e) {
    std::optional<std::string_view> medium;
    if (!optional_text(in, medium)) return false;
    if (!medium || *medium == "GPU") {
        e.tier = KvTier::kDevice;
    } else {
        e.tier = medium->starts_with("CPU") ? KvTier::kHost : KvTier::kDisk;
    }
    return true;
}

bool read_lora_name(MsgpackReader& in, KvEvent& e) { return optional_text(in, e.lora_name); }
bool read_cache_salt(MsgpackReader& in, KvEvent& e) { return optional_text(in, e.cache_salt); }

// Two texts at most have a meaning here: LoRA and salt. Anything else belongs to an image or an embedding,
// and makes the block foreign.
bool read_block_extras(MsgpackReader& in, BlockExtras& out) {
    if (in.nil()) return true;
    uint32_t count = 0;
    if (!in.array(count)) return false;
    for (uint32_t i = 0; i < count; ++i) {
        if (in.peek() != Type::kText || out.texts_count == out.texts.size()) {
            out.foreign = true;
            if (!in.skip()) return false;
        } else if (!in.text(out.texts[out.texts_count++])) {
            return false;
        }
    }
    return true;
}

bool read_extras(MsgpackReader& in, KvEvent& e) {
    if (in.nil()) return true;
    uint32_t count = 0;
    if (!in.array(count) || count > kBatchBlocksMax) return false;
    for (uint32_t i = 0; i < count; ++i) {
        if (!read_block_extras(in, e.extras.emplace_back())) return false;
    }
    return true;
}

bool read_group(MsgpackReader& in, KvEvent& e) {
    if (in.nil()) return true;
    uint64_t bits = 0;
    bool negative = false;
    if (!in.integer(bits, negative)) return false;
    e.group = static_cast<int64_t>(bits);
    return true;
}

// A kind that is not in the list attends to a part of the prompt only (sliding window, state): its blocks
// do not say that a prefix is there.
bool read_spec_kind(MsgpackReader& in, KvEvent& e) {
    constexpr std::array<std::string_view, 4> kWhole = {"full_attention", "mla_attention",
                                                        "sink_full_attention", "unknown"};
    std::optional<std::string_view> kind;
    if (!optional_text(in, kind)) return false;
    e.part_of_attention = kind && std::find(kWhole.begin(), kWhole.end(), *kind) == kWhole.end();
    return true;
}

bool read_locality(MsgpackReader& in, KvEvent& e) {
    std::optional<std::string_view> locality;
    if (!optional_text(in, locality)) return false;
    e.remote = locality == "REMOTE";
    return true;
}

struct Field {
    std::string_view name;
    bool (*read)(MsgpackReader&, KvEvent&);
};

// In the order of the array form.
constexpr std::array<Field, 9> kStoredFields = {{{"block_hashes", read_hashes},
                                                 {"parent_block_hash", read_parent},
                                                 {"token_ids", read_tokens},
                                                 {"block_size", read_block_tokens},
                                                 {"lora_id", read_lora_id},
                                                 {"medium", read_medium},
                                                 {"lora_name", read_lora_name},
                                                 {"extra_keys", read_extras},
                                                 {"group_idx", read_group}}};
constexpr std::array<Field, 2> kRemovedFields = {{{"block_hashes", read_hashes}, {"medium", read_medium}}};
// Later additions, which the array form does not have.
constexpr std::array<Field, 3> kMapFields = {
    {{"kv_cache_spec_kind", read_spec_kind}, {"locality", read_locality}, {"cache_salt", read_cache_salt}}};

KvEvent::Kind kind_of(std::string_view name) {
    if (name == "BlockStored") return KvEvent::Kind::kStored;
    if (name == "BlockRemoved") return KvEvent::Kind::kRemoved;
    return name == "AllBlocksCleared" ? KvEvent::Kind::kCleared : KvEvent::Kind::kOther;
}

bool read_named(MsgpackReader& in, std::string_view name, KvEvent& e) {
    for (std::span<const Field> fields :
         {std::span<const Field>(kStoredFields), std::span<const Field>(kMapFields)}) {
        for (const Field& field : fields) {
            if (field.name == name) return field.read(in, e);
        }
    }
    return in.skip();
}

bool read_map_event(MsgpackReader& in, KvEvent& e) {
    uint32_t count = 0;
    if (!in.map(count)) return false;
    for (uint32_t i = 0; i < count; ++i) {
        std::string_view name, type;
        if (!in.text(name)) return false;
        if (name == "type") {
            if (!in.text(type)) return false;
            e.kind = kind_of(type);
        } else if (!read_named(in, name, e)) {
            return false;
        }
    }
    return true;
}

bool read_array_event(MsgpackReader& in, KvEvent& e) {
    uint32_t count = 0;
    std::string_view type;
    if (!in.array(count) || count == 0 || !in.text(type)) return false;
    e.kind = kind_of(type);
    std::span<const Field> fields;
    if (e.kind == KvEvent::Kind::kStored) fields = kStoredFields;
    if (e.kind == KvEvent::Kind::kRemoved) fields = kRemovedFields;
    // An array may be shorter (an older engine) or longer (a newer one).
    for (uint32_t i = 1; i < count; ++i) {
        bool known = i - 1 < fields.size();
        if (known ? !fields[i - 1].read(in, e) : !in.skip()) return false;
    }
    return true;
}

bool read_event(MsgpackReader& in, KvEvent& e) {
    return in.peek() == Type::kMap ? read_map_event(in, e) : read_array_event(in, e);
}

}  // namespace

Result<KvEventBatch> decode_kv_events(std::span<const uint8_t> payload) {
    if (payload.size() > kEventBytesMax) {
        return Error{Code::kTooLarge, "a batch of KV events has at most 32 MiB"};
    }
    MsgpackReader in(payload);
    KvEventBatch batch;
    uint32_t count = 0, events = 0;
    if (!in.array(count) || count < 2 || !in.number(batch.sent_s) || !in.array(events)) {
        return Error{Code::kProtocol, "no batch of KV events: not [time, events, ...]"};
    }
    if (events > kBatchEventsMax) return Error{Code::kTooLarge, "a batch has at most 65,536 KV events"};
    size_t blocks = 0;
    for (uint32_t i = 0; i < events; ++i) {
        KvEvent& e = batch.events.emplace_back();
        if (!read_event(in, e)) {
            return Error{Code::kProtocol, "KV event " + std::to_string(i) + " of the batch is malformed"};
        }
        // Decoded, a block takes forty times its bytes: the sum is what bounds memory.
        blocks += std::max(e.hashes.size(), e.extras.size());
        if (blocks > kBatchBlocksMax) {
            return Error{Code::kTooLarge, "the KV events of a batch have at most 1,048,576 blocks"};
        }
    }
    for (uint32_t i = 2; i < count; ++i) {
        if (!in.skip()) return Error{Code::kProtocol, "a batch of KV events that ends too early"};
    }
    if (!in.done()) return Error{Code::kProtocol, "bytes behind a batch of KV events"};
    return batch;
}

}  // namespace moonpool
