// LoadJob: one load of objects into a card's KV cache. Of a chunk, what lies in pinned parts of the node's
// arena is copied to the card from there; the rest is read from the pool into the chunk's slot first.
//
//     slot    read, then checked, then copied: what the pool no longer has leaves its block as it was
//     arena   looked up, then copied, then checked: what was removed meanwhile has failed, whatever bytes
//             its block has now
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.hpp"
#include "store/device/copy_job.hpp"
#include "store/device/device_kv.hpp"
#include "store/device/kv_mover.hpp"
#include "store/device/pinned_arena.hpp"

namespace moonpool {

class LoadJob final : public CopyJob {
   public:
    // What `load` points to stays until wait() has returned. arena: null: everything goes through slots.
    LoadJob(const DeviceKv& kv, Client& client, const DeviceLoad& load, std::shared_ptr<PinnedArena> arena)
        : kv_(kv), client_(client), load_(load), arena_(std::move(arena)) {
        report_.ok.assign(load.descriptors.size(), 0);
        in_arena_.resize(load.descriptors.size());
    }
    LoadReport wait();

    Status begin(ChunkInFlight& in) override;
    void end(ChunkInFlight in, const Status& status) override;

   private:
    // Reads those objects of the chunk, counted from its begin, from the pool into its slot. -> of each 1: it
    // is there.
    std::vector<uint8_t> fill_slot(const ChunkInFlight& in, std::span<const size_t> which) EXCLUDES(mutex_);
    LoadReport take_report() EXCLUDES(mutex_);
    void has(size_t object) REQUIRES(mutex_);
    void failed(size_t object, const std::string& why) REQUIRES(mutex_);

    const DeviceKv& kv_;
    Client& client_;
    const DeviceLoad& load_;
    const std::shared_ptr<PinnedArena> arena_;
    // Of each object that a card reads there. A chunk's are its lane's.
    std::vector<std::optional<OwnArena::Read>> in_arena_;
    Mutex mutex_;
    LoadReport report_ GUARDED_BY(mutex_);  // ok: of what is on its way to the card; void again when it fails
};

}  // namespace moonpool
