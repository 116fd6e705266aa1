#include "transport/host/client.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>

#include "base/clock.hpp"
#include "transport/host/server.hpp"
#include "wire/dial.hpp"

namespace moonpool::transport::host {

namespace {

constexpr int kStepMs = 20;  // in which a job that is stopped leaves

}  // namespace

// Tells the client when the peer's end of the socket has closed. The kernel closes it after the last of the
// peer's threads has left its last system call, so nothing of the peer runs any more.
class Client::Watch final : public EventHandler {
   public:
    Watch(std::shared_ptr<std::atomic<bool>> alive, Fd fd) : alive_(std::move(alive)), fd_(std::move(fd)) {}
    int fd() const { return fd_.get(); }
    bool on_events(uint32_t) override {
        alive_->store(false);
        return false;
    }

   private:
    std::shared_ptr<std::atomic<bool>> alive_;
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
};

Patience Patience::until(int timeout_ms) {
    return {now_ns() + static_cast<uint64_t>(std::max(0, timeout_ms)) * 1000000, nullptr};
}

Patience Patience::of(const Job& job) {
    uint64_t now = now_ns();
    uint64_t end = job.progress_ns.load() + static_cast<uint64_t>(job.timeout_ms) * 1000000;
    uint64_t left = end > now ? end - now : 0;
    return {now + (job.last_path ? left : left / 2), &job};
}

int Patience::left_ms() const {
    uint64_t now = now_ns();
    return end_ns <= now ? 0 : static_cast<int>(std::min<uint64_t>((end_ns - now) / 1000000, INT_MAX));
}

Status Patience::check() const {
    if (job != nullptr && job->stopped()) return Error{Code::kClosed, "stopped"};
    if (now_ns() < end_ns) return success();
    return Error{Code::kTimeout, "the peer's process did not answer in time"};
}

int Patience::step_ms() const { return std::clamp(left_ms(), 1, kStepMs); }

Status Client::may_be_here(const PeerInfo& peer, const Identity& self) {
    if (!self.boot_id.empty() && peer.boot_id == self.boot_id && peer.host_id == self.host_id) {
        return success();
    }
    return Error{Code::kUnavailable, "the peer is on another host (" +
                                         (peer.boot_id != self.boot_id ? std::string("another boot id")
                                                                       : "host_id " + peer.host_id) +
                                         ")"};
}

// The proof is the descriptor that comes through the socket.
Status Client::open(const HostOffer& offer, const PeerInfo& peer, const Identity& self,
                    const Patience& patience) {
    if (Status claimed = may_be_here(peer, self); !claimed) return claimed;
    fd_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd_.valid()) return os_error("socket");
    reader_ = UnixFrameReader(kControlBytesMax);
    asked_ = answered_ = 0;
    // A peer whose queue of connections is full lets connect() wait.
    set_socket_timeouts(fd_.get(), std::max(1, patience.left_ms()));
    sockaddr_un address;
    socklen_t size = abstract_address(offer.socket, address);
    if (::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
        if (errno == EAGAIN) return Error{Code::kTimeout, "the peer took no connection in time"};
        return Error{Code::kUnavailable, std::string("the peer's socket is not in this network namespace (") +
                                             std::strerror(errno) + ")"};
    }
    if (Status proved = prove(offer, peer, self, patience); !proved) return proved;
    ucred named{};
    size = sizeof(named);
    if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &named, &size) == 0) process_ = named.pid;
    auto watch = std::make_shared<Watch>(alive_, Fd(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0)));
    loop_.post([&loop = loop_, watch] { loop.add(watch->fd(), EPOLLRDHUP, watch); });
    return success();
}

Status Client::prove(const HostOffer& offer, const PeerInfo& peer, const Identity& self,
                     const Patience& patience) {
    std::vector<std::byte> question;
    Writer w(question);
    w.bytes(offer.cookie.data(), offer.cookie.size());
    w.text16(self.host_id);
    w.text16(self.boot_id);
    // Those before it take no byte more.
    if (peer.version >= kVersionWithInitiator) w.bytes(self.segment.data(), self.segment.size());
    if (Status status = ask(Kind::kShmOpen, question, patience); !status) return status;
    const Fd& passed = reader_.passed();
    Reader r(reader_.body());
    nonce_ = r.number<uint64_t>();
    page_address_ = r.number<uint64_t>();
    if (!r.ok() || !passed.valid()) return Error{Code::kProtocol, "the peer passed no gate"};
    Result<std::unique_ptr<Gate>> gate = Gate::open(passed.get());
    if (!gate) return gate.error();
    gate_ = std::move(*gate);
    // The page that was passed here is the one that the peer writes to, also where a proxy stands between
    // the two.
    if (gate_->page().nonce == nonce_) return success();
    return Error{Code::kUnavailable, "the memory the peer passed is not the memory the peer sees"};
}

Client::~Client() { ::shutdown(fd_.get(), SHUT_RDWR); }  // ends the watch, and the peer's session

bool Client::alive_now() const {
    pollfd asked{fd_.get(), POLLRDHUP, 0};
    return alive() && ::poll(&asked, 1, 0) == 0;
}

Result<Client::Turn> Client::turn(const Patience& patience) {
    MutexLock lock(mutex_);
    while (taken_) {
        if (Status status = patience.check(); !status) return status.error();
        (void)turn_ended_.wait_for(lock, std::chrono::milliseconds(patience.step_ms()),
                                   [this]() REQUIRES(mutex_) { return !taken_; });
    }
    taken_ = true;
    return Turn(*this, patience);
}

void Client::end_turn() {
    {
        MutexLock lock(mutex_);
        taken_ = false;
    }
    turn_ended_.notify_one();
}

Status Client::ask(Kind kind, std::span<const std::byte> question, const Patience& patience) {
    // At most one question is in the socket, which has room for it: sending waits for nothing.
    while (answered_ < asked_) {
        if (Status status = receive(patience); !status) return status;
    }
    std::vector<std::byte> frame;
    frame.reserve(1024);
    begin_frame(frame, kind, 0, ++asked_);
    Writer(frame).bytes(question.data(), question.size());
    finish_frame(frame, 0);
    if (Status status = send_frame(fd_.get(), frame); !status) {
        broken_ = status;
        return status;
    }
    if (Status status = receive(patience); !status) return status;
    if (reader_.header().kind != Kind::kError) return success();
    Reader body(reader_.body());
    return read_error(body);
}

// The answer to the oldest question that has none.
Status Client::receive(const Patience& patience) {
    if (!broken_) return broken_;
    for (;;) {
        Result<bool> whole = reader_.read(fd_.get());
        if (whole && *whole && reader_.header().request_id != answered_ + 1) {
            whole = Error{Code::kProtocol, "an answer does not fit its question"};
        }
        if (!whole) {
            broken_ = whole.error();
            return broken_;
        }
        if (*whole) {
            ++answered_;
            return success();
        }
        if (Status status = patience.check(); !status) return status;
        pollfd readable{fd_.get(), POLLIN, 0};
        (void)::poll(&readable, 1, patience.step_ms());
    }
}

}  // namespace moonpool::transport::host
