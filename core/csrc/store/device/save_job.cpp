#include "store/device/save_job.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace moonpool {

void SaveJob::expect(size_t chunks) {
    unstaged_ = chunks;
    if (chunks != 0) return;
    calls_.staged();
    over();
}

Status SaveJob::begin(ChunkInFlight& in) {
    size_t begin = in.chunk.begin(), n = in.chunk.size();
    const Packing& packing = in.packing = kv_.pack(save_.columns.subspan(begin, n));
    std::vector<KvPlace> objects(n);
    for (size_t i = 0; i < n; ++i) {
        objects[i] = {packing.offsets[i], save_.blocks[begin + i], save_.columns[begin + i],
                      in.slot.address() + packing.offsets[i]};
    }
    in.slot.used_on(*in.stream);
    return kv_.mover().to_slot(in, objects, save_.after.get());
}

void SaveJob::end(ChunkInFlight in, const Status& status) {
    if (--unstaged_ == 0) calls_.staged();
    if (!status) return refuse(status.error().text);
    puts_.push(shared_from_this(), std::move(in));
}

void SaveJob::refuse(const std::string& why) {
    MutexLock lock(mutex_);
    report_.refusal = why;
}

void SaveJob::put(const ChunkInFlight& in, size_t thread) {
    size_t begin = in.chunk.begin(), n = in.chunk.size();
    std::vector<MemoryRef> sources(n);
    std::vector<PutItem> items;
    std::vector<size_t> which;
    for (size_t i = 0; i < n; ++i) {
        if (save_.columns[begin + i] % PutQueue::kThreads != thread) continue;
        sources[i] = MemoryRef::host(in.slot.bytes().data() + in.packing.offsets[i],
                                     kv_.object_bytes(save_.columns[begin + i]));
        std::string_view name = save_.names[begin + i];
        std::string_view parent = save_.parents.empty() ? std::string_view() : save_.parents[begin + i];
        items.push_back(
            {name, parent, std::span(&sources[i], 1), name.substr(0, save_.group_bytes), save_.soft_ms});
        which.push_back(begin + i);
    }
    if (items.empty()) return;
    Result<PutReport> stored = client_.put(items, PutOptions{});
    MutexLock lock(mutex_);
    if (!stored) {
        report_.refusal = stored.error().text;
        return;
    }
    for (size_t k = 0; k < which.size(); ++k) report_.outcomes[which[k]] = stored->outcomes[k];
    report_.stored_bytes += stored->stored_bytes;
    if (!stored->refusal.empty()) report_.refusal = std::move(stored->refusal);
}

void SaveJob::over() {
    // Once; what the caller holds by it is let go of here, before this job is.
    auto ended = std::exchange(calls_.ended, nullptr);
    PutReport report;
    {
        MutexLock lock(mutex_);
        report = std::move(report_);
    }
    ended(std::move(report));
}

}  // namespace moonpool
