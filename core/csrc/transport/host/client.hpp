// Client: a peer of this host, as an initiator reaches it: its socket, on which questions are asked, and the
// gate that it gave us.
//
// That both are on one host is proved, never guessed: the same boot id, the same host_id, a descriptor passed
// through a socket of this network namespace, and the nonce in the page behind it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/host/gate.hpp"
#include "transport/identity.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::host {

class Client {
   public:
    explicit Client(EventLoop& loop) : loop_(loop) {}
    ~Client();  // the peer ends its session

    // Whether what the peer says of itself allows that it is on this host: claims only, which save an
    // attempt.
    static Status may_be_here(const PeerInfo& peer, const Identity& self);

    // Once, before all else. offer: what the peer says in the handshake.
    Status open(const HostOffer& offer, const PeerInfo& peer, const Identity& self, int timeout_ms);

    // One question and the body of its answer.
    Status ask(Kind kind, std::span<const std::byte> question, std::vector<std::byte>& answer, Fd* passed)
        EXCLUDES(mutex_);

    // False: nothing of the peer runs any more, or it has closed its gate.
    bool alive() const { return alive_->load() && gate_->page().closed.load() == 0; }
    // The same, of the socket itself: the thread that hears of the peer's end may not have run yet.
    bool alive_now() const;

    const std::shared_ptr<Gate>& gate() const { return gate_; }
    pid_t process() const { return process_; }  // 0: the kernel does not name it here
    // Where the peer sees the gate's page, and the number in it.
    uint64_t page_address() const { return page_address_; }
    uint64_t nonce() const { return nonce_; }

   private:
    class Watch;

    Status prove(const HostOffer& offer, const PeerInfo& peer, const Identity& self);

    EventLoop& loop_;
    std::shared_ptr<std::atomic<bool>> alive_ = std::make_shared<std::atomic<bool>>(true);
    std::shared_ptr<Gate> gate_;
    pid_t process_ = 0;
    uint64_t page_address_ = 0, nonce_ = 0;

    Mutex mutex_;  // one question at a time
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
    uint64_t next_request_ GUARDED_BY(mutex_) = 1;
};

}  // namespace moonpool::transport::host
