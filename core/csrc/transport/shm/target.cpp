// The serving half of shared memory: hands gates and descriptors to initiators of this host, and takes
// them back.
//
// Threads: Listener and Session on the I/O thread of `loop_`; revoke(), drained() and close() on any. The
// bytes of transfers pass none of them: an initiator moves them by itself.
//
// Between two calls: gates_ has the gate of every session that has opened, and of no other; a session
// removes its own when its socket closes, so a process that died is inside of nothing. generation_ only
// grows, and every gate has it. A region is out of the table before revoke() is called: a list that is
// made afterwards, with the new generation, does not name it.
//
// Locks: mutex_ alone. The answer to an open is sent with it held: the socket's buffer takes it at once.
#include "transport/shm/target.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "base/hmac.hpp"
#include "transport/frames.hpp"
#include "transport/shm/link.hpp"
#include "transport/shm/unix_frame.hpp"
#include "wire/auth.hpp"
#include "wire/frame_reader.hpp"

namespace moonpool::transport::shm {

namespace {

constexpr uint32_t kFrameBytesMax = 4096;  // of a question
constexpr size_t kBacklogBytesMax = 4u << 20;

std::string hex(std::span<const uint8_t> bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string text;
    for (uint8_t byte : bytes) {
        text.push_back(digits[byte >> 4]);
        text.push_back(digits[byte & 15]);
    }
    return text;
}

// Abstract sockets have no file permissions: any user of the network namespace may connect.
bool same_user(int fd) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
    return peer.uid == ::geteuid() || peer.uid == 0;
}

}  // namespace

// One initiator's socket. It lives on the I/O thread; its gate goes when it ends.
class Target::Session final : public EventHandler {
   public:
    Session(Target& target, Fd fd) : target_(target), fd_(std::move(fd)) {}
    ~Session() override {
        // Its gate goes with it, and with the gate the slots that the process may have left occupied.
        if (id_ == 0) return;
        MutexLock lock(target_.mutex_);
        target_.gates_.erase(id_);
    }
    int fd() const { return fd_.get(); }

    bool on_events(uint32_t) override {
        for (;;) {
            std::span<std::byte> room = in_.room(4096);
            ssize_t n = ::recv(fd_.get(), room.data(), room.size(), MSG_DONTWAIT);
            if (n == 0) return false;
            if (n < 0) {
                if (errno == EINTR) continue;
                return errno == EAGAIN;
            }
            in_.received(static_cast<size_t>(n));
            if (!serve()) return false;
        }
    }

   private:
    bool serve() {
        while (std::optional<FrameHeader> header = in_.header()) {
            bool fits = !unfit(*header, kFrameBytesMax, "engine", "");
            std::optional<Reader> body = fits ? in_.body(*header) : std::nullopt;
            if (fits && !body) return true;
            if (!fits || !answer(*header, *body)) {
                target_.context_.counters.protocol_errors_total.fetch_add(1);
                return false;
            }
        }
        return true;
    }

    bool answer(const FrameHeader& header, Reader body) {
        // Until the cookie was shown nothing else is answered.
        if (header.kind == Kind::kShmOpen && id_ == 0) return open(header, body);
        if (id_ == 0) return false;
        if (header.kind == Kind::kEngineRegions) return regions(header, body);
        if (header.kind == Kind::kShmMap) return map(header, body);
        return false;
    }

    bool open(const FrameHeader& header, Reader body) {
        std::string_view cookie = body.bytes(32);
        std::string_view host_id = body.text16();
        std::string_view boot_id = body.text16();
        if (!body.done()) return false;
        const Identity& self = target_.context_.identity;
        auto bytes = std::span(reinterpret_cast<const uint8_t*>(cookie.data()), cookie.size());
        if (!equal_constant_time(target_.cookie_, bytes)) {
            return refuse(header, Code::kAuth, "the cookie of the handshake is wrong");
        }
        if (self.boot_id.empty() || boot_id != self.boot_id || host_id != self.host_id) {
            return refuse(header, Code::kUnavailable, "the two processes are on different hosts");
        }
        MutexLock lock(target_.mutex_);
        if (target_.gates_.size() >= kSessionsMax) {
            return refuse(header, Code::kTooLarge,
                          "the engine already serves " + std::to_string(kSessionsMax) +
                              " processes by shared memory, the limit");
        }
        Result<std::unique_ptr<Gate>> gate = Gate::create(target_.generation_);
        if (!gate) return refuse(header, gate.error().code, gate.error().text);
        std::shared_ptr<Gate> shared = std::move(*gate);
        id_ = target_.next_session_++;
        target_.gates_[id_] = shared;
        Writer w = begin(header);
        w.number(shared->page().nonce);
        // Where the initiator looks into this process by process_vm_readv, to learn whether it may, and
        // whether this is the process that it means.
        w.number(reinterpret_cast<uint64_t>(&shared->page()));
        return finish(shared->fd());
    }

    bool regions(const FrameHeader& header, Reader body) {
        std::optional<uint16_t> version = decode_regions_question(body);
        if (!version) return false;
        uint64_t generation;
        {
            // The generation first: a list that is newer than it is only asked for once more.
            MutexLock lock(target_.mutex_);
            generation = target_.generation_;
        }
        Writer w = begin(header);
        w.number(generation);
        encode_regions(w, *target_.context_.regions->all(), *version);
        return finish(-1);
    }

    bool map(const FrameHeader& header, Reader body) {
        auto id = body.number<uint64_t>();
        if (!body.done()) return false;
        std::shared_ptr<Region> region = target_.context_.regions->by_id(id);
        if (region == nullptr || region->memory == nullptr) {
            return refuse(header, Code::kInvalidArgument, "that region is not registered any more");
        }
        Writer w = begin(header);
        // The region may be deregistered before the initiator has mapped it: the generation has changed
        // then, and the gate refuses it.
        w.number(region->memory->size());
        return finish(region->memory->fd());
    }

    bool refuse(const FrameHeader& header, Code code, const std::string& text) {
        FrameHeader error = header;
        error.kind = Kind::kError;
        Writer w = begin(error);
        w.number(static_cast<uint16_t>(code));
        w.text16(text);
        return finish(-1);
    }

    Writer begin(const FrameHeader& header) {
        out_.clear();
        begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
        return Writer(out_);
    }
    // An initiator asks one question at a time and reads the answer at once; the socket's buffer takes it, or
    // the initiator is not one of ours.
    bool finish(int passed) {
        finish_frame(out_, 0);
        return out_.size() <= kBacklogBytesMax && send_frame(fd_.get(), out_, passed).ok();
    }

    Target& target_;
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
    uint64_t id_ = 0;
    FrameReader in_;
    std::vector<std::byte> out_;
};

class Target::Listener final : public EventHandler {
   public:
    Listener(Target& target, Fd fd) : target_(target), fd_(std::move(fd)) {}
    int fd() const { return fd_.get(); }

    bool on_events(uint32_t) override {
        for (int round = 0; round < 64; ++round) {
            Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
            if (!fd.valid()) return true;
            if (!same_user(fd.get())) continue;
            // Answers are sent blocking, so a reader that does not read is cut off soon.
            timeval tv{0, 200000};
            ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
            int number = fd.get();
            target_.loop_.add(number, EPOLLIN, std::make_shared<Session>(target_, std::move(fd)));
        }
        return true;
    }

   private:
    Target& target_;
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
};

Target::Target(const Context& context)
    : context_(context),
      loop_(*context.loops.front()),
      socket_("moonpool-engine-" + hex(context.identity.segment)),
      cookie_(random_nonce()) {}

Target::~Target() { close(); }

Status Target::start() {
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

uint64_t Target::revoke() {
    MutexLock lock(mutex_);
    ++generation_;
    // With the lock, so that a gate made at this moment starts with the new generation.
    for (auto& [id, gate] : gates_) gate->revoke(generation_);
    return generation_;
}

bool Target::drained(uint64_t generation) {
    MutexLock lock(mutex_);
    for (auto& [id, gate] : gates_) {
        if (!gate->drained(generation)) return false;
    }
    return true;
}

void Target::close() {
    MutexLock lock(mutex_);
    for (auto& [id, gate] : gates_) gate->close();
}

}  // namespace moonpool::transport::shm
