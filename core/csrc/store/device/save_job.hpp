// SaveJob: one save of objects from a card's KV cache. Blocks may be given away once every chunk is staged,
// in a slot of the ring; what becomes of it in the pool is no matter of the KV cache any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "base/mutex.hpp"
#include "store/device/copy_lanes.hpp"
#include "store/device/device_kv.hpp"

namespace moonpool {

class SaveJob final : public CopyJob {
   public:
    // What `save` and `staged` are of stays until wait() has returned.
    SaveJob(const DeviceKv& kv, Client& client, const DeviceSave& save, const std::function<void()>& staged)
        : kv_(kv), client_(client), save_(save), staged_(staged) {
        report_.outcomes.assign(save.names.size(), PutOutcome::kRefused);
    }
    // Before the first chunk is submitted.
    void expect_chunks(size_t chunks);
    Result<PutReport> wait();

    Status begin(ChunkInFlight& in) override;
    void end(ChunkInFlight& in, const Status& status) override;

   private:
    void put(const ChunkInFlight& in);

    const DeviceKv& kv_;
    Client& client_;
    const DeviceSave& save_;
    const std::function<void()>& staged_;
    std::atomic<size_t> unstaged_{0};  // chunks
    Mutex mutex_;
    PutReport report_ GUARDED_BY(mutex_);
};

}  // namespace moonpool
