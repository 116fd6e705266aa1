// DeviceKv: the paged KV cache of an engine in the memory of one card, as a source and target of the store's
// objects. Short rows never cross the link one by one: an object is whole there, and a kernel spreads its
// rows on the card. Rows that are long enough go without kernel and staging memory
// (store/device/kv_mover.hpp).
//
//     load   pool --Client::load--> slot of the pinned ring --copy--> staging memory --kernel--> KV cache
//     save   KV cache --kernel--> staging memory --copy--> slot of the pinned ring --Client::put--> pool
//
// So the store sees host memory only: what holds for a load or a put (spill, copies on other hosts, SSD,
// checksums, validity after the copy) holds here as it is. Loads of what lies in pinned parts of the own
// node's arena leave the slot out (pin_arena(), store/device/pinned_arena.hpp).
//
// Order. A save reads blocks after `after`, an event behind the forward that computed them. A load writes
// blocks after `after`, an event behind what was queued on them before; it is over when its last copy has
// ended. Saves are put in the order of their calls, parents before children, by threads of their own
// (PutQueue): a save is staged when its last chunk is in the ring, whatever has been put by then.
//
// What the caller must not do: give a block away before the save says that it is staged, or the load is over.
//
// Threads: any; load() waits for its end. Lanes: store/device/copy_lanes.hpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "device/device.hpp"
#include "device/event.hpp"
#include "device/pinned_ring.hpp"
#include "store/client/client.hpp"
#include "store/device/copy_job.hpp"
#include "store/device/copy_lanes.hpp"
#include "store/device/kv_mover.hpp"
#include "store/device/pinned_arena.hpp"
#include "store/device/put_queue.hpp"

namespace moonpool {

// A point in a stream of the engine; null: nothing to wait for.
using Mark = std::shared_ptr<device::Event>;

struct DeviceKvOptions {
    uint64_t ring_bytes = 64u << 20;  // of pinned host memory
    uint64_t slot_bytes = 4u << 20;   // at least; one object fits
    uint32_t load_lanes = 4;
    uint32_t kernel_blocks = 1;  // of 1,024 threads: how many multiprocessors a launch takes from the engine
    // Where no row is shorter, rows cross the link by themselves. Below it a copy engine does not reach the
    // link's speed.
    uint64_t direct_row_bytes = 64u << 10;
    // Each object that is read in the arena is a copy of its own, so short ones take the ring, many to a
    // copy.
    PinnedArena::Options arena{.object_bytes_min = 32u << 10};
    int refused_ms = CopyLanes::kRefusedMs;
};

struct DeviceLoad {
    std::string_view holders;  // as Client::load
    std::span<const Descriptor> descriptors;
    std::span<const uint32_t> blocks;   // of each object
    std::span<const uint16_t> columns;  // of each object
    bool verify = false;
    Mark after;
};

struct DeviceSave {
    std::span<const std::string_view> names, parents;  // parents: one for each name, empty: none
    size_t group_bytes = 0;  // the group of an object has the name with which its own begins; 0: no groups
    std::span<const uint32_t> blocks;
    std::span<const uint16_t> columns;
    Mark after;
    uint32_t soft_ms = 0;  // a soft pin of each object; 0: none
};

// What a save calls, each once, also after errors. Neither waits for anything.
struct SaveCalls {
    std::function<void()> staged;                  // no block is read any more
    std::function<void(Result<PutReport>)> ended;  // after that
};

class DeviceKv {
   public:
    // table: where each column lies in block 0, device addresses. blocks: how many each column has. An error
    // when an address is not memory of that card, as its driver says, or the card lacks something.
    static Result<std::shared_ptr<DeviceKv>> open(int ordinal, const PartTable& table,
                                                  std::vector<uint32_t> blocks,
                                                  const DeviceKvOptions& options);
    // All columns have as many.
    static Result<std::shared_ptr<DeviceKv>> open(int ordinal, const PartTable& table, uint32_t blocks,
                                                  const DeviceKvOptions& options) {
        return open(ordinal, table, std::vector<uint32_t>(table.columns(), blocks), options);
    }
    ~DeviceKv();  // close(CopyLanes::kCloseMs)
    DeviceKv(const DeviceKv&) = delete;

    // stream: of the engine, as its framework names it (cudaStream_t); 0: the default stream.
    Result<Mark> mark(uint64_t stream);

    LoadReport load(Client& client, const DeviceLoad& load);
    // Returns at once. The calls come on threads of this object, or on this one; what `save` points to stays
    // until `ended`.
    void start_save(Client& client, DeviceSave save, SaveCalls calls);

    // Pins the arena of the client's own node from its front on, until `bytes` are pinned: what lies there is
    // loaded without a copy by the CPU from now on, as long as that node lives, unless its checksum is asked
    // for. To be called before the engine serves, and again for more; one thread.
    ArenaPins pin_arena(Client& client, uint64_t bytes) EXCLUDES(arena_mutex_);

    // Loads and saves that have not begun fail; waits for the others. kTimeout: the card does not end its
    // copies, and the pinned memory stays with the process.
    Status close(int timeout_ms);

    const device::DeviceFacts& facts() const { return device_->facts(); }
    // Why no load or save can succeed any more; empty: they can.
    std::string lost() const;

    // For this folder

    Packing pack(std::span<const uint16_t> columns) const;
    const KvMover& mover() const { return *mover_; }
    // The ring's memory: an object's index is its offset there.
    const PartTable& ring_table() const { return *ring_table_; }
    uint64_t ring_offset(const device::RingSlot& slot) const;
    uint64_t object_bytes(size_t column) const { return ring_table_->object_bytes(column); }

   private:
    DeviceKv(std::shared_ptr<const device::Device> device, std::vector<uint32_t> blocks,
             const DeviceKvOptions& options)
        : device_(std::move(device)), blocks_(std::move(blocks)), options_(options) {}

    Status check(std::span<const uint32_t> blocks, std::span<const uint16_t> columns) const;
    // Chunks of a job over these objects, each at most `bytes` long.
    std::vector<Chunk> cut(const std::shared_ptr<CopyJob>& job, std::span<const uint16_t> columns,
                           uint64_t bytes) const;
    // Null: nothing is pinned, or its node has ended.
    std::shared_ptr<PinnedArena> arena(Client& client) EXCLUDES(arena_mutex_);
    void set_arena(std::shared_ptr<PinnedArena> arena) EXCLUDES(arena_mutex_);

    std::shared_ptr<const device::Device> device_;
    const std::vector<uint32_t> blocks_;  // of each column
    const DeviceKvOptions options_;
    std::unique_ptr<PartTable> ring_table_;
    std::unique_ptr<device::PinnedRing> ring_;
    std::unique_ptr<KvMover> mover_;
    std::unique_ptr<device::RingShare> save_share_;
    std::unique_ptr<PutQueue> puts_;
    std::unique_ptr<CopyLanes> loads_, saves_;  // saves_: one lane, which keeps their order
    Mutex arena_mutex_;
    std::shared_ptr<PinnedArena> arena_ GUARDED_BY(arena_mutex_);
};

}  // namespace moonpool
