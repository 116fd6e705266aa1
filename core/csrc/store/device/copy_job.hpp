// CopyJob: a load or a save of DeviceKv, cut into chunks of one slot of the pinned ring each. CopyLanes begin
// and end the chunks; the job says what that means.
//
// Invariant: a job is over when none of its chunks exists any more. A chunk under way has its slot, which is
// back in the ring before the chunk is gone; so all that has to be known of a chunk is which component holds
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "device/pinned_ring.hpp"
#include "device/stream.hpp"

namespace moonpool {

class CopyJob;

// Objects [begin, end) of a job: what fits one slot of the ring.
class Chunk {
   public:
    Chunk(std::shared_ptr<CopyJob> job, uint32_t begin, uint32_t end);
    Chunk(Chunk&&) noexcept = default;
    Chunk& operator=(Chunk&&) = delete;
    ~Chunk();

    CopyJob& job() const { return *job_; }
    uint32_t begin() const { return begin_; }
    uint32_t size() const { return end_ - begin_; }

   private:
    std::shared_ptr<CopyJob> job_;  // null once it was moved away
    uint32_t begin_, end_;
};

// Where the objects of a chunk lie in a slot: offsets from its begin.
struct Packing {
    std::vector<uint32_t> offsets;
    uint64_t bytes = 0;  // of the slot that are used
};

// A chunk with what it has while it is under way. Members are destroyed from the last to the first: the slot
// is given back, then the chunk is over.
struct ChunkInFlight {
    Chunk chunk;
    device::RingSlot slot{};
    Packing packing{};                 // begin() fills it in
    uint64_t staged = 0;               // address of its half of the staging memory, if there is some
    device::Stream* stream = nullptr;  // of its half of the lane
};

class CopyJob {
   public:
    virtual ~CopyJob() = default;
    // Until each chunk is over.
    void wait_for_all() EXCLUDES(mutex_);

    // Fills in.slot or queues what fills it, and queues the copies on in.stream. After an error the chunk has
    // failed; what was queued is waited for all the same.
    virtual Status begin(ChunkInFlight& in) = 0;
    // The copies are over: nothing reads or writes the chunk's memory any more, but after kTimeout, when it
    // is not known. The chunk is the job's from here on.
    virtual void end(ChunkInFlight in, const Status& status) = 0;

   protected:
    // The last chunk is over. On the thread that let go of it.
    virtual void over() {}

   private:
    friend class Chunk;
    Mutex mutex_;
    CondVar none_left_;
    size_t chunks_ GUARDED_BY(mutex_) = 0;  // that exist
};

}  // namespace moonpool
