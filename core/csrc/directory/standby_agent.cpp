#include "directory/standby_agent.hpp"

#include <sys/socket.h>

#include <cstring>

#include "base/fork.hpp"
#include "directory/range_handshake.hpp"
#include "wire/dial.hpp"
#include "wire/error_frame.hpp"
#include "wire/frame_reader.hpp"
#include "wire/limits.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kMirrorFrameMax = 64u << 20;

}  // namespace

StandbyAgent::StandbyAgent(StandbyAgentOptions options, StandbyHooks hooks)
    : options_(std::move(options)), hooks_(std::move(hooks)) {}

StandbyAgent::~StandbyAgent() { stop(); }

Status StandbyAgent::start() {
    if (thread_.started()) return success();
    stopping_ = false;
    return thread_.start("mp-standby", [this] { run(); });
}

void StandbyAgent::stop() {
    if (!thread_.in_child()) {
        MutexLock lock(mutex_);
        stopping_ = true;
        if (int fd = live_fd_.load(); fd >= 0) ::shutdown(fd, SHUT_RD);
        wake_.notify_all();
    }
    (void)thread_.join();
}

void StandbyAgent::run() {
    while (!stopping_) {
        if (std::string owner = hooks_.owner(); !owner.empty()) {
            Status status = follow_one(owner);
            if (!status && !stopping_) hooks_.lost(status.error().text);
        }
        MutexLock lock(mutex_);
        wake_.wait_for(lock, std::chrono::milliseconds(options_.pause_ms),
                       [this] { return stopping_.load(); });
    }
}

// One connection, to its end.
Status StandbyAgent::follow_one(const std::string& owner) {
    DialOptions to;
    to.address = owner;
    to.token = options_.token;
    to.service = kServiceStandby;
    to.timeout_ms = options_.silent_ms;
    to.given_up = &stopping_;
    to.tls = options_.tls;
    Result<Dialed> dialed = dial_range(to, options_.range);
    if (!dialed) return dialed.error();
    // One of the release before does not say it.
    const std::optional<MasterList> masters = masters_of(dialed->welcome);
    const std::string address = masters && masters->own != 0 ? masters->own_address() : owner;
    ControlSocket socket{std::move(dialed->fd), std::move(dialed->tls), options_.silent_ms};
    ClosedInChildren closed_in_children(socket.fd);
    {
        MutexLock lock(mutex_);  // stop() shuts down what is noted here
        if (stopping_) return success();
        live_fd_ = socket.fd.get();
    }
    Status status = [&]() -> Status {
        if (!hooks_.begin(address)) return Error{Code::kTimeout, "this master's loop did not answer in time"};
        std::vector<std::byte> out;
        size_t hello = begin_frame(out, Kind::kMirror, kFlagOneWay, 0);
        Writer w(out);
        w.text16(options_.name);
        w.text16(options_.address);
        finish_frame(out, hello);
        if (Status sent = send(socket, out); !sent) return sent;
        std::vector<std::byte> body;
        for (;;) {
            FrameHeader header;
            if (Status got = receive(socket, &header, sizeof(header)); !got) {
                // The last word: this master does not take over.
                out.clear();
                finish_frame(out, begin_frame(out, Kind::kLeave, kFlagOneWay, 0));
                if (stopping_) (void)send(socket, out);
                return got;
            }
            if (unfit(header, kMirrorFrameMax, "master", "")) {
                return Error{Code::kProtocol, owner + " does not speak the protocol of a master"};
            }
            body.resize(header.length);
            if (Status got = receive(socket, body.data(), body.size()); !got) return got;
            Reader reader(body);
            if (header.kind == Kind::kError) return read_error(reader);
            if (header.kind == Kind::kHandOver) {
                hooks_.refused(read_error(reader));
                continue;
            }
            uint64_t number = 0;
            if (header.kind != Kind::kMirror || !hooks_.follow(reader, number)) {
                return Error{Code::kProtocol, "a frame of the owner at " + owner + " makes no sense"};
            }
            out.clear();
            size_t at = begin_frame(out, Kind::kMirrored, kFlagOneWay, 0);
            Writer(out).number(number);
            finish_frame(out, at);
            std::string asks_for;
            {
                MutexLock lock(mutex_);
                asks_for.swap(asks_for_);
            }
            if (!asks_for.empty()) {
                size_t ask = begin_frame(out, Kind::kHandOver, kFlagOneWay, 0);
                Writer w(out);
                w.text16(asks_for);
                w.number(hooks_.told());
                finish_frame(out, ask);
            }
            if (Status sent = send(socket, out); !sent) return sent;
        }
    }();
    MutexLock lock(mutex_);
    live_fd_ = -1;
    return status;
}

Status StandbyAgent::send(ControlSocket& socket, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        ssize_t n = socket.send(bytes.data(), bytes.size(), true);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return Error{Code::kUnavailable, "it took no bytes in time"};
        bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return success();
}

Status StandbyAgent::receive(ControlSocket& socket, void* data, size_t size) {
    auto* at = static_cast<std::byte*>(data);
    while (size != 0) {
        ssize_t n = socket.receive(at, size, true);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            return Error{Code::kTimeout, "it is silent"};
        }
        if (n <= 0) return Error{Code::kUnavailable, "its connection is lost"};
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

}  // namespace moonpool
