#include "store/device/direct_mover.hpp"

#include <algorithm>

#include "device/stream.hpp"

namespace moonpool {

namespace {

std::vector<std::vector<StridedRow>> joined(const PartTable& table) {
    std::vector<std::vector<StridedRow>> columns(table.columns());
    for (size_t c = 0; c < table.columns(); ++c) {
        for (const StridedRow& row : table.rows(c)) {
            StridedRow* last = columns[c].empty() ? nullptr : &columns[c].back();
            if (last != nullptr && last->address + last->length == row.address &&
                last->stride == row.stride) {
                last->length += row.length;
            } else {
                columns[c].push_back(row);
            }
        }
    }
    return columns;
}

}  // namespace

bool DirectMover::fits(const PartTable& table, uint64_t row_bytes_min) {
    return std::ranges::all_of(joined(table), [&](const std::vector<StridedRow>& rows) {
        return std::ranges::all_of(rows, [&](const StridedRow& row) { return row.length >= row_bytes_min; });
    });
}

DirectMover::DirectMover(const PartTable& table) : columns_(joined(table)) {}

Status DirectMover::to_kv(const ChunkInFlight& in, std::span<const KvPlace> objects,
                          const device::Event* after) const {
    return copy(in, objects, after, Way::kToKv);
}

Status DirectMover::to_slot(const ChunkInFlight& in, std::span<const KvPlace> objects,
                            const device::Event* after) const {
    return copy(in, objects, after, Way::kToSlot);
}

Status DirectMover::copy(const ChunkInFlight& in, std::span<const KvPlace> objects,
                         const device::Event* after, Way way) const {
    std::vector<device::Copy> copies;
    for (const KvPlace& object : objects) {
        uint64_t on_host = object.host;
        for (const StridedRow& row : columns_[object.column]) {
            uint64_t in_kv = row.address + object.block * row.stride;
            copies.push_back(way == Way::kToKv ? device::Copy{in_kv, on_host, row.length}
                                               : device::Copy{on_host, in_kv, row.length});
            on_host += row.length;
        }
    }
    if (after != nullptr) {
        if (Status s = in.stream->wait_for(*after); !s) return s;
    }
    // A slot has been filled by now and stays as it is until its copies are over; whether an object of the
    // arena did is asked after them. A block has its bytes only when the stream gets there.
    return in.stream->copy(copies,
                           way == Way::kToKv ? device::SourceOrder::kAny : device::SourceOrder::kStream);
}

}  // namespace moonpool
