#include "transport/host/client.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "transport/frames.hpp"
#include "transport/host/server.hpp"
#include "transport/host/unix_frame.hpp"
#include "wire/dial.hpp"

namespace moonpool::transport::host {

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
Status Client::open(const HostOffer& offer, const PeerInfo& peer, const Identity& self, int timeout_ms) {
    if (Status claimed = may_be_here(peer, self); !claimed) return claimed;
    fd_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd_.valid()) return os_error("socket");
    set_socket_timeouts(fd_.get(), timeout_ms);
    sockaddr_un address;
    socklen_t size = abstract_address(offer.socket, address);
    if (::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
        return Error{Code::kUnavailable, std::string("the peer's socket is not in this network namespace (") +
                                             std::strerror(errno) + ")"};
    }
    if (Status proved = prove(offer, peer, self); !proved) return proved;
    ucred named{};
    size = sizeof(named);
    if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &named, &size) == 0) process_ = named.pid;
    auto watch = std::make_shared<Watch>(alive_, Fd(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0)));
    loop_.post([&loop = loop_, watch] { loop.add(watch->fd(), EPOLLRDHUP, watch); });
    return success();
}

Status Client::prove(const HostOffer& offer, const PeerInfo& peer, const Identity& self) {
    std::vector<std::byte> question, answer;
    Writer w(question);
    w.bytes(offer.cookie.data(), offer.cookie.size());
    w.text16(self.host_id);
    w.text16(self.boot_id);
    // Those before it take no byte more.
    if (peer.version >= kVersionWithInitiator) w.bytes(self.segment.data(), self.segment.size());
    Fd passed;
    if (Status status = ask(Kind::kShmOpen, question, answer, &passed); !status) return status;
    Reader r(answer);
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

Status Client::ask(Kind kind, std::span<const std::byte> question, std::vector<std::byte>& answer,
                   Fd* passed) {
    MutexLock lock(mutex_);
    std::vector<std::byte> frame;
    frame.reserve(1024);
    uint64_t id = next_request_++;
    begin_frame(frame, kind, 0, id);
    Writer(frame).bytes(question.data(), question.size());
    finish_frame(frame, 0);
    if (Status status = send_frame(fd_.get(), frame); !status) return status;
    FrameHeader header;
    if (Status status = receive_frame(fd_.get(), header, answer, kControlBytesMax, passed); !status) {
        return status;
    }
    Reader body(answer);
    if (header.kind == Kind::kError) return read_error(body);
    if (header.request_id != id) return Error{Code::kProtocol, "an answer does not fit its question"};
    return success();
}

}  // namespace moonpool::transport::host
