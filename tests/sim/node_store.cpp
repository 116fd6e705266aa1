// SimNode: the store, as Connection without its socket.
#include <cstring>
#include <stdexcept>

#include "base/crc32c.hpp"
#include "frames.hpp"
#include "node.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/messages.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool::sim {

bool SimNode::accept(std::shared_ptr<End> end) {
    if (shutting_down_) return false;
    uint64_t id = next_caller_++;
    end->on_frame = [this, id](const Bytes& frame) { on_frame(id, frame); };
    end->on_end = [this, id] { drop_caller(id); };
    callers_.emplace(id, Caller{std::move(end), {}});
    return true;
}

void SimNode::drop_caller(uint64_t id) {
    auto it = callers_.find(id);
    if (it == callers_.end()) return;
    for (auto& [pin, pinned] : it->second.pins) unpin(pinned);
    callers_.erase(it);
}

void SimNode::unpin(const std::vector<Pinned>& pinned) {
    for (const Pinned& what : pinned) store_pool().table().unpin(what.slot, what.generation);
}

// The answers of a connection keep their order.
void SimNode::on_frame(uint64_t id, const Bytes& frame) {
    auto it = callers_.find(id);
    if (it == callers_.end()) return;
    if (it->second.waits) return it->second.behind.push_back(frame);
    handle(id, frame, false);
}

std::optional<ssd::Found> SimNode::on_disk_alone(std::string_view name) const {
    if (ssd_ == nullptr || pool()->find(space_, name) != kNoSlot) return std::nullopt;
    return ssd_->find(*pools_.begin()->second, space_, name);
}

// What memory must have first; of the names of such a frame one at most.
std::optional<std::string> SimNode::waits_for(const Bytes& frame) const {
    FrameHeader header = header_of(frame);
    Reader body = body_of(frame);
    std::vector<std::string> names;
    if (header.kind == Kind::kRead) {
        body.number<uint32_t>();
        if (body.number<uint32_t>() != 1) throw std::runtime_error("a READ of several keys");
        ReadAsk ask = ReadAsk::read(body);
        if (!ask.pinned() && on_disk_alone(ask.name)) names.emplace_back(ask.name);
    } else if (header.kind == Kind::kLookup) {
        LookupHead head = LookupHead::read(body);
        for (uint32_t i = 0; head.pins() && i < head.names; ++i) {
            std::string name(body.bytes16());
            if (on_disk_alone(name)) names.push_back(name);
        }
    } else if (header.kind == Kind::kRemove) {
        body.number<uint32_t>();
        auto n = body.number<uint32_t>();
        const bool ordered = (n & kRemoveVersions) != 0;
        for (uint32_t i = 0; i < (n & ~kRemoveVersions); ++i) {
            std::string name(body.bytes16());
            auto found = on_disk_alone(name);
            if (found && found->size == kManifestBytes) names.push_back(name);
        }
        if (!ordered && body.left() != 0) return std::nullopt;  // one generation
    }
    if (names.size() > 1) throw std::runtime_error("a frame that waits for several objects");
    return names.empty() ? std::nullopt : std::optional(names.front());
}

// As Connection::park: the frame is handled anew when memory has what it waits for. False: it waits for
// nothing, or for what cannot be had from the disk.
bool SimNode::park(uint64_t id, const Bytes& frame) {
    std::optional<std::string> name = waits_for(frame);
    if (!name) return false;
    auto arrived = [this, id, frame](uint32_t) {
        auto it = callers_.find(id);
        if (it == callers_.end()) return;
        it->second.waits = false;
        handle(id, frame, true);
        while ((it = callers_.find(id)) != callers_.end() && !it->second.waits &&
               !it->second.behind.empty()) {
            Bytes next = std::move(it->second.behind.front());
            it->second.behind.pop_front();
            handle(id, next, false);
        }
    };
    callers_.find(id)->second.waits = ssd_->promote(store_pool(), space_, *name, arrived);
    return callers_.find(id)->second.waits;
}

void SimNode::handle(uint64_t id, const Bytes& frame, bool resumed) {
    if (!resumed && park(id, frame)) return;
    auto it = callers_.find(id);
    FrameHeader header = header_of(frame);
    Reader body = body_of(frame);
    Bytes out;
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    switch (header.kind) {
        case Kind::kPut:
            on_put(header, body, out);
            break;
        case Kind::kRead:
            on_read(header, body, out);
            break;
        case Kind::kLookup:
            on_lookup(it->second, header, body, out);
            break;
        case Kind::kRemove:
            on_remove(header, body, out);
            break;
        case Kind::kRelease: {
            auto pin = it->second.pins.find(body.number<uint64_t>());
            if (pin != it->second.pins.end()) {
                if (!planted_.unpin_lost) unpin(pin->second);
                it->second.pins.erase(pin);
            }
            return;
        }
        default:
            throw std::runtime_error("a frame that no simulated client sends");
    }
    finish_frame(out, at);
    it->second.end->send(std::move(out));
}

void SimNode::on_put(const FrameHeader&, Reader body, Bytes& out) {
    PutHead head = PutHead::read(body);
    std::vector<PutObject> rows;
    for (uint32_t i = 0; i < head.commit.rows; ++i) rows.push_back(PutObject::read(body, head.commit.flags));
    Writer w(out);
    w.number(head.commit.rows);
    for (const PutObject& row : rows) {
        std::string_view bytes = body.bytes(row.size);
        std::string name(row.key.name);
        PutOutcome outcome = store(name, bytes, row.crc, head.commit.replaces(), row.key.version);
        w.number(outcome);
        if (outcome == PutOutcome::kOlder) w.number(removals_->newest_for(store_pool().hash(space_, name)));
    }
    if (!body.done()) throw std::runtime_error("a PUT that is none");
}

PutOutcome SimNode::store(const std::string& name, std::string_view bytes, uint32_t crc, bool replace,
                          std::optional<Version> given) {
    Pool& pool = store_pool();
    ObjectTable& table = pool.table();
    bool there = pool.find(space_, name) != kNoSlot || on_disk_alone(name);
    if (there && !replace) return PutOutcome::kExists;
    if (there && planted_.replace_lost) return PutOutcome::kStored;
    Hash128 hash = pool.hash(space_, name);
    std::optional<Version> version = removals_->of_put(hash, given);
    if (!version && planted_.older_taken) version = given;
    if (!version) return PutOutcome::kOlder;
    const uint32_t full = options_.full;
    if (replace && full != 0 && world_.random.below(100) < full) return PutOutcome::kRefused;
    if (replace) removals_->add(hash, given.value_or(kNoVersion));
    if (replace) note_replaced(name);
    std::optional<Extent> lease = pool.lease(bytes.size(), bytes.size());
    if (!lease) return PutOutcome::kRefused;
    Extent extent{lease->offset, bytes.size()};
    std::memcpy(pool.writable() + extent.offset, bytes.data(), bytes.size());
    bool stored = crc32c(0, bytes.data(), bytes.size()) == crc && pool.leases().commit(extent);
    // Two groups, so that what is being written is evicted, too.
    RetentionHints hints;
    if (options_.memory_objects != 0) hints.group = {1 + hash.low % 2, 1};
    if (stored && table.commit(space_, hash, name, extent, crc, kNoSlot, replace, hints, *version) !=
                      ObjectTable::Commit::kStored) {
        pool.leases().free(extent);
        stored = false;
    }
    pool.leases().close(lease->offset);
    if (stored && ssd_ != nullptr) stored_.emplace(name, bytes);
    return stored ? PutOutcome::kStored : PutOutcome::kRefused;
}

// A client looks for the manifest that it replaces at its own node in the mapped memory, before its frame.
void SimNode::note_replaced(const std::string& name) {
    auto note = [&](std::set<std::string>& manifests, const std::string& bytes) {
        auto manifest = decode_manifest(std::as_bytes(std::span(bytes)), cluster_secrets(), name);
        if (manifest) manifests.insert(manifest->group_name());
    };
    if (auto bytes = read(name)) note(removed_manifests_, *bytes);
    auto found = on_disk_alone(name);
    for (auto it = stored_.lower_bound({name, ""}); found && it != stored_.end() && it->first == name; ++it) {
        if (crc32c(0, it->second.data(), it->second.size()) == found->crc) note(lost_manifests_, it->second);
    }
}

std::optional<std::string> SimNode::read(const std::string& name) const {
    if (pool() == nullptr) return std::nullopt;
    uint32_t slot = pool()->find(space_, name);
    if (slot == kNoSlot) return std::nullopt;
    const IndexEntry& entry = pool()->table().entry(slot);
    return std::string(reinterpret_cast<const char*>(pool()->data() + entry.offset), entry.size);
}

void SimNode::on_read(const FrameHeader&, Reader body, Bytes& out) {
    const ObjectTable& table = store_pool().table();
    body.number<uint32_t>();  // the space; there is one
    auto n = body.number<uint32_t>();
    Writer w(out);
    w.number(n);
    std::string bytes;
    for (uint32_t i = 0; i < n; ++i) {
        ReadAsk ask = ReadAsk::read(body);
        uint32_t slot = kNoSlot;
        if (!ask.pinned()) {
            slot = store_pool().find(space_, ask.name);
        } else if (table.readable(ask.slot, ask.generation)) {
            slot = ask.slot;
        }
        if (slot == kNoSlot) {
            w.number(ReadRow{.size = kReadMiss});
            continue;
        }
        const IndexEntry& entry = table.entry(slot);
        w.number(ReadRow{entry.size, entry.size, table.generation(slot), entry.crc, slot});
        bytes.append(reinterpret_cast<const char*>(store_pool().data() + entry.offset), entry.size);
        if (!ask.pinned()) store_pool().table().touch(slot);
    }
    w.bytes(bytes.data(), bytes.size());
}

void SimNode::on_lookup(Caller& caller, const FrameHeader&, Reader body, Bytes& out) {
    LookupHead head = LookupHead::read(body);
    ObjectTable& table = store_pool().table();
    std::vector<Descriptor> found(head.names);
    std::vector<Pinned> pinned;
    uint32_t hits = 0;
    for (Descriptor& row : found) {
        std::string_view name = body.bytes16();
        uint32_t slot = store_pool().find(space_, name);
        if (slot == kNoSlot) {
            auto on_disk = head.pins() ? std::nullopt : on_disk_alone(name);
            if (!on_disk) continue;
            row = Descriptor{0, on_disk->size, on_disk->sequence | kOnSsd, on_disk->crc, kNoSlot};
            ++hits;
            continue;
        }
        const IndexEntry& entry = table.entry(slot);
        row = Descriptor{entry.offset, entry.size, table.generation(slot), entry.crc, slot};
        ++hits;
        pinned.push_back({slot, row.generation});
        if (!head.pins()) table.touch(slot);
    }
    uint64_t pin = head.pins() && hits != 0 ? next_pin_++ : 0;
    if (pin != 0 && !planted_.pin_lost) {
        for (const Pinned& what : pinned) table.pin(what.slot);
        caller.pins.emplace(pin, std::move(pinned));
    }
    Writer w(out);
    LookupFound{pin, hits, false, head.names}.write(w);
    for (const Descriptor& row : found) w.number(row);
}

void SimNode::on_remove(const FrameHeader&, Reader body, Bytes& out) {
    body.number<uint32_t>();
    auto n = body.number<uint32_t>();
    bool ordered = (n & kRemoveVersions) != 0;
    n &= ~kRemoveVersions;
    std::vector<std::string> names;
    for (uint32_t i = 0; i < n; ++i) names.emplace_back(body.bytes16());
    bool exact = !ordered && body.left() != 0;
    Writer w(out);
    w.number(n);
    std::string manifests;
    for (const std::string& name : names) {
        uint64_t number = ordered || exact ? body.number<uint64_t>() : 0;
        Version version = ordered ? number : UINT64_MAX;
        if (!exact && !planted_.removal_lost) removals_->add(store_pool().hash(space_, name), version);
        ObjectTable& table = store_pool().table();
        uint32_t slot = store_pool().find(space_, name);
        bool goes =
            slot != kNoSlot && (exact ? table.generation(slot) == number : table.version(slot) < version);
        if (slot != kNoSlot && !goes) {
            w.number(kNotRemoved);
            continue;
        }
        std::string bytes = goes ? *read(name) : std::string();
        bool is_manifest = may_be_manifest(std::as_bytes(std::span(bytes)));
        if (is_manifest) manifests += bytes;
        if (is_manifest && !exact) {
            auto manifest = decode_manifest(std::as_bytes(std::span(bytes)), cluster_secrets(), name);
            if (manifest) removed_manifests_.insert(manifest->group_name());
        }
        bool was_there = goes;
        if (goes && !planted_.removal_lost) table.remove(slot);
        if (ssd_ != nullptr && (goes || !exact)) {
            bool on_disk = ssd_->holds(store_pool(), space_, name), stays = false;
            if (!planted_.removal_lost && (on_disk || !planted_.write_survives))
                stays = ssd_->forget_older(store_pool().hash(space_, name), exact ? UINT64_MAX : version);
            was_there |= on_disk && !stays;
        }
        w.number(is_manifest ? kRemovedManifest : was_there ? kRemoved : kNotRemoved);
    }
    w.bytes(manifests.data(), manifests.size());
}

}  // namespace moonpool::sim
