#include "transport/host/unix_frame.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace moonpool::transport::host {

ssize_t send_part(int fd, const std::vector<std::byte>& frame, size_t from, int passed, int flags) {
    iovec part{const_cast<std::byte*>(frame.data()) + from, frame.size() - from};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (passed >= 0 && from == 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        cmsghdr* c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(c), &passed, sizeof(int));
    }
    return ::sendmsg(fd, &message, MSG_NOSIGNAL | flags);
}

Status send_frame(int fd, const std::vector<std::byte>& frame) {
    for (size_t sent = 0; sent < frame.size();) {
        ssize_t n = send_part(fd, frame, sent, -1, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return Error{Code::kUnavailable, std::string("the socket: ") + std::strerror(errno)};
        sent += static_cast<size_t>(n);
    }
    return success();
}

namespace {

Status receive(int fd, void* data, size_t size, Fd* passed) {
    auto* at = static_cast<std::byte*>(data);
    while (size != 0) {
        iovec part{at, size};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        ssize_t n = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) return Error{Code::kUnavailable, "the peer closed the socket"};
        if (n < 0) {
            return Error{errno == EAGAIN ? Code::kTimeout : Code::kUnavailable,
                         std::string("the socket: ") + std::strerror(errno)};
        }
        for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
                int number;
                std::memcpy(&number, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
                Fd owned(number);  // whatever was passed is closed unless it is asked for
                if (passed != nullptr) *passed = std::move(owned);
            }
        }
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

}  // namespace

Status receive_frame(int fd, FrameHeader& header, std::vector<std::byte>& body, uint32_t bytes_max,
                     Fd* passed) {
    if (Status status = receive(fd, &header, sizeof(header), passed); !status) return status;
    if (header.magic != kMagic || header.version != kVersion || header.length > bytes_max) {
        return Error{Code::kProtocol, "the socket brought no frame of this protocol"};
    }
    body.resize(header.length);
    return receive(fd, body.data(), body.size(), passed);
}

}  // namespace moonpool::transport::host
