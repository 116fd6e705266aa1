// LoadJob: one load of objects into a card's KV cache. A chunk is read from the pool into its slot and
// checked there, then copied to the card; what the pool no longer has is not moved to the KV cache, so its
// block keeps what it had.
#pragma once

#include <cstdint>

#include "base/mutex.hpp"
#include "store/device/copy_job.hpp"
#include "store/device/device_kv.hpp"

namespace moonpool {

class LoadJob final : public CopyJob {
   public:
    // What `load` points to stays until wait() has returned.
    LoadJob(const DeviceKv& kv, Client& client, const DeviceLoad& load)
        : kv_(kv), client_(client), load_(load) {
        report_.ok.assign(load.descriptors.size(), 0);
    }
    LoadReport wait();

    Status begin(ChunkInFlight& in) override;
    void end(ChunkInFlight in, const Status& status) override;

   private:
    const DeviceKv& kv_;
    Client& client_;
    const DeviceLoad& load_;
    Mutex mutex_;
    LoadReport report_
        GUARDED_BY(mutex_);  // ok: of what was read into a slot; void again when it fails there
};

}  // namespace moonpool
