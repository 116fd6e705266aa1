// The path to a node of another host: cuts reads and puts into frames, and judges what came by its
// checksum.
//
// Threads: the callers'; the session lets one frame at a time to the socket, so a large call does not hold
// it from its first byte to its last.
//
// What holds: a READ never asks for more bytes than its caller has room for, and a frame carries at most
// kFrameDataBytes, or one object. An outcome of kRead means that the checksum of the bytes where they lie
// now is the object's, as the node committed it. The checksums of bytes that arrive are made by the
// session, through the copier of the destination; those of bytes that leave are made here, before the
// frame is built, since the frame begins with them.
#include "store/client/paths/tcp_path.hpp"

#include <algorithm>
#include <vector>

#include "memory/copier.hpp"
#include "store/client/client_frames.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

namespace {

// How many bytes one frame brings or takes: enough that the round trip does not count, little enough that a
// node serves others between two frames of one caller.
constexpr uint64_t kFrameDataBytes = 32u << 20;
constexpr uint64_t kPutObjectMax = 3ull << 30;  // the length of a frame has 32 bits
constexpr uint64_t kVerbHeadBytes = 16;         // of READ and PUT, before their rows

void write_read_head(Writer& w, const Session& s, size_t rows) {
    w.number(s.space());
    w.number(static_cast<uint32_t>(rows));
}

ReadAsk pinned_read(const Descriptor& d, uint8_t how, uint64_t from, uint64_t room) {
    return {.how = how, .from = from, .room = room, .generation = d.generation, .slot = d.slot};
}

uint64_t room_of(const NamedRead& read) { return std::min(total(read.parts), kFrameDataBytes); }

}  // namespace

Result<std::unique_ptr<BlockPath>> TcpPath::open(Session& session, const ClientOptions& options) {
    if (Status status = session.connect_remote(options); !status) return status.error();
    return std::unique_ptr<BlockPath>(new TcpPath(session));
}

std::string TcpPath::route() const { return "tcp:" + session_.peer(); }

// An object too large for one answer, piece by piece; each continues the checksum of the one before.
Status TcpPath::read_large(PinnedRead& read) {
    const Descriptor& d = read.descriptor;
    std::vector<uint32_t> crcs(1, 0);
    for (uint64_t from = 0; from < d.size; from += kFrameDataBytes) {
        uint64_t size = std::min(kFrameDataBytes, d.size - from);
        std::vector<MemoryRef> parts = slice(read.parts, from, size);
        std::vector<ReadRow> rows;
        auto build = [&](Writer& w) {
            write_read_head(w, session_, 1);
            pinned_read(d, kReadPinned | kReadPieceFlag, from, size).write(w);
        };
        auto target = [&](size_t) { return std::span<const MemoryRef>(parts); };
        if (Status status = session_.read(1, build, target, rows, crcs); !status) return status;
        // The object was removed or replaced while its pieces were read. A pin of this process keeps it;
        // one of another process may be lost.
        if (rows[0].bytes != size) {
            read.outcome = PinnedRead::kGone;
            return success();
        }
    }
    read.outcome = crcs[0] == d.crc ? PinnedRead::kRead : PinnedRead::kDamaged;
    return success();
}

Status TcpPath::read_frame(std::span<PinnedRead> reads) {
    std::vector<ReadRow> rows;
    std::vector<uint32_t> crcs;
    auto build = [&](Writer& w) {
        write_read_head(w, session_, reads.size());
        for (const PinnedRead& read : reads) {
            pinned_read(read.descriptor, kReadPinned, 0, read.descriptor.size).write(w);
        }
    };
    auto target = [&](size_t i) { return reads[i].parts; };
    if (Status status = session_.read(reads.size(), build, target, rows, crcs); !status) return status;
    for (size_t i = 0; i < reads.size(); ++i) {
        const Descriptor& d = reads[i].descriptor;
        // The node found another object under that slot: the pin is lost.
        if (rows[i].size != d.size || rows[i].generation != d.generation || rows[i].bytes != d.size) {
            reads[i].outcome = PinnedRead::kGone;
        } else {
            reads[i].outcome = crcs[i] == d.crc ? PinnedRead::kRead : PinnedRead::kDamaged;
        }
    }
    return success();
}

// The node checks the pin itself, whichever process holds it.
Status TcpPath::read(std::span<PinnedRead> reads, PinHolder, bool) {
    for (size_t begin = 0; begin < reads.size();) {
        if (reads[begin].descriptor.size > kFrameDataBytes) {
            if (Status status = read_large(reads[begin]); !status) return status;
            ++begin;
            continue;
        }
        size_t end = begin;
        uint64_t bytes = 0;
        FrameBudget budget(session_, kVerbHeadBytes);
        while (end < reads.size() && budget.fits(ReadAsk::kPinnedBytes) &&
               bytes + reads[end].descriptor.size <= kFrameDataBytes) {
            bytes += reads[end].descriptor.size;
            budget.add(ReadAsk::kPinnedBytes);
            ++end;
        }
        if (Status status = read_frame(reads.subspan(begin, end - begin)); !status) return status;
        begin = end;
    }
    return success();
}

Status TcpPath::read_frame(std::span<NamedRead> reads) {
    std::vector<ReadRow> rows;
    std::vector<uint32_t> crcs;
    auto build = [&](Writer& w) {
        write_read_head(w, session_, reads.size());
        for (const NamedRead& read : reads) ReadAsk{.room = room_of(read), .name = read.name}.write(w);
    };
    auto target = [&](size_t i) { return reads[i].parts; };
    if (Status status = session_.read(reads.size(), build, target, rows, crcs); !status) return status;
    for (size_t i = 0; i < reads.size(); ++i) {
        NamedRead& read = reads[i];
        read.outcome = NamedRead::kMiss;
        if (rows[i].size == kReadMiss) continue;
        read.size = rows[i].size;
        if (total(read.parts) < read.size) {
            read.outcome = NamedRead::kTooSmall;
        } else if (rows[i].bytes != read.size) {
            read.outcome = NamedRead::kAskPin;  // too large for one answer
        } else {
            read.outcome = crcs[i] == rows[i].crc ? NamedRead::kRead : NamedRead::kDamaged;
        }
    }
    return success();
}

Status TcpPath::read(std::span<NamedRead> reads, bool) {
    for (size_t begin = 0; begin < reads.size();) {
        size_t end = begin;
        uint64_t bytes = 0;
        FrameBudget budget(session_, kVerbHeadBytes);
        for (; end < reads.size(); ++end) {
            uint64_t room = room_of(reads[end]);
            uint64_t row = ReadAsk::named_bytes(reads[end].name);
            if (!budget.fits(row) || (end != begin && bytes + room > kFrameDataBytes)) break;
            bytes += room;
            budget.add(row);
        }
        if (Status status = read_frame(reads.subspan(begin, end - begin)); !status) return status;
        begin = end;
    }
    return success();
}

Result<PutReport> TcpPath::put(std::span<const PutItem> items, const PutHow& how) {
    PutReport report;
    report.outcomes.assign(items.size(), PutOutcome::kRefused);
    const uint8_t flags = commit_flags(session_, items, how);
    const uint64_t object_max = std::min(session_.object_bytes_max(), kPutObjectMax);
    auto row_bytes = [&](const PutItem& item) { return PutObject::bytes(key_of(item, how), flags); };
    for (size_t begin = 0; begin < items.size();) {
        uint64_t size = total(items[begin].parts);
        if (size > object_max) {
            report.refusal = "an object of " + std::to_string(size) + " bytes is over the limit of " +
                             std::to_string(object_max) + " bytes at " + session_.peer() +
                             " (node.object_share_max of the arena)";
            ++begin;
            continue;
        }
        std::vector<MemoryRef> parts;
        std::vector<uint64_t> sizes;
        std::vector<uint32_t> crcs;
        size_t end = begin;
        uint64_t bytes = 0, rows_bytes = 0;
        FrameBudget budget(session_, kVerbHeadBytes);
        for (; end < items.size(); ++end) {
            size = total(items[end].parts);
            if (end != begin && bytes + size > kFrameDataBytes) break;
            if (!budget.fits(row_bytes(items[end]))) break;
            Result<uint32_t> crc = checksum(items[end].parts, size);
            if (!crc) return crc.error();
            budget.add(row_bytes(items[end]));
            rows_bytes += row_bytes(items[end]);
            bytes += size;
            sizes.push_back(size);
            crcs.push_back(*crc);
            parts.insert(parts.end(), items[end].parts.begin(), items[end].parts.end());
        }
        auto build = [&](Writer& w) {
            CommitHead head = commit_head(session_, flags, end - begin);
            PutHead{head, static_cast<uint32_t>(rows_bytes)}.write(w);
            for (size_t i = begin; i < end; ++i) {
                PutObject{sizes[i - begin], crcs[i - begin], key_of(items[i], how)}.write(w, flags);
            }
        };
        Session::Parse parse = [&](Reader& r) {
            return read_outcomes(r, end - begin, [&](size_t i, PutOutcome outcome, Version newest) {
                if (take_manifest_sized(outcome)) report.manifest_sized.push_back(begin + i);
                report.outcomes[begin + i] = outcome;
                if (outcome == PutOutcome::kOlder) report.older.emplace_back(begin + i, newest);
            });
        };
        Status status = session_.put(build, parts, how.ack ? parse : Session::Parse(), how.timeout_ms);
        if (!status) return status.error();
        for (size_t i = begin; i < end; ++i) {
            PutOutcome& outcome = report.outcomes[i];
            if (!how.ack) outcome = PutOutcome::kStored;  // as far as is known
            if (outcome == PutOutcome::kStored) report.stored_bytes += sizes[i - begin];
            if (outcome == PutOutcome::kRefused) {
                report.refusal = "the arena of " + session_.peer() +
                                 " is full of pinned or leased memory, or the tenant has moved more than its "
                                 "bytes_per_s there";
            }
            // The node compares what arrived with the checksum above: the source may have changed in
            // between, or the network has.
            if (outcome == PutOutcome::kDamaged) {
                report.refusal = "the bytes were damaged on their way to " + session_.peer();
                outcome = PutOutcome::kRefused;
            }
        }
        begin = end;
    }
    return report;
}

}  // namespace moonpool
