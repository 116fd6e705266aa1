// The half of Connection that answers: each kind of frame, on the node's loop, without ever waiting.
//
// Every handler has the same shape: read the whole body, check counts, sizes and rights against what the
// node knows, act, write one answer frame. A peer's bytes are untrusted, although the peer has proved the
// token: a count is compared with a limit before it is looped over, a space must be one that this
// connection has opened, an offset must lie in a lease of this connection, a slot is valid with its
// generation only.
//
// What a handler returns: true goes on, also after a refusal in words (refuse); false ends the connection
// (malformed, fail). An answer is begun before the loop over its rows, and malformed() in the middle cuts
// off what stands of it (whole_answers_).
//
// Answers of a frame have the order of its rows, so that a client needs no names in them.
#include <algorithm>
#include <cstring>

#include "store/node/connection.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/messages.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

bool Connection::on_open_space(const FrameHeader& header, Reader body) {
    std::string_view name_space = body.text16();
    std::string_view fingerprint = body.bytes16();
    // A space's identity is tenant 0 namespace 0 fingerprint: a zero byte in the namespace would make two
    // spaces one.
    if (!body.done() || name_space.find('\0') != name_space.npos) return malformed("is no OPEN_SPACE");
    const Limits& limits = server_.options_.limits;
    if (size_t longest = std::max(name_space.size(), fingerprint.size()); longest > limits.key_bytes) {
        return refuse(header.request_id, Code::kInvalidArgument,
                      "a namespace or fingerprint of " + std::to_string(longest) +
                          " bytes is over the limit of " + std::to_string(limits.key_bytes) +
                          " (node.key_bytes_max)");
    }
    if (spaces_.size() >= kConnectionSpacesMax) {
        return refuse(
            header.request_id, Code::kTooLarge,
            "this connection already has " + std::to_string(kConnectionSpacesMax) + " spaces, the limit");
    }
    std::optional<uint32_t> id = pool_->open_space(name_space, fingerprint, limits.spaces);
    if (!id) {
        return refuse(header.request_id, Code::kTooLarge,
                      "the tenant already has " + std::to_string(limits.spaces) +
                          " spaces with users or objects, the limit; close stores of other namespaces, or "
                          "remove their objects");
    }
    // The pool counts users of a space; this connection is one, however often it asks.
    if (!spaces_.insert(*id).second) pool_->leave_space(*id);  // it had it already
    last_space_ = *id;
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer(out_).number(*id);
    finish_frame(out_, at);
    return true;
}

// A refusal is not an error here: the answer carries an empty extent and the reason, with which the
// client's put fails or takes another way.
bool Connection::on_lease(const FrameHeader& header, Reader body) {
    auto min = body.number<uint64_t>();
    auto want = body.number<uint64_t>();
    if (!body.done()) return malformed("is no LEASE");
    Extent extent;
    std::string why;
    const Limits& limits = server_.options_.limits;
    if (min > pool_->object_bytes_max()) {
        why = "it is over the object limit of " + std::to_string(pool_->object_bytes_max()) +
              " bytes (node.object_share_max of the arena)";
    } else if (pool_->is_over_rate(now_ms())) {
        why = over_rate_text();
        pool_->count_over_rate(1);
    } else if (leases_.size() >= limits.slabs) {
        why = "this client already holds " + std::to_string(limits.slabs) + " leases, the limit";
    } else if (!pool_->may_lease(leased_bytes_, min)) {
        why = "this client already holds " + std::to_string(leased_bytes_) +
              " bytes in leases, half of the arena";
    } else if (std::optional<Extent> lease = pool_->lease(min, std::min(want, fair_lease_bytes()))) {
        extent = *lease;
        leased_bytes_ += extent.size;
        leases_.emplace(extent.offset, extent);
    } else if (pool_->reserving()) {
        why = "the node's memory is still being reserved, " + std::to_string(pool_->capacity()) + " of " +
              std::to_string(pool_->start_bytes()) + " bytes so far; try again";
    } else {
        why = "the arena is full: the rest of its " + std::to_string(pool_->capacity()) +
              " bytes is pinned by readers or leased to writers";
    }
    if (!why.empty()) count(server_.metrics_.lease_refused_total);
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(extent.offset);
    w.number(extent.size);
    w.text16(why);
    finish_frame(out_, at);
    return true;
}

std::string Connection::over_rate_text() const {
    return "tenant \"" + pool_->tenant() + "\" has moved more than its " +
           std::to_string(pool_->limits().bytes_per_s.value_or(0)) +
           " bytes a second at this node (bytes_per_s in cluster.tenants_file); try again";
}

// A client keeps its lease until it is full, so what one may take ahead shrinks with the number of clients.
uint64_t Connection::fair_lease_bytes() const {
    uint64_t clients = std::max<size_t>(server_.connections_.size() - server_.remote_connections_, 1);
    return std::min(pool_->object_bytes_max(), pool_->size_now() / 16 / clients);
}

// The last lease that begins at or before the extent. The comparison is written so that a size from the
// wire cannot overflow it.
bool Connection::leased(Extent extent) const {
    auto it = leases_.upper_bound(extent.offset);
    if (it == leases_.begin()) return false;
    const Extent& lease = std::prev(it)->second;
    return extent.size <= lease.size && extent.offset <= lease.end() - extent.size;
}

bool Connection::on_return(Reader body) {
    auto offset = body.number<uint64_t>();
    if (!body.done()) return malformed("is no RETURN");
    auto it = leases_.find(offset);
    if (it == leases_.end()) return malformed("returns a lease that this client does not hold");
    // Committed objects of the lease stay; the rest of its memory is free again.
    pool_->leases().close(offset);
    leased_bytes_ -= it->second.size;
    leases_.erase(it);
    return true;
}

// The bytes are in the arena already, written there by the client. A row that is refused or superfluous
// gives its extent back; a row that lies about memory ends the connection.
bool Connection::on_commit(const FrameHeader& header, Reader body) {
    CommitHead head = CommitHead::read(body);
    uint32_t n = head.rows, space = head.space;
    if (!body.ok() || !has_space(space)) return malformed("is no COMMIT");
    const Limits& limits = server_.options_.limits;
    if (n > limits.frame_keys) return malformed("commits more keys than the limit");
    bool one_way = (header.flags & kFlagOneWay) != 0;
    size_t at = 0;
    if (!one_way) {
        at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
        Writer(out_).number(n);
    }
    NodeMetrics& m = server_.metrics_;
    ObjectTable& table = pool_->table();
    std::vector<Version> newest;  // of rows that are older
    uint64_t stored_bytes = 0;
    for (uint32_t i = 0; i < n; ++i) {
        auto [extent, crc, key] = CommitRow::read(body, head.flags);
        std::string_view name = key.name;
        if (!body.ok() || !key.within(limits.key_bytes)) return malformed("is no COMMIT");
        RetentionHints hints;
        hints.soft_ms = key.soft_ms;
        if (!key.group.empty()) hints.group = pool_->hash(space, key.group);

        if (extent.size != 0) {
            if (!leased(extent)) return malformed("commits memory that was not leased to this client");
            // Two keys on the same bytes would be freed twice.
            if (!pool_->leases().commit(extent)) return malformed("commits the same memory twice");
        }
        uint32_t parent = key.parent.empty() ? kNoSlot : pool_->find(space, key.parent);
        bool replace = head.replaces();
        // Without `replace` a key that exists stays as it is, and a disk's copy counts as existing.
        if (!replace && only_on_ssd(space, name)) {
            pool_->leases().free(extent);
            count(m.exists_total);
            if (!one_way) Writer(out_).number(existing(head.flags, space, name));
            continue;
        }
        Hash128 hash = pool_->hash(space, name);
        std::optional<Version> version = server_.removals_.of_put(hash, key.version);
        if (!version) {
            pool_->leases().free(extent);
            newest.push_back(server_.removals_.newest_for(hash));
            if (!one_way) Writer(out_).number(PutOutcome::kOlder);
            continue;
        }
        // From now on an older put of that key comes too late.
        if (replace) server_.removals_.add(hash, key.version.value_or(kNoVersion));
        switch (table.commit(space, hash, name, extent, crc, parent, replace, hints, *version)) {
            case ObjectTable::Commit::kStored:
                count(m.stored_total);
                count(m.stored_bytes_total, extent.size);
                stored_bytes += extent.size;
                if (!one_way) Writer(out_).number(PutOutcome::kStored);
                break;
            case ObjectTable::Commit::kExists:
                pool_->leases().free(extent);
                count(m.exists_total);
                if (!one_way) Writer(out_).number(existing(head.flags, space, name));
                break;
            case ObjectTable::Commit::kNoSlot:
                pool_->leases().free(extent);
                count(m.put_refused_total);
                if (!one_way) Writer(out_).number(PutOutcome::kRefused);
                break;
        }
    }
    if (!body.done()) return malformed("is no COMMIT");
    pool_->moved(stored_bytes, now_ms());
    if (one_way) return true;
    for (Version version : newest) Writer(out_).number(version);
    finish_frame(out_, at);
    return true;
}

// What an answer to COMMIT or PUT says of an object that was there already.
PutOutcome Connection::existing(uint8_t commit_flags, uint32_t space, std::string_view name) const {
    if ((commit_flags & kCommitSizes) == 0) return PutOutcome::kExists;
    uint64_t size = 0;
    if (uint32_t slot = pool_->find(space, name); slot != kNoSlot) {
        size = pool_->table().entry(slot).size;
    } else if (server_.ssd_ != nullptr) {
        if (std::optional<ssd::Found> found = server_.ssd_->find(*pool_, space, name)) size = found->size;
    }
    return size == kManifestBytes ? PutOutcome::kExistsManifest : PutOutcome::kExists;
}

// In up to two passes. The first finds names in memory and on the disks; when a pin is wanted of what only
// a disk has, the frame is parked, and the second pass runs over the same bytes once the promotions have
// ended (resumed_), without asking the disks again.
bool Connection::on_lookup(const FrameHeader& header, Reader body) {
    Reader whole_body = body;
    LookupHead head = LookupHead::read(body);
    uint32_t space = head.space, width = head.width, n = head.names;
    if (!body.ok() || !has_space(space)) return malformed("is no LOOKUP");
    const Limits& limits = server_.options_.limits;
    if (n > limits.frame_keys) return malformed("asks for more keys than the limit");
    const bool prefix = head.prefix(), pin = head.pins();
    ObjectTable& table = pool_->table();

    found_.clear();
    found_on_ssd_.clear();
    uint32_t hits = 0;
    bool gap = false;
    bool ask_ssd = server_.ssd_ != nullptr && !(pin && resumed_);
    std::vector<std::string_view> wanted;  // from the SSD
    for (uint32_t i = 0; i < n; ++i) {
        std::string_view name = body.bytes16();
        if (!body.ok() || name.size() > limits.key_bytes) return malformed("is no LOOKUP");
        // The rest is still read, so that a malformed frame is found wherever its fault is.
        if (prefix && gap) continue;
        uint32_t slot = pool_->find(space, name);
        std::optional<ssd::Found> on_ssd;
        if (slot == kNoSlot && ask_ssd) on_ssd = server_.ssd_->find(*pool_, space, name);
        if (on_ssd) {
            if (pin) wanted.push_back(name);
            found_on_ssd_.emplace(static_cast<uint32_t>(found_.size()), std::move(*on_ssd));
        }
        bool hit = slot != kNoSlot || on_ssd;
        gap |= !hit;
        hits += hit;
        found_.push_back(slot);
    }
    if (!body.done()) return malformed("is no LOOKUP");
    if (!wanted.empty() && park(header, whole_body, space, wanted, found_)) return true;
    if (pin && !found_on_ssd_.empty()) {
        // None of them can be had: memory is full of pins, or the disks are.
        hits -= static_cast<uint32_t>(found_on_ssd_.size());
        found_on_ssd_.clear();
    }
    if (prefix) {
        // Only whole blocks, all of whose objects are here, count.
        uint32_t leading = 0;
        while (leading < found_.size() && (found_[leading] != kNoSlot || found_on_ssd_.contains(leading))) {
            ++leading;
        }
        hits = leading / width * width;
        found_.resize(hits);
    }
    // Pins beyond their share of the arena are refused as if the objects were not there; the answer says
    // that some were.
    uint32_t refused = pin && hits != 0 ? keep_within_shares(prefix, width) : 0;
    if (refused != 0) {
        hits =
            static_cast<uint32_t>(found_.size() - static_cast<size_t>(std::ranges::count(found_, kNoSlot)));
    }
    NodeMetrics& m = server_.metrics_;
    count(m.lookup_keys_total, n);
    count(m.lookup_hits_total, hits);
    count(m.pins_refused_total, refused);

    uint64_t pin_id = 0;
    if (pin && hits != 0) {
        // Limits of this connection's own bookkeeping, not of memory.
        if (pins_.size() >= limits.pins) {
            return refuse(header.request_id, Code::kTooLarge,
                          "this client already holds " + std::to_string(limits.pins) + " pins, the limit");
        }
        if (pinned_objects_ + hits > limits.pinned_objects) {
            return refuse(header.request_id, Code::kTooLarge,
                          "this client's pins would hold over " + std::to_string(limits.pinned_objects) +
                              " objects, the limit");
        }
        pinned_objects_ += hits;
        std::vector<Pinned> pinned;
        pinned.reserve(hits);
        // Deepest first, so that the root of a chain is its most recently used object.
        for (size_t i = found_.size(); i-- > 0;) {
            if (found_[i] == kNoSlot) continue;
            table.pin(found_[i]);
            if (remote_) pool_->remote_pins().add(found_[i], table.entry(found_[i]).size);
            pinned.push_back({found_[i], table.generation(found_[i])});
        }
        // Unique in the node's life: a client that names another's pin finds nothing in its own map.
        pin_id = server_.next_pin_++;
        pins_.emplace(pin_id, std::move(pinned));
    } else {
        for (size_t i = found_.size(); i-- > 0;) {
            if (found_[i] != kNoSlot) table.touch(found_[i]);
        }
    }

    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    LookupFound{pin_id, hits, refused != 0, static_cast<uint32_t>(found_.size())}.write(w);
    for (uint32_t i = 0; i < found_.size(); ++i) {
        uint32_t slot = found_[i];
        Descriptor d;
        if (slot != kNoSlot) {
            const IndexEntry& entry = table.entry(slot);
            d = Descriptor{entry.offset, entry.size, table.generation(slot), entry.crc, slot};
        } else if (auto it = found_on_ssd_.find(i); it != found_on_ssd_.end()) {
            const ssd::Found& f = it->second;
            // There, but not in memory: the client may count it as a hit, and must ask with a pin to get
            // it.
            d = Descriptor{0, f.size, f.sequence | kOnSsd, f.crc, kNoSlot};
        }
        w.number(d);
    }
    finish_frame(out_, at);
    return true;
}

bool Connection::on_release(Reader body) {
    auto pin_id = body.number<uint64_t>();
    if (!body.done()) return malformed("is no RELEASE");
    auto it = pins_.find(pin_id);
    if (it == pins_.end()) return true;  // released twice: harmless
    release(it->second);
    pinned_objects_ -= it->second.size();
    pins_.erase(it);
    return true;
}

// Remote pins are counted once more, for their share of their own.
void Connection::release(const std::vector<Pinned>& pinned) {
    for (const Pinned& p : pinned) {
        if (remote_) pool_->remote_pins().remove(p.slot, pool_->table().entry(p.slot).size);
    }
    unpin(pinned);
}

// Of what was found and is to be pinned: what would go over the share of the arena that pins may hold is as
// good as not there, so that no caller, whether it has gone silent or not, ends the caching of all others.
// The number of those.
uint32_t Connection::keep_within_shares(bool prefix, uint32_t width) {
    const ObjectTable& table = pool_->table();
    const Limits& limits = server_.options_.limits;
    auto left = [&](double share, uint64_t held) {
        auto most = static_cast<uint64_t>(share * static_cast<double>(pool_->size_now()));
        return most - std::min(most, held);
    };
    uint64_t room = left(limits.pins_share, table.counters().pinned_bytes);
    if (std::optional<uint64_t> most = pool_->limits().pins_max)
        room = std::min(room, *most - std::min(*most, table.counters().pinned_bytes));
    uint64_t remote_room =
        remote_ ? left(limits.remote_pins_share, pool_->remote_pins().bytes()) : UINT64_MAX;
    uint64_t most = 0;
    for (uint32_t slot : found_) most += slot == kNoSlot ? 0 : table.entry(slot).size;
    if (most <= std::min(room, remote_room)) return 0;
    uint32_t refused = 0;
    for (size_t i = 0; i < found_.size(); ++i) {
        uint32_t slot = found_[i];
        if (slot == kNoSlot) continue;
        uint64_t size = table.entry(slot).size;
        // What is pinned by another reader already costs no further memory.
        uint64_t adds = table.pins(slot) == 0 ? size : 0;
        uint64_t remote_adds = remote_ && !pool_->remote_pins().has(slot) ? size : 0;
        if (adds <= room && remote_adds <= remote_room) {
            room -= adds;
            remote_room -= remote_adds;
            continue;
        }
        if (prefix) {
            refused = static_cast<uint32_t>(found_.size() - i);
            found_.resize(i / width * width);
            break;
        }
        ++refused;
        found_[i] = kNoSlot;
    }
    return refused;
}

void Connection::unpin(const std::vector<Pinned>& pinned) {
    for (const Pinned& p : pinned) pool_->table().unpin(p.slot, p.generation);
}

// One way. Clients that find objects in the shared index, without a frame, tell of the use later; and of
// the bytes that they read, which the node does not see.
bool Connection::on_touch(Reader body) {
    auto served = body.number<uint64_t>();
    auto served_bytes = body.number<uint64_t>();
    auto n = body.number<uint32_t>();
    if (!body.ok() || body.left() != uint64_t{n} * sizeof(uint32_t)) return malformed("is no TOUCH");
    count(server_.metrics_.served_total, served);
    count(server_.metrics_.served_bytes_total, served_bytes);
    ObjectTable& table = pool_->table();
    for (uint32_t i = 0; i < n; ++i) {
        auto slot = body.number<uint32_t>();
        // Without the generation: a slot that has another object by now gets a use it did not have, which
        // costs nothing but order.
        if (table.committed(slot)) table.touch(slot);
    }
    return true;
}

// With generations behind the names, only exactly those copies are removed: a client that overwrites an
// object elsewhere must not remove the newer copy. With versions, copies that are older.
bool Connection::on_remove(const FrameHeader& header, Reader body) {
    Reader whole_body = body;
    auto space = body.number<uint32_t>();
    auto n = body.number<uint32_t>();
    bool ordered = (n & kRemoveVersions) != 0;
    n &= ~kRemoveVersions;
    if (!body.ok() || !has_space(space) || n > server_.options_.limits.frame_keys)
        return malformed("is no REMOVE");
    std::vector<std::string_view> names;
    for (uint32_t i = 0; i < n && body.ok(); ++i) names.push_back(body.bytes16());
    bool exact = !ordered && body.left() != 0;
    std::vector<uint64_t> generations;  // or versions
    for (uint32_t i = 0; (exact || ordered) && i < n && body.ok(); ++i)
        generations.push_back(body.number<uint64_t>());
    if (!body.done()) return malformed("is no REMOVE");
    // A manifest that only an SSD has is brought into memory first, for its bytes name the stripes. One
    // generation of it would be another one there.
    std::vector<std::string_view> manifests_on_ssd;
    for (uint32_t i = 0; server_.ssd_ != nullptr && !exact && !resumed_ && i < n; ++i) {
        if (pool_->find(space, names[i]) != kNoSlot) continue;
        std::optional<ssd::Found> found = server_.ssd_->find(*pool_, space, names[i]);
        if (found && found->size == kManifestBytes) manifests_on_ssd.push_back(names[i]);
    }
    if (!manifests_on_ssd.empty() && park(header, whole_body, space, manifests_on_ssd, {})) return true;
    // Whether this node's copy, whose slot it is if it is in memory, is another generation.
    auto another = [&](uint32_t i, uint32_t slot) {
        if (slot != kNoSlot) return pool_->table().generation(slot) != generations[i];
        auto found = server_.ssd_ == nullptr ? std::nullopt : server_.ssd_->find(*pool_, space, names[i]);
        return !found || (found->sequence | kOnSsd) != generations[i];
    };
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer(out_).number(n);
    std::vector<std::byte> manifests;
    for (uint32_t i = 0; i < n; ++i) {
        std::string_view name = names[i];
        uint32_t slot = pool_->find(space, name);
        if (ordered) server_.removals_.add(pool_->hash(space, name), generations[i]);
        bool later = ordered && slot != kNoSlot && pool_->table().version(slot) >= generations[i];
        if (later || (exact && another(i, slot))) {
            Writer(out_).number(kNotRemoved);
            continue;
        }
        bool was_there = slot != kNoSlot;
        uint8_t flag = kNotRemoved;
        if (was_there) {
            const IndexEntry& entry = pool_->table().entry(slot);
            std::span<const std::byte> bytes(pool_->data() + entry.offset, entry.size);
            // A striped object's manifest goes back to the client, which removes the stripes at their
            // nodes.
            if (may_be_manifest(bytes)) {
                manifests.insert(manifests.end(), bytes.begin(), bytes.end());
                flag = kRemovedManifest;
            }
            pool_->table().remove(slot);
        }
        if (server_.ssd_ != nullptr && ordered) {
            // A later one may be on the disk alone.
            bool on_disk = server_.ssd_->holds(*pool_, space, name);
            bool stays = server_.ssd_->forget_older(pool_->hash(space, name), generations[i]);
            was_there |= on_disk && !stays;
        } else if (server_.ssd_ != nullptr) {
            was_there |= server_.ssd_->forget(*pool_, space, name);
        }
        if (was_there) count(server_.metrics_.removed_total);
        if (was_there && flag == kNotRemoved) flag = kRemoved;
        Writer(out_).number(flag);
    }
    Writer(out_).bytes(manifests.data(), manifests.size());
    finish_frame(out_, at);
    return true;
}

// u32 space, u32 cursor, u32 limit, bytes16 prefix -> u32 next cursor (0: the end), u32 n, rows
bool Connection::on_list(const FrameHeader& header, Reader body) {
    auto space = body.number<uint32_t>();
    auto cursor = body.number<uint32_t>();
    auto limit = body.number<uint32_t>();
    std::string_view prefix = body.bytes16();
    if (!body.done() || !has_space(space)) return malformed("is no LIST");
    constexpr uint32_t kScanMax = 65536;  // slots looked at in one go: others wait meanwhile, about 1 ms
    limit = std::min<uint32_t>(limit, 4096);
    const ObjectTable& table = pool_->table();
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    size_t counts_at = out_.size();
    Writer w(out_);
    w.number(uint64_t{0});
    uint32_t n = 0;
    const uint32_t cursor_given = cursor;
    const bool in_memory = (cursor & kListOnSsd) == 0;
    // The cursor is a slot. Objects that come or go between two frames may be listed or not; none that
    // stays is missed.
    uint32_t end = in_memory ? table.slots_used() : 0;
    uint32_t stop = cursor < end ? std::min(end, cursor + kScanMax) : cursor;
    for (; cursor < stop && n < limit; ++cursor) {
        if (!table.committed(cursor) || table.entry(cursor).space != space) continue;
        std::string_view name = table.name(cursor);
        if (name.substr(0, prefix.size()) != prefix) continue;
        const IndexEntry& entry = table.entry(cursor);
        ListedObject{entry.size, table.generation(cursor), entry.crc, table.pins(cursor), name}.write(w);
        ++n;
    }
    uint32_t next = cursor < end ? cursor : 0;
    if (server_.ssd_ != nullptr && next == 0) {
        // Behind the slots of memory come those of the disks, of what memory has not.
        uint32_t at = in_memory ? 0 : cursor_given & ~kListOnSsd;
        if (n < limit && (!in_memory || cursor >= end)) {
            std::vector<ssd::Listed> rows;
            at = server_.ssd_->list(*pool_, space, at, limit - n, rows);
            for (const ssd::Listed& row : rows) {
                if (std::string_view(row.name).substr(0, prefix.size()) != prefix) continue;
                ListedObject{row.size, row.sequence | kOnSsd, row.crc, 0, row.name}.write(w);
                ++n;
            }
            next = at == 0 ? 0 : at | kListOnSsd;
        } else {
            next = kListOnSsd;
        }
    }
    uint32_t counts[2] = {next, n};
    std::memcpy(out_.data() + counts_at, counts, sizeof(counts));
    finish_frame(out_, at);
    return true;
}

bool Connection::on_stat(const FrameHeader& header) {
    std::vector<std::pair<std::string, uint64_t>> rows = server_.gauges();
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(static_cast<uint32_t>(rows.size()));
    for (auto& [name, value] : rows) {
        w.text16(name);
        w.number(value);
    }
    finish_frame(out_, at);
    return true;
}

// Unlike a LOOKUP it counts as no use: a client that only looks keeps nothing in memory.
bool Connection::on_describe(const FrameHeader& header, Reader body) {
    auto space = body.number<uint32_t>();
    auto n = body.number<uint32_t>();
    const Limits& limits = server_.options_.limits;
    if (!body.ok() || !has_space(space) || n > limits.frame_keys) return malformed("is no DESCRIBE");
    const ObjectTable& table = pool_->table();
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(n);
    for (uint32_t i = 0; i < n; ++i) {
        std::string_view name = body.bytes16();
        if (!body.ok() || name.size() > limits.key_bytes) return malformed("is no DESCRIBE");
        Description d;
        uint32_t slot = pool_->find(space, name);
        if (slot != kNoSlot) {
            const IndexEntry& entry = table.entry(slot);
            d.size = entry.size;
            d.generation = table.generation(slot);
            d.crc = entry.crc;
            d.pins = table.pins(slot);
            d.where = static_cast<uint8_t>(kInMemory | (table.saved(slot) ? kInSsd : 0));
            d.keep = static_cast<uint8_t>((table.grouped(slot) ? kInGroup : 0) |
                                          (table.soft_pinned(slot) ? kSoftPinned : 0));
        } else if (server_.ssd_ != nullptr) {
            if (std::optional<ssd::Found> found = server_.ssd_->find(*pool_, space, name)) {
                d.size = found->size;
                d.generation = found->sequence | kOnSsd;
                d.crc = found->crc;
                d.where = kInSsd;
            }
        }
        w.number(d);
    }
    if (!body.done()) return malformed("is no DESCRIBE");
    finish_frame(out_, at);
    return true;
}

}  // namespace moonpool
