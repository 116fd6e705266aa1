// Client: a peer of this host, as an initiator reaches it: its socket, on which questions are asked, and the
// gate that it gave us.
//
// That both are on one host is proved, never guessed: the same boot id, the same host_id, a descriptor passed
// through a socket of this network namespace, and the nonce in the page behind it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/frames.hpp"
#include "transport/host/gate.hpp"
#include "transport/host/unix_frame.hpp"
#include "transport/identity.hpp"
#include "transport/link.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::host {

// How long a caller waits for the peer.
struct Patience {
    uint64_t end_ns = 0;
    const Job* job = nullptr;  // which may be stopped meanwhile

    static Patience until(int timeout_ms);
    // Half of the time that the job has left, where another path could use the other half.
    static Patience of(const Job& job);
    // Why the wait is over; success: it goes on.
    Status check() const;
    int left_ms() const;
    int step_ms() const;  // until it is to be asked again
};

// Threads: one at a time asks, the one that has the Turn; all else on any. The peer answers in the order of
// the questions. A question whose caller stopped waiting stays in the socket with its answer, which the next
// turn reads and drops before it asks.
class Client {
   public:
    class Turn;

    explicit Client(EventLoop& loop) : loop_(loop), reader_(kControlBytesMax) {}
    ~Client();  // the peer ends its session

    // Whether what the peer says of itself allows that it is on this host: claims only, which save an
    // attempt.
    static Status may_be_here(const PeerInfo& peer, const Identity& self);

    // kTimeout: threads before this one wait for the peer.
    Result<Turn> turn(const Patience& patience) EXCLUDES(mutex_);

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

    // In a turn.
    Status open(const HostOffer& offer, const PeerInfo& peer, const Identity& self, const Patience& patience);
    Status prove(const HostOffer& offer, const PeerInfo& peer, const Identity& self,
                 const Patience& patience);
    Status ask(Kind kind, std::span<const std::byte> question, const Patience& patience);
    Status receive(const Patience& patience);
    void end_turn() EXCLUDES(mutex_);

    EventLoop& loop_;
    std::shared_ptr<std::atomic<bool>> alive_ = std::make_shared<std::atomic<bool>>(true);
    std::shared_ptr<Gate> gate_;
    pid_t process_ = 0;
    uint64_t page_address_ = 0, nonce_ = 0;

    Mutex mutex_;
    CondVar turn_ended_;
    bool taken_ GUARDED_BY(mutex_) = false;  // the turn
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
    // Of the thread that has the turn.
    UnixFrameReader reader_;
    uint64_t asked_ = 0, answered_ = 0;  // questions, by number
    Status broken_ = success();          // what the peer sent makes no sense
};

// The right to ask the peer. It ends with its object, which the client outlives.
class Client::Turn {
   public:
    Turn(Client& client, const Patience& patience) : client_(&client), patience_(patience) {}
    Turn(Turn&& other) noexcept
        : client_(std::exchange(other.client_, nullptr)), patience_(other.patience_) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
        if (client_ != nullptr) client_->end_turn();
    }

    // Before all else; after kTimeout it may be tried again. offer: what the peer says in the handshake.
    Status open(const HostOffer& offer, const PeerInfo& peer, const Identity& self) {
        return client_->open(offer, peer, self, patience_);
    }
    // One question. The body of its answer, and the descriptor that came with it, are there until the next.
    Status ask(Kind kind, std::span<const std::byte> question) {
        return client_->ask(kind, question, patience_);
    }
    std::vector<std::byte>& answer() { return client_->reader_.body(); }
    Fd& passed() { return client_->reader_.passed(); }

   private:
    Client* client_;
    Patience patience_;
};

}  // namespace moonpool::transport::host
