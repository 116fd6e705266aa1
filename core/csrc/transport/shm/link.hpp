// A peer on this host: its kHostArena memory is mapped here and copied by the calling thread; its kHost
// memory is moved by process_vm_readv and process_vm_writev, many ranges in one call, where the kernel
// permits that.
//
// That both are on one host is proved, never guessed: the same boot id, the same host_id, a descriptor passed
// through a socket of this network namespace, and the nonce in the page behind it.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <memory>
#include <vector>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/counters.hpp"
#include "transport/frames.hpp"
#include "transport/link.hpp"
#include "transport/shm/gate.hpp"

namespace moonpool::transport::shm {

// The sockaddr of a name in the abstract namespace; its length.
socklen_t abstract_address(const std::string& name, sockaddr_un& address);

class Link final : public transport::Link {
   public:
    Link(EventLoop& loop, TransportCounters& counters) : loop_(loop), counters_(counters) {}
    ~Link() override;

    // Once, before all else: proves that the peer is on this host, and opens its gate.
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
    class Watch;
    class Carrier;

    void probe_process_vm(uint64_t nonce, uint64_t page_address) REQUIRES(mutex_);
    Result<std::shared_ptr<const View>> view(bool fresh);
    Result<std::shared_ptr<Mapping>> map(const RegionRow& row) REQUIRES(mutex_);
    Status ask(std::vector<std::byte>& question, std::vector<std::byte>& answer, Fd* passed) REQUIRES(mutex_);

    EventLoop& loop_;
    TransportCounters& counters_;
    std::string path_;
    std::vector<std::byte> regions_question_;
    std::shared_ptr<std::atomic<bool>> alive_ = std::make_shared<std::atomic<bool>>(true);
    std::unique_ptr<Gate> gate_;
    pid_t pid_ = 0;
    std::string no_process_vm_;  // why kHost memory is out of reach, empty: it is not
    std::atomic<bool> process_vm_{false};

    Mutex mutex_;  // the socket, and the refresh of the view; before view_mutex_
    Fd fd_ GUARDED_BY(mutex_);
    ClosedInChildren closed_in_children_{fd_};
    uint64_t next_request_ GUARDED_BY(mutex_) = 1;
    Mutex view_mutex_;
    std::shared_ptr<const View> view_ GUARDED_BY(view_mutex_);
};

}  // namespace moonpool::transport::shm
