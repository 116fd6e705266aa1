// SimDisk: the disk of a host, with one file. Its content outlives the process that has it open.
//
//   Log --SimQueue::submit--> in flight --a simulated time later--> on the disk --sync--> safe
//
// What is in flight ends in any order, also while its process stands still. When the process is killed, each
// write in flight is on the disk, or not, or some of its pages are. When the power fails, so is each page
// that was written since the last sync before it, in one of the states that it had since then, or torn
// between two sectors. A file that is open without a queue, as a log opens it, is read and written in no
// time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "faults.hpp"
#include "io/queue.hpp"
#include "ssd/file.hpp"
#include "world.hpp"

namespace moonpool::sim {

struct DiskFaults {
    bool torn = false;     // a power failure takes what was not synced, or parts of it; else it takes nothing
    uint32_t slow_ms = 0;  // one operation in four takes up to so long
    uint32_t fails = 0;    // so many of a thousand reads and writes fail
    uint32_t full = 0;     // in so many of a hundred lives of its process the disk is full some time
};

class SimDisk {
   public:
    SimDisk(World& world, const DiskFaults& faults, const Planted& planted)
        : world_(world), faults_(faults), planted_(planted) {}
    SimDisk(const SimDisk&) = delete;

    // A new life of the process begins.
    ssd::OpenFile opener();
    // on_wake: Log::step() has something to do. on_sync: one begins; what it returns is called when all that
    // was written before it is safe.
    using OnSync = std::function<std::function<void()>()>;
    std::unique_ptr<io::Queue> queue(std::function<void()> on_wake, OnSync on_sync);
    // The process has ended, or its host has. Until the next life every operation fails.
    void cut_off(bool power_failed);

    // A read of this life failed while its log was opened: the log may have let go of older records.
    bool failed_at_open() const { return failed_at_open_; }

   private:
    class Queue;
    class OpenedFile;
    struct InFlight {
        io::Operation operation;
        std::vector<std::byte> bytes;  // of a write
        uint64_t written = 0;          // of a sync: it vouches for the writes up to this one
        std::function<void()> synced;
    };
    struct Version {  // of a page
        uint64_t number;
        std::vector<std::byte> bytes;
    };

    void submit(const io::Operation& operation);
    void end(uint64_t id);
    int carry_out(const InFlight& each);
    void write(uint64_t offset, const std::vector<std::byte>& bytes, bool some_pages = false);
    void sync(uint64_t written);
    void lose_unsynced();
    bool is_early(uint64_t page, const std::byte* bytes) const;
    void grow(uint64_t bytes);

    World& world_;
    const DiskFaults faults_;
    const Planted& planted_;
    std::vector<std::byte> image_, safe_;  // what a read gives, and what survives a power failure
    std::map<uint64_t, std::vector<Version>> unsynced_;  // by page, oldest first
    std::map<uint64_t, InFlight> in_flight_;             // by number, in the order of their beginning
    uint64_t written_ = 0, begun_ = 0, full_after_ = UINT64_MAX;
    bool alive_ = false, failed_at_open_ = false;
    Queue* queue_ = nullptr;
};

}  // namespace moonpool::sim
