// SaveJob: one save of objects from a card's KV cache. Blocks may be given away once every chunk is staged,
// in a slot of the ring; the puts, which come later on other threads, read the slots alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/mutex.hpp"
#include "store/device/copy_job.hpp"
#include "store/device/device_kv.hpp"
#include "store/device/put_queue.hpp"

namespace moonpool {

class SaveJob final : public CopyJob, public std::enable_shared_from_this<SaveJob> {
   public:
    // What `save` points to stays until `ended` is called.
    SaveJob(const DeviceKv& kv, PutQueue& puts, Client& client, DeviceSave save, SaveCalls calls)
        : kv_(kv), puts_(puts), client_(client), save_(std::move(save)), calls_(std::move(calls)) {
        report_.outcomes.assign(save.names.size(), PutOutcome::kRefused);
    }
    // Before the first chunk is submitted.
    void expect(size_t chunks);

    Status begin(ChunkInFlight& in) override;
    void end(ChunkInFlight in, const Status& status) override;

    // Of PutQueue: of a chunk that was handed to it, the objects of the thread's columns.
    void put(const ChunkInFlight& in, size_t thread);
    void refuse(const std::string& why);

   protected:
    void over() override;

   private:
    const DeviceKv& kv_;
    PutQueue& puts_;
    Client& client_;
    const DeviceSave save_;
    SaveCalls calls_;
    std::atomic<size_t> unstaged_{0};  // chunks
    Mutex mutex_;
    PutReport report_ GUARDED_BY(mutex_);
};

}  // namespace moonpool
