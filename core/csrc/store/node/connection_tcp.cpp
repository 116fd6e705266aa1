// The half of Connection for callers of other hosts, which map no memory: PUT brings the bytes of objects,
// READ takes them away. Both move straight between socket and arena, on the node's loop, a turn at a time.
//
// PUT: begin_put() checks head and rows and finds memory for what is wanted; the bytes then go from the
// socket to their place in the arena, with the checksum computed on the way (PutSink); finish_put() makes
// visible what arrived whole. Bytes of objects that are refused or known already are read and dropped,
// since the client has sent them behind the head. READ: the answer's head stands in the queue of frames,
// the bytes follow from the arena, each piece under a pin until the socket has taken it.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/node/connection.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

namespace {

// To cache lines: objects of one lease share none, and copies begin aligned.
uint64_t aligned(uint64_t size) {
    constexpr uint64_t kLine = 64;
    return (size + kLine - 1) / kLine * kLine;
}

}  // namespace

// The head and the rows; the bytes of the objects are taken as they come.
Connection::Begun Connection::begin_put(const FrameHeader& header) {
    constexpr size_t kHead = PutHead::kBytes;
    const Limits& limits = server_.options_.limits;
    auto bad = [this](const char* what) {
        malformed(what);
        return Begun::kEnded;
    };
    if (header.length < kHead) return bad("is no PUT");
    std::span<const std::byte> here = in_.waiting().subspan(sizeof(header));
    if (here.size() < kHead) return Begun::kNotYet;
    Reader begin(here.first(kHead));
    auto [head, rows_bytes] = PutHead::read(begin);
    uint32_t space = head.space, n = head.rows;
    if (!has_space(space) || n > limits.frame_keys || rows_bytes > limits.frame_bytes ||
        rows_bytes > header.length - kHead) {
        return bad("is no PUT");
    }
    // The frame reader keeps the bytes; this function begins anew when more have come.
    if (here.size() < kHead + rows_bytes) return Begun::kNotYet;

    auto put = std::make_unique<PutSink>();
    put->request_id = header.request_id;
    put->one_way = (header.flags & kFlagOneWay) != 0;
    put->replace = head.replaces();
    put->flags = head.flags;
    put->space = space;
    Reader rows(here.subspan(kHead, rows_bytes));
    uint64_t left = header.length - kHead - rows_bytes;
    for (uint32_t i = 0; i < n && rows.ok(); ++i) {
        PutObject object = PutObject::read(rows, head.flags);
        if (object.size > left || !object.key.within(limits.key_bytes)) return bad("is no PUT");
        PutRow row;
        row.size = object.size;
        row.crc = object.crc;
        row.name = object.key.name;
        row.parent = object.key.parent;
        row.hints.soft_ms = object.key.soft_ms;
        row.version = object.key.version;
        if (!object.key.group.empty()) row.hints.group = pool_->hash(space, object.key.group);
        left -= row.size;
        put->rows.push_back(std::move(row));
    }
    if (!rows.done() || left != 0) return bad("is no PUT");
    in_.take(sizeof(header) + kHead + rows_bytes);
    make_room(*put);
    put_ = std::move(put);
    return Begun::kYes;
}

// One lease for all that is not here yet, or else one for each object: what finds none is refused.
bool Connection::make_room(PutSink& put) {
    uint64_t all = 0;
    const bool over_rate = pool_->is_over_rate(now_ms());
    for (PutRow& row : put.rows) {
        bool here =
            !put.replace && (pool_->find(put.space, row.name) != kNoSlot || only_on_ssd(put.space, row.name));
        if (here) {
            row.outcome = PutOutcome::kExists;
        } else if (over_rate) {
            row.outcome = PutOutcome::kRefused;
            pool_->count_over_rate(1);
        } else if (row.size > pool_->object_bytes_max()) {
            row.outcome = PutOutcome::kRefused;
        } else {
            all += aligned(row.size);
        }
    }
    auto lease = [&](uint64_t bytes) -> std::optional<Extent> {
        // The same bound as for a LEASE of this host.
        if (!pool_->may_lease(leased_bytes_, bytes)) return std::nullopt;
        std::optional<Extent> extent = pool_->lease(bytes, bytes);
        if (!extent) return std::nullopt;
        leased_bytes_ += extent->size;
        leases_.emplace(extent->offset, *extent);
        put.leases.push_back(extent->offset);
        return extent;
    };
    // The guard cannot fail as long as the sum above is right; it keeps a mistake there from writing over a
    // neighbour.
    auto place = [&](PutRow& row, uint64_t offset, const Extent& within) {
        if (offset + row.size > within.end()) {
            row.outcome = PutOutcome::kRefused;
            return;
        }
        row.extent = Extent{offset, row.size};
        row.to = pool_->writable() + offset;
    };
    if (all != 0 && all <= pool_->object_bytes_max()) {
        if (std::optional<Extent> extent = lease(all)) {
            uint64_t offset = extent->offset;
            for (PutRow& row : put.rows) {
                if (row.outcome != PutOutcome::kStored || row.size == 0) continue;
                place(row, offset, *extent);
                offset += aligned(row.size);
            }
            return true;
        }
    }
    for (PutRow& row : put.rows) {
        if (row.outcome != PutOutcome::kStored || row.size == 0) continue;
        if (std::optional<Extent> extent = lease(row.size)) {
            place(row, extent->offset, *extent);
        } else {
            row.outcome = PutOutcome::kRefused;
        }
    }
    return true;
}

// received: what arrived, `most` bytes at most; if anything, there may be more.
bool Connection::receive_put(uint64_t most, uint64_t& received) {
    iovec parts[32];
    size_t n_parts = put_->targets(parts, 32);
    for (size_t i = 0; i < n_parts; ++i) {
        parts[i].iov_len = std::min<uint64_t>(parts[i].iov_len, most);
        most -= parts[i].iov_len;
        if (most == 0) n_parts = i + 1;
    }
    if (n_parts != 0) {
        ssize_t n = tls_ != nullptr ? tls_->receive(fd_.get(), parts, n_parts)
                                    : ::readv(fd_.get(), parts, static_cast<int>(n_parts));
        if (n == 0) return false;
        if (n < 0) {
            if (errno == EINTR) return true;
            return errno == EAGAIN;
        }
        received = static_cast<uint64_t>(n);
        put_->advance(static_cast<uint64_t>(n));
        count(server_.metrics_.tcp_received_bytes_total, static_cast<uint64_t>(n));
    }
    if (!put_->complete()) return true;
    // serve() sends the answer.
    return finish_put() && serve();
}

bool Connection::finish_put() {
    std::unique_ptr<PutSink> put = std::move(put_);
    NodeMetrics& m = server_.metrics_;
    // While the bytes arrived, and for the memory they went to, others were stored, evicted and removed: what
    // was true of a key when the frame began is asked anew.
    auto here = [&](const PutRow& row) {
        return pool_->find(put->space, row.name) != kNoSlot || only_on_ssd(put->space, row.name);
    };
    uint64_t stored_bytes = 0;
    for (PutRow& row : put->rows) {
        if (row.outcome == PutOutcome::kStored) row.outcome = store(*put, row);
        if (row.outcome == PutOutcome::kStored) stored_bytes += row.size;
    }
    pool_->moved(stored_bytes, now_ms());
    for (PutRow& row : put->rows) {
        // Its bytes are gone, and so is what made them needless.
        if (row.outcome == PutOutcome::kExists && !here(row)) row.outcome = PutOutcome::kRefused;
        if (row.outcome == PutOutcome::kExists) count(m.exists_total);
        if (row.outcome == PutOutcome::kRefused) count(m.put_refused_total);
    }
    if (!put->one_way) {
        size_t at = begin_frame(out_, Kind::kPut, kFlagAnswer, put->request_id);
        Writer w(out_);
        w.number(static_cast<uint32_t>(put->rows.size()));
        for (const PutRow& row : put->rows) {
            bool exists = row.outcome == PutOutcome::kExists;
            w.number(exists ? existing(put->flags, put->space, row.name) : row.outcome);
        }
        for (const PutRow& row : put->rows) {
            if (row.outcome == PutOutcome::kOlder)
                w.number(server_.removals_.newest_for(pool_->hash(put->space, row.name)));
        }
        finish_frame(out_, at);
        whole_answers_ = out_.size();
    }
    put_ = std::move(put);
    close_put();
    return true;
}

// An object whose bytes are here now.
PutOutcome Connection::store(const PutSink& put, const PutRow& row) {
    NodeMetrics& m = server_.metrics_;
    ObjectTable& table = pool_->table();
    if (row.crc_here != row.crc) {
        count(m.tcp_damaged_total);
        return PutOutcome::kDamaged;
    }
    // Memory and disk never hold different bytes of one key.
    if (!put.replace && only_on_ssd(put.space, row.name)) return PutOutcome::kExists;
    Hash128 hash = pool_->hash(put.space, row.name);
    std::optional<Version> version = server_.removals_.of_put(hash, row.version);
    if (!version) return PutOutcome::kOlder;
    if (row.size != 0 && !pool_->leases().commit(row.extent)) return PutOutcome::kRefused;
    if (put.replace) server_.removals_.add(hash, row.version.value_or(kNoVersion));
    uint32_t parent = row.parent.empty() ? kNoSlot : pool_->find(put.space, row.parent);
    switch (table.commit(put.space, hash, row.name, row.extent, row.crc, parent, put.replace, row.hints,
                         *version)) {
        case ObjectTable::Commit::kStored:
            count(m.stored_total);
            count(m.stored_bytes_total, row.size);
            // Its bytes were verified on the way in.
            table.set_scrubbed(pool_->find(put.space, row.name));
            return PutOutcome::kStored;
        case ObjectTable::Commit::kExists:
            pool_->leases().free(row.extent);
            return PutOutcome::kExists;
        case ObjectTable::Commit::kNoSlot:
            pool_->leases().free(row.extent);
            return PutOutcome::kRefused;
    }
    return PutOutcome::kRefused;
}

// Leases of a PUT live as long as it: what was committed is the table's, the rest is free again.
void Connection::close_put() {
    for (uint64_t offset : put_->leases) {
        auto it = leases_.find(offset);
        pool_->leases().close(offset);
        leased_bytes_ -= it->second.size;
        leases_.erase(it);
    }
    put_.reset();
}

bool Connection::on_read(const FrameHeader& header, Reader body) {
    Reader whole_body = body;
    if (!remote_) {
        return refuse(header.request_id, Code::kInvalidArgument,
                      "processes of the node's own host read its memory; READ is for TCP");
    }
    auto space = body.number<uint32_t>();
    auto n = body.number<uint32_t>();
    if (!body.ok() || !has_space(space) || n > server_.options_.limits.frame_keys) {
        return malformed("is no READ");
    }
    struct Wanted {
        uint32_t slot;
        uint64_t from, bytes;
    };
    std::vector<Wanted> wanted;
    wanted.reserve(n);
    std::vector<std::string_view> on_ssd;
    std::vector<uint32_t> here;
    ObjectTable& table = pool_->table();
    uint64_t total = 0;
    // A tenant over its rate finds nothing, as with pins over their share; but it finds manifests, by which
    // clients tell whether an object is whole, and the rest of what it has begun to read.
    const bool over_rate = pool_->is_over_rate(now_ms());
    for (uint32_t i = 0; i < n; ++i) {
        ReadAsk ask = ReadAsk::read(body);
        if (!body.ok()) break;
        uint64_t from = ask.from;
        uint32_t slot = kNoSlot;
        // By name: the present object. By slot and generation: the one that the caller has pinned, even if
        // it is replaced by now; and only within a space that the caller has opened.
        if (!ask.pinned()) {
            slot = pool_->find(space, ask.name);
            if (slot == kNoSlot && !resumed_ && only_on_ssd(space, ask.name)) on_ssd.push_back(ask.name);
        } else if (table.readable(ask.slot, ask.generation) && table.entry(ask.slot).space == space) {
            slot = ask.slot;
        }
        if (over_rate && slot != kNoSlot && from == 0 && table.entry(slot).size > kManifestBytes) {
            slot = kNoSlot;
            pool_->count_over_rate(1);
        }
        here.push_back(slot);
        Wanted w{slot, from, 0};
        if (slot != kNoSlot) {
            uint64_t size = table.entry(slot).size;
            w.bytes = from > size ? 0 : std::min(ask.room, size - from);
            // A caller that wants whole objects and has too little room gets the size alone, and asks
            // again.
            if ((ask.how & kReadPieceFlag) == 0 && w.bytes != size) w.bytes = 0;
            if (w.bytes > kReadBytesMax - total) w.bytes = 0;
            total += w.bytes;
        }
        wanted.push_back(w);
    }
    if (!body.done()) return malformed("is no READ");
    if (!on_ssd.empty() && park(header, whole_body, space, on_ssd, here)) return true;
    pool_->moved(total, now_ms());
    NodeMetrics& m = server_.metrics_;
    count(m.lookup_keys_total, n);
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(n);
    for (const Wanted& row : wanted) {
        if (row.slot == kNoSlot) {
            w.number(ReadRow{.size = kReadMiss});
            continue;
        }
        const IndexEntry& entry = table.entry(row.slot);
        w.number(ReadRow{entry.size, row.bytes, table.generation(row.slot), entry.crc, row.slot});
        count(m.lookup_hits_total);
    }
    finish_frame(out_, at);
    auto length = static_cast<uint32_t>(out_.size() - at - sizeof(FrameHeader) + total);
    // The frame's length covers the bytes that follow it from the arena, which are never copied into out_.
    std::memcpy(out_.data() + at + offsetof(FrameHeader, length), &length, sizeof(length));
    // Deepest first, so that the root of a chain is its most recently used object.
    for (size_t i = wanted.size(); i-- > 0;) {
        if (wanted[i].slot != kNoSlot && table.committed(wanted[i].slot)) table.touch(wanted[i].slot);
    }
    for (const Wanted& row : wanted) {
        if (row.bytes == 0) continue;
        // Whatever was computed above: no byte leaves that is not the object's.
        const IndexEntry& entry = table.entry(row.slot);
        if (row.from > entry.size || row.bytes > entry.size - row.from ||
            entry.offset > pool_->arena_bytes() || entry.size > pool_->arena_bytes() - entry.offset) {
            return false;
        }
        table.pin(row.slot);
        queue_.add(pool_->data() + entry.offset + row.from, row.bytes, row.slot, table.generation(row.slot));
        count(m.served_total);
        count(m.served_bytes_total, row.bytes);
        count(m.tcp_sent_bytes_total, row.bytes);
    }
    return true;
}

}  // namespace moonpool
