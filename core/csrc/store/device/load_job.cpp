#include "store/device/load_job.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace moonpool {

Status LoadJob::begin(ChunkInFlight& in) {
    size_t begin = in.chunk.begin(), n = in.chunk.size();
    std::span columns = load_.columns.subspan(begin, n);
    const Packing& packing = in.packing = kv_.pack(columns);
    std::vector<uint32_t> places(packing.offsets);
    for (uint32_t& place : places) place += static_cast<uint32_t>(kv_.ring_offset(in.slot));
    LoadReport read = client_.load(load_.holders, load_.descriptors.subspan(begin, n), kv_.ring_table(),
                                   places, columns, load_.verify);

    std::vector<KvPlace> there;
    for (size_t i = 0; i < n; ++i) {
        if (read.ok[i] != 0) there.push_back({packing.offsets[i], load_.blocks[begin + i], columns[i]});
    }
    {
        MutexLock lock(mutex_);
        std::ranges::copy(read.ok, report_.ok.begin() + static_cast<ptrdiff_t>(begin));
        report_.bytes += read.bytes;
        if (!read.error.empty()) report_.error = std::move(read.error);
    }
    if (there.empty()) return success();
    in.slot.used_on(*in.stream);
    return kv_.mover().to_kv(in, there, load_.after.get());
}

void LoadJob::end(ChunkInFlight in, const Status& status) {
    if (status) return;
    MutexLock lock(mutex_);
    for (size_t i = in.chunk.begin(); i < in.chunk.begin() + in.chunk.size(); ++i) {
        if (report_.ok[i] != 0) report_.bytes -= load_.descriptors[i].size;
        report_.ok[i] = 0;
    }
    report_.error = status.error().text;
}

LoadReport LoadJob::wait() {
    wait_for_all();
    MutexLock lock(mutex_);
    return std::move(report_);
}

}  // namespace moonpool
