#include "transport/tcp/channel.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

namespace {

constexpr int kLookMs = 50;  // how often a waiting question looks whether it was given up

struct Patience {
    int timeout_ms;
    const std::atomic<bool>* given_up;

    Status await(int fd, short events) const {
        for (int left_ms = timeout_ms; left_ms > 0; left_ms -= kLookMs) {
            if (given_up != nullptr && given_up->load()) {
                return Error{Code::kClosed, "the segment was closed"};
            }
            pollfd waiting{fd, events, 0};
            if (::poll(&waiting, 1, std::min(left_ms, kLookMs)) > 0) return success();
        }
        return Error{Code::kTimeout, "no answer within " + std::to_string(timeout_ms) + " ms"};
    }
};

Error lost() {
    return Error{Code::kUnavailable, std::string("the connection is lost: ") + std::strerror(errno)};
}

Status receive(Channel& channel, void* data, size_t size, const Patience& patience) {
    auto* at = static_cast<std::byte*>(data);
    while (size != 0) {
        ssize_t n = ::recv(channel.fd.get(), at, size, MSG_DONTWAIT);
        if (n == 0) return Error{Code::kUnavailable, "the peer closed the connection"};
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return lost();
            if (Status status = patience.await(channel.fd.get(), POLLIN); !status) return status;
            continue;
        }
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

}  // namespace

Result<std::vector<std::byte>> exchange(Channel& channel, Kind kind, const std::vector<std::byte>& body,
                                        int timeout_ms, const std::atomic<bool>* given_up) {
    const Patience patience{timeout_ms, given_up};
    uint64_t id = channel.next_request++;
    std::vector<std::byte> frame;
    begin_frame(frame, kind, 0, id);
    Writer(frame).bytes(body.data(), body.size());
    finish_frame(frame, 0);
    for (size_t sent = 0; sent < frame.size();) {
        ssize_t n =
            ::send(channel.fd.get(), frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return lost();
            if (Status status = patience.await(channel.fd.get(), POLLOUT); !status) return status.error();
            continue;
        }
        sent += static_cast<size_t>(n);
    }
    FrameHeader header;
    if (Status status = receive(channel, &header, sizeof(header), patience); !status) return status.error();
    if (header.magic != kMagic || header.version != kVersion || header.length > kControlBytesMax) {
        return Error{Code::kProtocol, "the peer does not speak the engine's protocol"};
    }
    std::vector<std::byte> answer;
    while (answer.size() < header.length) {  // memory follows the bytes that came
        size_t have = answer.size();
        size_t n = std::min<size_t>(header.length - have, 256u << 10);
        answer.resize(have + n);
        if (Status status = receive(channel, answer.data() + have, n, patience); !status) {
            return status.error();
        }
    }
    Reader reader(answer);
    if (header.kind == Kind::kError) return read_error(reader);
    if (header.kind != kind || header.request_id != id) {
        return Error{Code::kProtocol, "the peer sent an answer that does not fit the question"};
    }
    return answer;
}

}  // namespace moonpool::transport::tcp
