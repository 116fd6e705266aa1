// The serving half of shared memory: hands gates and answers to initiators of this host, and takes the gates
// back.
//
// Threads: Listener and Session on the I/O thread of `loop_`; revoke(), drained() and close() on any. The
// bytes of transfers pass none of them: an initiator moves them by itself.
//
// Between two calls: gates_ has the gate of every session that has opened. A session takes its own out when
// its socket closes, so a process that died is inside of nothing. Where a device works for the initiator
// (`outlives_socket`), a gate whose slots are in use stays until they are free or the process has ended: the
// kernel ends a process only when the devices that it had opened have let go of it. generation_ only
// grows, and every gate has it. A region is out of the table before revoke() is called: a list that is
// made afterwards, with the new generation, does not name it.
//
// No answer waits for its reader: what the socket does not take stays in the session, which reads no further
// question meanwhile and ends when nothing is read of it for too long.
//
// Locks: mutex_ alone.
#include "transport/host/server.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/hmac.hpp"
#include "base/peer_process.hpp"
#include "transport/frames.hpp"
#include "transport/host/unix_frame.hpp"
#include "wire/auth.hpp"
#include "wire/frame_pace.hpp"
#include "wire/frame_reader.hpp"

namespace moonpool::transport::host {

namespace {

constexpr uint32_t kFrameBytesMax = 4096;  // of a question
constexpr size_t kAnswerBytesMax = 4u << 20;

std::string hex(std::span<const uint8_t> bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string text;
    for (uint8_t byte : bytes) {
        text.push_back(digits[byte >> 4]);
        text.push_back(digits[byte & 15]);
    }
    return text;
}

}  // namespace

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    size_t size = std::min(name.size(), sizeof(address.sun_path) - 1);
    std::memcpy(address.sun_path + 1, name.data(), size);
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
}

// One initiator's socket. It lives on the I/O thread; its gate goes when it ends.
class Server::Session final : public EventHandler {
   public:
    Session(Server& server, Fd fd)
        : server_(server),
          fd_(std::move(fd)),
          since_ms_(now_ms()),
          pace_(server.context_.options.limits, since_ms_) {}
    ~Session() override {
        // Its gate goes with it, and with the gate the slots that the process may have left occupied.
        if (id_ == 0) return;
        MutexLock lock(server_.mutex_);
        auto own = server_.gates_.find(id_);
        own->second.left = true;
        if (!own->second.process.valid() || !own->second.gate->occupied()) server_.gates_.erase(own);
    }
    int fd() const { return fd_.get(); }

    bool on_events(uint32_t) override {
        bool was_unread = unread();
        if (!flush() || (was_unread && !serve())) return false;
        while (!unread()) {
            std::span<std::byte> room = in_.room(4096);
            ssize_t n = ::recv(fd_.get(), room.data(), room.size(), MSG_DONTWAIT);
            if (n == 0) return false;
            if (n < 0) {
                if (errno == EINTR) continue;
                if (errno != EAGAIN) return false;
                break;
            }
            if (!is_inside()) pace_.restart(now_ms());
            pace_.moved(static_cast<uint64_t>(n), now_ms());
            in_.received(static_cast<size_t>(n));
            if (!serve()) return false;
        }
        uint32_t events = unread() ? EPOLLOUT : EPOLLIN;
        if (events != watched_) server_.loop_.watch(fd_.get(), events);
        watched_ = events;
        return true;
    }
    bool on_tick(uint64_t now) override {
        if (id_ == 0 && now - since_ms_ > server_.context_.options.limits.handshake_ms) return false;
        if (!is_inside()) pace_.restart(now);
        return !pace_.is_late(now);
    }

   private:
    bool serve() {
        while (!unread()) {
            std::optional<FrameHeader> header = in_.header();
            if (!header) return true;
            bool fits = !unfit(*header, kFrameBytesMax, "engine", "");
            std::optional<Reader> body = fits ? in_.body(*header) : std::nullopt;
            if (fits && !body) return true;
            if (!fits || !answer(*header, *body)) {
                server_.context_.counters.protocol_errors_total.fetch_add(1);
                return false;
            }
        }
        return true;
    }

    bool answer(const FrameHeader& header, Reader body) {
        // Until the cookie was shown nothing else is answered.
        if (header.kind == Kind::kShmOpen && id_ == 0) return open(header, body);
        if (id_ == 0) return false;
        std::vector<std::byte> answered;
        Writer w(answered);
        Result<Passed> passed = server_.answer_(header.kind, body, w);
        if (!passed) {
            // A question that breaks the format ends the session.
            if (passed.error().code == Code::kProtocol) return false;
            return refuse(header, passed.error().code, passed.error().text);
        }
        begin(header).bytes(answered.data(), answered.size());
        return finish(std::move(*passed));
    }

    bool open(const FrameHeader& header, Reader body) {
        std::string_view cookie = body.bytes(32);
        std::string_view host_id = body.text16();
        std::string_view boot_id = body.text16();
        SegmentId initiator{};
        if (body.left() != 0) {  // initiators of the version before end here
            std::string_view segment = body.bytes(initiator.size());
            if (segment.size() == initiator.size()) std::ranges::copy(segment, initiator.begin());
        }
        // A later version may append fields.
        if (!body.ok()) return false;
        const Identity& self = server_.context_.identity;
        auto bytes = std::span(reinterpret_cast<const uint8_t*>(cookie.data()), cookie.size());
        if (!equal_constant_time(server_.cookie_, bytes)) {
            return refuse(header, Code::kAuth, "the cookie of the handshake is wrong");
        }
        if (self.boot_id.empty() || boot_id != self.boot_id || host_id != self.host_id) {
            return refuse(header, Code::kUnavailable, "the two processes are on different hosts");
        }
        MutexLock lock(server_.mutex_);
        // Under the mutex: shut_out() finds the gate, or this finds that its initiator is shut out.
        const ShutOut& outside = *server_.context_.shut_out;
        if (outside.has(initiator) || (initiator == SegmentId{} && outside.any())) {
            return refuse(header, ShutOut::error().code, ShutOut::error().text);
        }
        Entry entry;
        entry.initiator = initiator;
        if (server_.outlives_socket_) {
            if (pid_behind(fd_.get()) != 0) entry.process = process_behind(fd_.get());
            if (!entry.process.valid()) {
                return refuse(
                    header, Code::kUnavailable,
                    "the kernel does not name the peer's process here, as of another pid namespace");
            }
        }
        if (server_.gates_.size() >= kSessionsMax) {
            return refuse(header, Code::kTooLarge,
                          "the engine already serves " + std::to_string(kSessionsMax) +
                              " processes of this host, the limit");
        }
        Result<std::unique_ptr<Gate>> gate = Gate::create(server_.generation_);
        if (!gate) return refuse(header, gate.error().code, gate.error().text);
        std::shared_ptr<Gate> shared = std::move(*gate);
        id_ = server_.next_session_++;
        entry.gate = shared;
        server_.gates_[id_] = std::move(entry);
        Writer w = begin(header);
        w.number(shared->page().nonce);
        // Where the initiator looks into this process by process_vm_readv, to learn whether it may, and
        // whether this is the process that it means.
        w.number(reinterpret_cast<uint64_t>(&shared->page()));
        return finish({.fd = shared->fd(), .owner = shared});
    }

    bool refuse(const FrameHeader& header, Code code, const std::string& text) {
        FrameHeader error = header;
        error.kind = Kind::kError;
        Writer w = begin(error);
        w.number(static_cast<uint16_t>(code));
        w.text16(text);
        return finish({});
    }

    Writer begin(const FrameHeader& header) {
        out_.clear();
        sent_ = 0;
        begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
        return Writer(out_);
    }
    bool finish(Passed passed) {
        finish_frame(out_, 0);
        passed_ = std::move(passed);
        return out_.size() <= kAnswerBytesMax && flush();
    }
    bool is_inside() const { return unread() || !in_.waiting().empty(); }
    // Whether some of the last answer is still here.
    bool unread() const { return sent_ < out_.size(); }
    // Sends what the socket takes. False: the initiator has gone.
    bool flush() {
        while (unread()) {
            ssize_t n = send_part(fd_.get(), out_, sent_, passed_.fd, MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return errno == EAGAIN;
            sent_ += static_cast<size_t>(n);
            pace_.moved(static_cast<uint64_t>(n), now_ms());
        }
        passed_ = {};
        return true;
    }

    Server& server_;
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
    uint64_t id_ = 0;
    FrameReader in_;
    std::vector<std::byte> out_;  // the last answer, of which sent_ bytes have gone
    size_t sent_ = 0;
    Passed passed_;
    const uint64_t since_ms_;
    FramePace pace_;
    uint32_t watched_ = EPOLLIN;
};

class Server::Listener final : public EventHandler {
   public:
    Listener(Server& server, Fd fd) : server_(server), fd_(std::move(fd)) {}
    int fd() const { return fd_.get(); }

    bool on_events(uint32_t) override {
        for (int round = 0; round < 64; ++round) {
            Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
            if (!fd.valid()) return true;
            // Abstract sockets have no file permissions: any user of the network namespace may connect.
            if (!is_same_user(fd.get())) continue;
            int number = fd.get();
            server_.loop_.add(number, EPOLLIN, std::make_shared<Session>(server_, std::move(fd)));
        }
        return true;
    }

   private:
    Server& server_;
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
};

Server::Server(const Context& context, const std::string& name, bool outlives_socket, Answer answer)
    : context_(context),
      loop_(*context.loops.front()),
      outlives_socket_(outlives_socket),
      answer_(std::move(answer)),
      socket_(name + hex(context.identity.segment)),
      cookie_(random_nonce()) {}

Server::~Server() { close(); }

Status Server::start() {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return os_error("socket");
    sockaddr_un address{};
    socklen_t size = abstract_address(socket_, address);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(fd.get(), 128) != 0) {
        return os_error("listening on an abstract Unix socket");
    }
    auto listener = std::make_shared<Listener>(*this, std::move(fd));
    loop_.post([this, listener] { loop_.add(listener->fd(), EPOLLIN, listener); });
    return success();
}

uint64_t Server::revoke() {
    MutexLock lock(mutex_);
    ++generation_;
    // With the lock, so that a gate made at this moment starts with the new generation.
    for (auto& [id, entry] : gates_) entry.gate->revoke(generation_);
    return generation_;
}

uint64_t Server::generation() {
    MutexLock lock(mutex_);
    return generation_;
}

void Server::drop_ended() {
    std::erase_if(gates_, [](const auto& row) {
        const Entry& entry = row.second;
        return entry.left && (!entry.gate->occupied() || has_ended(entry.process));
    });
}

bool Server::drained(uint64_t generation) {
    MutexLock lock(mutex_);
    drop_ended();
    return std::ranges::all_of(gates_, [&](const auto& row) { return row.second.gate->drained(generation); });
}

void Server::shut_out(const SegmentId& segment) {
    MutexLock lock(mutex_);
    for (auto& [id, entry] : gates_) {
        if (may_be(entry, segment)) entry.gate->close();
    }
}

bool Server::is_out(const SegmentId& segment) {
    MutexLock lock(mutex_);
    drop_ended();
    return std::ranges::none_of(
        gates_, [&](const auto& row) { return may_be(row.second, segment) && row.second.gate->occupied(); });
}

void Server::close() {
    MutexLock lock(mutex_);
    for (auto& [id, entry] : gates_) entry.gate->close();
}

}  // namespace moonpool::transport::host
