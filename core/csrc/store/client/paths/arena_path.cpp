#include "store/client/paths/arena_path.hpp"

#include "store/client/client_frames.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kCommitHeadBytes = 64;  // of COMMIT, before its rows

}  // namespace

ArenaPath::ArenaPath(Session& session, const ClientOptions& options)
    : session_(session), hash_(options.tenant, options.name_space, options.fingerprint, session.salt()) {}

Result<std::unique_ptr<BlockPath>> ArenaPath::open(Session& session, const ClientOptions& options) {
    SharedMemory memory;
    if (Status status = session.connect_here(options, memory); !status) return status.error();
    std::unique_ptr<ArenaPath> path(new ArenaPath(session, options));
    // Mapped writable first, for the right to make single slabs writable again; read-only from here on. The
    // descriptor of one that may only read allows no more.
    const bool writes = !session.knows(kFeatureReadOnly);
    Result<Mapping> arena = Mapping::map(memory.arena.get(), memory.arena_bytes, writes);
    if (!arena) return arena.error();
    if (writes) {
        if (Status status = arena->protect(0, memory.arena_bytes, false); !status) return status.error();
    }
    path->arena_fd_ = std::move(memory.arena);
    path->arena_ = std::move(*arena);
    Result<IndexReader> index =
        IndexReader::open(memory.index.get(), memory.index_bytes, session.incarnation());
    if (!index) return index.error();
    path->index_ = std::make_shared<const IndexReader>(std::move(*index));
    return std::unique_ptr<BlockPath>(std::move(path));
}

std::string ArenaPath::route() const { return "unix:" + session_.peer(); }

Result<NodeMemory> ArenaPath::map_memory() const {
    Result<Mapping> arena = Mapping::map(arena_fd_.get(), arena_.size(), false);
    if (!arena) return arena.error();
    return NodeMemory{std::move(*arena), index_};
}

MemoryRef ArenaPath::bytes_of(Extent extent) const {
    MemoryRef ref = MemoryRef::host(arena_.data() + extent.offset, extent.size);
    ref.kind = MemoryKind::kHostArena;
    return ref;
}

Status ArenaPath::read(std::span<NamedRead> reads, bool verify) {
    for (NamedRead& read : reads) {
        std::optional<IndexHit> hit = index_->find(session_.space(), hash_(read.name), read.name);
        read.outcome = NamedRead::kAskPin;  // it may be on the SSD, or have a name that the index leaves out
        if (!hit) continue;
        if (total(read.parts) < hit->size) {
            read.outcome = NamedRead::kTooSmall;
            read.size = hit->size;
            continue;
        }
        uint32_t crc = 0;
        Status copied = scatter(read.parts, bytes_of({hit->offset, hit->size}), verify ? &crc : nullptr);
        if (!copied) return copied;
        if (!hit->still_valid()) continue;
        read.size = hit->size;
        if (verify && crc != hit->crc) {
            read.outcome = NamedRead::kDamaged;
            continue;
        }
        read.outcome = NamedRead::kRead;
        session_.note_read(hit->slot, hit->size);
    }
    return success();
}

Status ArenaPath::read(std::span<PinnedRead> reads, PinHolder holder, bool verify) {
    for (PinnedRead& read : reads) {
        const Descriptor& d = read.descriptor;
        read.outcome = PinnedRead::kGone;
        if (d.offset > arena_.size() || d.size > arena_.size() - d.offset) continue;
        // Another process's pin may be lost by now: the entry's generation tells.
        std::optional<IndexHit> hit;
        if (holder == PinHolder::kAnotherProcess) {
            hit = index_->at(d.slot, d.generation);
            if (!hit) continue;
        }
        uint32_t crc = 0;
        Status copied = scatter(read.parts, bytes_of({d.offset, d.size}), verify ? &crc : nullptr);
        if (!copied) return copied;
        if (hit && !hit->still_valid()) continue;
        if (verify && crc != d.crc) {
            read.outcome = PinnedRead::kDamaged;
            continue;
        }
        read.outcome = PinnedRead::kRead;
        session_.note_read(d.slot, d.size);
    }
    return success();
}

Result<PutReport> ArenaPath::put(std::span<const PutItem> items, const PutHow& how) {
    PutReport report;
    report.outcomes.assign(items.size(), PutOutcome::kRefused);
    const uint8_t flags = commit_flags(session_, items, how);
    uint64_t ahead = 0;
    for (const PutItem& item : items) ahead += room_bytes(total(item.parts));
    std::vector<Written> written;
    std::shared_ptr<Slab> own;
    FrameBudget budget(session_, kCommitHeadBytes);
    auto commit_written = [&] {
        budget.reset();
        return commit(items, how, written, report);
    };
    for (size_t i = 0; i < items.size(); ++i) {
        const PutItem& item = items[i];
        uint64_t size = total(item.parts);
        ahead -= room_bytes(size);
        if (!how.replace) {
            // Already there: nothing to copy. The node has the last word on what is not in the index.
            if (std::optional<IndexHit> hit = index_->find(session_.space(), hash_(item.name), item.name)) {
                report.outcomes[i] = PutOutcome::kExists;
                if (hit->size == kManifestBytes) report.manifest_sized.push_back(i);
                continue;
            }
        }
        uint64_t row_bytes = CommitRow::bytes(key_of(item, how), flags);
        if (!budget.fits(row_bytes)) {
            if (Status status = commit_written(); !status) return status.error();
        }
        std::string why;
        Result<Room> room = reserve(size, ahead, own, why, how.timeout_ms);
        if (room && room->slab == nullptr && size != 0 && !written.empty()) {
            // What this call has written so far cannot be evicted before it is committed.
            if (Status status = commit_written(); !status) return status.error();
            why.clear();
            room = reserve(size, 0, own, why, how.timeout_ms);
        }
        if (!room) return room.error();
        if (room->slab == nullptr && size != 0) {
            report.refusal = why;
            continue;
        }
        uint32_t crc = 0;
        if (size != 0) {
            Status copied = gather(bytes_of(room->extent), item.parts, &crc);
            if (!copied) return copied.error();
        }
        written.push_back({i, std::move(*room), crc});
        budget.add(row_bytes);
    }
    if (Status status = commit_written(); !status) return status.error();
    return report;
}

Status ArenaPath::commit(std::span<const PutItem> items, const PutHow& how, std::vector<Written>& written,
                         PutReport& report) {
    if (written.empty()) return success();
    const uint8_t flags = commit_flags(session_, items, how);
    auto build = [&](Writer& w) {
        commit_head(session_, flags, written.size()).write(w);
        for (const Written& x : written) {
            CommitRow{x.room.extent, x.crc, key_of(items[x.item], how)}.write(w, flags);
        }
    };
    Status status = success();
    if (how.ack || session_.behind()) {
        auto parse = [&](Reader& r) {
            return read_outcomes(r, written.size(), [&](size_t i, PutOutcome outcome, Version newest) {
                if (take_manifest_sized(outcome)) report.manifest_sized.push_back(written[i].item);
                report.outcomes[written[i].item] = outcome;
                if (outcome == PutOutcome::kOlder) report.older.emplace_back(written[i].item, newest);
            });
        };
        status = session_.call(Kind::kCommit, build, parse, how.timeout_ms);
    } else {
        status = session_.send(Kind::kCommit, build);
        for (Written& x : written) report.outcomes[x.item] = PutOutcome::kStored;  // as far as is known
    }
    // From the last to the first: a slab's room is given back from its end.
    for (size_t i = written.size(); i-- > 0;) {
        Written& x = written[i];
        PutOutcome outcome = report.outcomes[x.item];
        if (outcome == PutOutcome::kStored) report.stored_bytes += x.room.extent.size;
        if (outcome == PutOutcome::kRefused) {
            report.refusal = "the node's object table is full of pinned objects";
        }
        if (status && outcome != PutOutcome::kStored) unreserve(x.room);
    }
    written.clear();
    return status;
}

}  // namespace moonpool
