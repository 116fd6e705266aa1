// A peer on this host: its kHostArena memory is mapped here, each region when it is first touched, and copied
// by the calling thread; its kHost memory is moved by process_vm_readv and process_vm_writev, many ranges in
// one call, where the kernel permits that.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/counters.hpp"
#include "transport/frames.hpp"
#include "transport/host/client.hpp"
#include "transport/link.hpp"
#include "transport/range_tree.hpp"
#include "transport/shm/peer_memory.hpp"

namespace moonpool::transport::shm {

class Link final : public transport::Link {
   public:
    // machine: before /sys and /dev; "" but in tests.
    Link(EventLoop& loop, TransportCounters& counters, std::string machine)
        : machine_(std::move(machine)), counters_(counters), client_(loop) {}

    // Once, before all else.
    Status open(const PeerInfo& peer, const Identity& self, int timeout_ms);

    std::string path() const override { return path_; }
    bool reaches(MemoryKind kind, std::string* why) const override;
    bool only_copies() const override { return true; }
    bool runs_on_caller(const Job& job) const override;
    Status run(Job& job) override;

   private:
    // A peer's region. The views in which it is share it.
    struct Place : RegionRow {
        explicit Place(RegionRow row) : RegionRow(std::move(row)) {}

        // Of kHostArena: null until it is mapped.
        PeerMemory* memory() const { return ready.load(std::memory_order_acquire); }

        std::unique_ptr<PeerMemory> mapped;  // written in the client's turn
        std::atomic<PeerMemory*> ready{nullptr};
    };
    using Places = RangeTree<Place>;
    struct View {
        uint64_t generation = 0;
        uint64_t edition = 0;  // of the peer's list
        Places places;
    };
    class Carrier;

    void probe_process_vm();
    Result<std::shared_ptr<const View>> view(const View* fresher_than, const Job& job);
    Status map(Place& place, const Job& job);
    static Result<Places> changed(const Places& old, ChangedRows changes);

    const std::string machine_;
    TransportCounters& counters_;
    std::string path_;
    PeerInfo peer_;
    host::Client client_;
    std::string no_process_vm_;  // why kHost memory is out of reach, empty: it is not
    std::atomic<bool> process_vm_{false};

    mutable Mutex view_mutex_;
    std::shared_ptr<const View> view_ GUARDED_BY(view_mutex_);
};

}  // namespace moonpool::transport::shm
