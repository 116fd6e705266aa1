#include "store/device/load_job.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace moonpool {

Status LoadJob::begin(ChunkInFlight& in) {
    const size_t begin = in.chunk.begin(), n = in.chunk.size();
    in.packing = kv_.pack(load_.columns.subspan(begin, n));
    std::vector<size_t> missing;
    for (size_t i = 0; i < n; ++i) {
        const Descriptor& handed = load_.descriptors[begin + i];
        // One of another size than the KV cache's is not for it; Client::load says so.
        if (arena_ != nullptr && handed.size == kv_.object_bytes(load_.columns[begin + i])) {
            in_arena_[begin + i] = arena_->begin(load_.holders, handed);
        }
        if (!in_arena_[begin + i]) missing.push_back(i);
    }
    std::vector<uint8_t> in_slot(n, 0);
    if (!missing.empty()) in_slot = fill_slot(in, missing);

    std::vector<KvPlace> there;
    {
        MutexLock lock(mutex_);
        for (size_t i = 0; i < n; ++i) {
            const std::optional<OwnArena::Read>& read = in_arena_[begin + i];
            if (!read && in_slot[i] == 0) continue;
            has(begin + i);
            const uint32_t offset = in.packing.offsets[i];
            there.push_back({offset, load_.blocks[begin + i], load_.columns[begin + i],
                             read ? arena_->address(*read) : in.slot.address() + offset});
        }
    }
    if (there.empty()) return success();
    in.slot.used_on(*in.stream);
    return kv_.mover().to_kv(in, there, load_.after.get());
}

std::vector<uint8_t> LoadJob::fill_slot(const ChunkInFlight& in, std::span<const size_t> which) {
    std::vector<Descriptor> descriptors;
    std::vector<uint16_t> columns;
    std::vector<uint32_t> places;
    for (size_t i : which) {
        descriptors.push_back(load_.descriptors[in.chunk.begin() + i]);
        columns.push_back(load_.columns[in.chunk.begin() + i]);
        places.push_back(static_cast<uint32_t>(kv_.ring_offset(in.slot)) + in.packing.offsets[i]);
    }
    LoadReport read =
        client_.load(load_.holders, descriptors, kv_.ring_table(), places, columns, load_.verify);
    if (!read.error.empty()) {
        MutexLock lock(mutex_);
        report_.error = std::move(read.error);
    }
    std::vector<uint8_t> there(in.chunk.size(), 0);
    for (size_t k = 0; k < which.size(); ++k) there[which[k]] = read.ok[k];
    return there;
}

void LoadJob::end(ChunkInFlight in, const Status& status) {
    const size_t begin = in.chunk.begin(), end = begin + in.chunk.size();
    auto read_there = [](const std::optional<OwnArena::Read>& read) { return read.has_value(); };
    if (!status && status.error().code == Code::kTimeout &&
        std::any_of(in_arena_.begin() + static_cast<ptrdiff_t>(begin),
                    in_arena_.begin() + static_cast<ptrdiff_t>(end), read_there)) {
        arena_->leak();  // the card may still read it
    }
    MutexLock lock(mutex_);
    for (size_t i = begin; i < end; ++i) {
        if (!status) {
            failed(i, status.error().text);
        } else if (in_arena_[i] && !OwnArena::end(*in_arena_[i])) {
            failed(i, "a pinned object was removed while a card loaded it");
        }
    }
}

void LoadJob::has(size_t object) {
    report_.ok[object] = 1;
    report_.bytes += load_.descriptors[object].size;
}

void LoadJob::failed(size_t object, const std::string& why) {
    if (report_.ok[object] != 0) report_.bytes -= load_.descriptors[object].size;
    report_.ok[object] = 0;
    report_.error = why;
}

LoadReport LoadJob::wait() {
    wait_for_all();
    LoadReport report = take_report();
    if (arena_ != nullptr) {
        std::vector<OwnArena::Read> reads;
        for (size_t i = 0; i < in_arena_.size(); ++i) {
            if (in_arena_[i] && report.ok[i] != 0) reads.push_back(*in_arena_[i]);
        }
        arena_->note_reads(client_, reads);
    }
    return report;
}

LoadReport LoadJob::take_report() {
    MutexLock lock(mutex_);
    return std::move(report_);
}

}  // namespace moonpool
