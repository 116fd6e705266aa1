#include "transport/tcp/channel.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

namespace {

Status await(int fd, short events, int timeout_ms) {
    pollfd waiting{fd, events, 0};
    for (;;) {
        int n = ::poll(&waiting, 1, timeout_ms);
        if (n > 0) return success();
        if (n < 0 && errno == EINTR) continue;
        return Error{Code::kTimeout, "no answer within " + std::to_string(timeout_ms) + " ms"};
    }
}

Error lost() {
    return Error{Code::kUnavailable, std::string("the connection is lost: ") + std::strerror(errno)};
}

Status receive(Channel& channel, void* data, size_t size, int timeout_ms) {
    auto* at = static_cast<std::byte*>(data);
    while (size != 0) {
        ssize_t n = ::recv(channel.fd.get(), at, size, MSG_DONTWAIT);
        if (n == 0) return Error{Code::kUnavailable, "the peer closed the connection"};
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return lost();
            if (Status status = await(channel.fd.get(), POLLIN, timeout_ms); !status) return status;
            continue;
        }
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

}  // namespace

Result<std::vector<std::byte>> exchange(Channel& channel, Kind kind, const std::vector<std::byte>& body,
                                        int timeout_ms) {
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
            if (Status status = await(channel.fd.get(), POLLOUT, timeout_ms); !status) return status.error();
            continue;
        }
        sent += static_cast<size_t>(n);
    }
    FrameHeader header;
    if (Status status = receive(channel, &header, sizeof(header), timeout_ms); !status) return status.error();
    if (header.magic != kMagic || header.version != kVersion || header.length > kControlBytesMax) {
        return Error{Code::kProtocol, "the peer does not speak the engine's protocol"};
    }
    std::vector<std::byte> answer;
    while (answer.size() < header.length) {  // memory follows the bytes that came
        size_t have = answer.size();
        size_t n = std::min<size_t>(header.length - have, 256u << 10);
        answer.resize(have + n);
        if (Status status = receive(channel, answer.data() + have, n, timeout_ms); !status) {
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
