// A peer on this host: its kHostArena memory is mapped here and copied by the calling thread; its kHost
// memory is moved by process_vm_readv and process_vm_writev, many ranges in one call, where the kernel
// permits that.
#pragma once

#include <memory>
#include <vector>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/counters.hpp"
#include "transport/frames.hpp"
#include "transport/host/client.hpp"
#include "transport/link.hpp"

namespace moonpool::transport::shm {

class Link final : public transport::Link {
   public:
    Link(EventLoop& loop, TransportCounters& counters) : counters_(counters), client_(loop) {}

    // Once, before all else.
    Status open(const PeerInfo& peer, const Identity& self, int timeout_ms);

    std::string path() const override { return path_; }
    bool reaches(MemoryKind kind, std::string* why) const override;
    bool runs_on_caller() const override { return true; }
    Status run(Job& job) override;

   private:
    // A peer's region and, of kHostArena, where it is mapped here.
    struct Place {
        RegionRow row;
        std::shared_ptr<Mapping> mapping;
    };
    struct View {
        uint64_t generation = 0;
        std::vector<Place> places;  // sorted by address
        const Place* find(uint64_t address, uint64_t bytes) const;
    };
    class Carrier;

    void probe_process_vm();
    Result<std::shared_ptr<const View>> view(bool fresh);
    Result<std::shared_ptr<Mapping>> map(const RegionRow& row) REQUIRES(mutex_);

    TransportCounters& counters_;
    std::string path_;
    std::vector<std::byte> regions_question_;
    host::Client client_;
    std::string no_process_vm_;  // why kHost memory is out of reach, empty: it is not
    std::atomic<bool> process_vm_{false};

    Mutex mutex_;  // the refresh of the view; before view_mutex_
    Mutex view_mutex_;
    std::shared_ptr<const View> view_ GUARDED_BY(view_mutex_);
};

}  // namespace moonpool::transport::shm
