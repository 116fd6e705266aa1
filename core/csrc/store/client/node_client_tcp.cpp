// The half of NodeClient for a node of another host: bytes travel in READ and PUT frames, and every object
// that arrives is held against its checksum.
#include <algorithm>
#include <cstring>

#include "base/crc32c.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/node_client.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

namespace {

// How many bytes one frame brings or takes: enough that the round trip does not count, little enough that a
// node serves others between two frames of one caller.
constexpr uint64_t kFrameDataBytes = 32u << 20;
constexpr uint64_t kPutObjectMax = 3ull << 30;  // the length of a frame has 32 bits

uint32_t crc_of(std::span<const Part> parts, uint64_t size) {
    uint32_t crc = 0;
    for (const Part& part : parts) {
        uint64_t n = std::min(size, part.size);
        crc = crc32c(crc, part.data, n);
        size -= n;
    }
    return crc;
}

void write_read_head(Writer& w, const Session& s, size_t rows) {
    w.number(s.space());
    w.number(static_cast<uint32_t>(rows));
}

ReadAsk pinned_read(const Descriptor& d, uint8_t how, uint64_t from, uint64_t room) {
    return {.how = how, .from = from, .room = room, .generation = d.generation, .slot = d.slot};
}

// An object too large for one answer, piece by piece.
Status read_large(Session& s, PinnedRead& read) {
    const Descriptor& d = read.descriptor;
    for (uint64_t from = 0; from < d.size; from += kFrameDataBytes) {
        uint64_t size = std::min(kFrameDataBytes, d.size - from);
        std::vector<Part> parts = slice(read.parts, from, size);
        std::vector<ReadRow> rows;
        std::vector<uint32_t> crcs;
        auto build = [&](Writer& w) {
            write_read_head(w, s, 1);
            pinned_read(d, kReadPinned | kReadPieceFlag, from, size).write(w);
        };
        Status status = s.read(
            1, build, [&](size_t) { return std::span<const Part>(parts); }, rows, crcs);
        if (!status) return status;
        if (rows[0].bytes != size) {
            read.outcome = PinnedRead::kGone;
            return success();
        }
    }
    read.outcome = crc_of(read.parts, d.size) == d.crc ? PinnedRead::kRead : PinnedRead::kDamaged;
    return success();
}

}  // namespace

Status read_pinned(Session& s, std::span<PinnedRead> reads) {
    for (size_t begin = 0; begin < reads.size();) {
        if (reads[begin].descriptor.size > kFrameDataBytes) {
            if (Status status = read_large(s, reads[begin]); !status) return status;
            ++begin;
            continue;
        }
        size_t end = begin;
        uint64_t bytes = 0;
        FrameBudget budget(s, 16);
        while (end < reads.size() && budget.fits(ReadAsk::kPinnedBytes) &&
               bytes + reads[end].descriptor.size <= kFrameDataBytes) {
            bytes += reads[end].descriptor.size;
            budget.add(ReadAsk::kPinnedBytes);
            ++end;
        }
        std::span<PinnedRead> frame = reads.subspan(begin, end - begin);
        std::vector<ReadRow> rows;
        std::vector<uint32_t> crcs;
        auto build = [&](Writer& w) {
            write_read_head(w, s, frame.size());
            for (const PinnedRead& read : frame) {
                pinned_read(read.descriptor, kReadPinned, 0, read.descriptor.size).write(w);
            }
        };
        Status status = s.read(
            frame.size(), build, [&](size_t i) { return frame[i].parts; }, rows, crcs);
        if (!status) return status;
        for (size_t i = 0; i < frame.size(); ++i) {
            const Descriptor& d = frame[i].descriptor;
            if (rows[i].size != d.size || rows[i].generation != d.generation || rows[i].bytes != d.size) {
                frame[i].outcome = PinnedRead::kGone;
            } else {
                frame[i].outcome = crcs[i] == d.crc ? PinnedRead::kRead : PinnedRead::kDamaged;
            }
        }
        begin = end;
    }
    return success();
}

// By name, in one round trip; what is larger than one answer is pinned and read in pieces.
Result<std::vector<int64_t>> NodeClient::get_remote(Session& s, std::span<const GetItem> items,
                                                    bool tolerant) {
    std::vector<int64_t> sizes(items.size(), kMiss);
    std::vector<size_t> large;
    for (size_t begin = 0; begin < items.size();) {
        size_t end = begin;
        uint64_t bytes = 0;
        FrameBudget budget(s, 16);
        for (; end < items.size(); ++end) {
            if (Status status = check_names(s, {&items[end].name, 1}); !status) return status.error();
            uint64_t room = std::min(total(items[end].parts), kFrameDataBytes);
            uint64_t row = ReadAsk::named_bytes(items[end].name);
            if (!budget.fits(row) || (end != begin && bytes + room > kFrameDataBytes)) break;
            bytes += room;
            budget.add(row);
        }
        std::span<const GetItem> frame = items.subspan(begin, end - begin);
        std::vector<ReadRow> rows;
        std::vector<uint32_t> crcs;
        auto build = [&](Writer& w) {
            write_read_head(w, s, frame.size());
            for (const GetItem& item : frame) {
                uint64_t room = std::min(total(item.parts), kFrameDataBytes);
                ReadAsk{.room = room, .name = item.name}.write(w);
            }
        };
        Status status = s.read(
            frame.size(), build, [&](size_t i) { return frame[i].parts; }, rows, crcs);
        if (!status) return status.error();
        for (size_t i = 0; i < frame.size(); ++i) {
            if (rows[i].size == kReadMiss) continue;
            uint64_t room = total(frame[i].parts);
            if (room < rows[i].size) {
                if (!tolerant) return too_small(frame[i].name, room, rows[i].size);
                sizes[begin + i] = static_cast<int64_t>(rows[i].size);
                continue;
            }
            if (rows[i].bytes != rows[i].size) {
                large.push_back(begin + i);
            } else if (crcs[i] != rows[i].crc) {
                if (!tolerant) return corrupt(frame[i].name);
                sizes[begin + i] = kDamagedRead;
            } else {
                sizes[begin + i] = static_cast<int64_t>(rows[i].size);
            }
        }
        begin = end;
    }
    for (size_t i : large) {
        Result<Pinned> pinned = pin({&items[i].name, 1});
        if (!pinned) return pinned.error();
        size_t place = 0;
        auto got = get_pinned(*pinned, {&place, 1}, items.subspan(i, 1), true);
        if (!got && got.error().code == Code::kCorrupt && tolerant) {
            sizes[i] = kDamagedRead;
            continue;
        }
        if (!got) return got.error();
        sizes[i] = got->front();
    }
    return sizes;
}

Result<PutReport> NodeClient::put_remote(const std::shared_ptr<Session>& opened,
                                         std::span<const PutItem> items, bool replace, bool ack,
                                         int timeout_ms) {
    Session& s = *opened;
    PutReport report;
    report.outcomes.assign(items.size(), PutOutcome::kRefused);
    const bool marks = has_marks(s, items);
    auto row_bytes = [marks](const PutItem& item) { return PutObject::bytes(key_of(item), marks); };
    for (const PutItem& item : items) {
        if (Status status = check_item(s, item); !status) return status.error();
    }
    for (size_t begin = 0; begin < items.size();) {
        uint64_t size = total(items[begin].parts);
        if (size > std::min(s.object_bytes_max(), kPutObjectMax)) {
            report.refusal = "an object of " + std::to_string(size) + " bytes is over the limit of " +
                             std::to_string(std::min(s.object_bytes_max(), kPutObjectMax)) + " bytes at " +
                             s.peer() + " (node.object_share_max of the arena)";
            ++begin;
            continue;
        }
        std::vector<Part> parts;
        std::vector<uint64_t> sizes;
        std::vector<uint32_t> crcs;
        size_t end = begin;
        uint64_t bytes = 0, rows_bytes = 0;
        FrameBudget budget(s, 16);
        for (; end < items.size(); ++end) {
            size = total(items[end].parts);
            if (end != begin && bytes + size > kFrameDataBytes) break;
            if (!budget.fits(row_bytes(items[end]))) break;
            budget.add(row_bytes(items[end]));
            rows_bytes += row_bytes(items[end]);
            bytes += size;
            sizes.push_back(size);
            crcs.push_back(crc_of(items[end].parts, size));
            parts.insert(parts.end(), items[end].parts.begin(), items[end].parts.end());
        }
        auto build = [&](Writer& w) {
            PutHead{commit_head(s, replace, marks, end - begin), static_cast<uint32_t>(rows_bytes)}.write(w);
            for (size_t i = begin; i < end; ++i) {
                PutObject{sizes[i - begin], crcs[i - begin], key_of(items[i])}.write(w, marks);
            }
        };
        Session::Parse parse = [&](Reader& r) {
            return read_outcomes(r, end - begin,
                                 [&](size_t i, PutOutcome outcome) { report.outcomes[begin + i] = outcome; });
        };
        Status status = s.put(build, parts, ack ? parse : Session::Parse(), timeout_ms);
        if (!status) return status.error();
        for (size_t i = begin; i < end; ++i) {
            PutOutcome& outcome = report.outcomes[i];
            if (!ack) outcome = PutOutcome::kStored;  // as far as we know
            if (outcome == PutOutcome::kStored) report.stored_bytes += sizes[i - begin];
            if (outcome == PutOutcome::kRefused) {
                report.refusal = "the arena of " + s.peer() + " is full of pinned or leased memory";
            }
            if (outcome == PutOutcome::kDamaged) {
                report.refusal = "the bytes were damaged on their way to " + s.peer();
                outcome = PutOutcome::kRefused;
            }
        }
        begin = end;
    }
    return report;
}

void NodeClient::load_remote(Session& s, std::span<const Descriptor> descriptors,
                             std::span<const uint32_t> which, const PartTable& table,
                             std::span<const uint32_t> indices, std::span<const uint16_t> columns,
                             LoadReport& report) {
    // Not all at once: the addresses of many blocks' rows are many.
    constexpr size_t kAtOnce = 256;
    for (size_t begin = 0; begin < which.size(); begin += kAtOnce) {
        std::vector<std::vector<Part>> parts;
        std::vector<PinnedRead> reads;
        std::vector<uint32_t> place;
        parts.reserve(kAtOnce);
        for (uint32_t i : which.subspan(begin, std::min(kAtOnce, which.size() - begin))) {
            const Descriptor& d = descriptors[i];
            if (columns[i] >= table.columns() || d.size != table.object_bytes(columns[i])) {
                report.error = "a stored object has another size than this engine's blocks";
                continue;
            }
            table.parts(columns[i], indices[i], parts.emplace_back());
            reads.push_back({d, parts.back()});
            place.push_back(i);
        }
        if (Status status = read_pinned(s, reads); !status) {
            report.error = status.error().text;
            return;
        }
        for (size_t k = 0; k < reads.size(); ++k) {
            if (reads[k].outcome == PinnedRead::kRead) {
                report.ok[place[k]] = 1;
                report.bytes += reads[k].descriptor.size;
            } else {
                report.error = reads[k].outcome == PinnedRead::kGone
                                   ? "a pinned object was removed before it was loaded"
                                   : "the bytes of a stored object do not match their checksum";
            }
        }
    }
}

}  // namespace moonpool
