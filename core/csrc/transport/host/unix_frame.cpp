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

void UnixFrameReader::begin() {
    whole_ = false;
    at_ = 0;
    header_ = {};
    body_.clear();
    passed_.reset();
}

// The next bytes of the frame, to `data`.
Result<bool> UnixFrameReader::fill(int fd, void* data, size_t size) {
    size_t had = 0;
    while (had < size) {
        iovec part{static_cast<std::byte*>(data) + had, size - had};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        ssize_t n = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return false;
        if (n == 0) return Error{Code::kUnavailable, "the peer closed the socket"};
        if (n < 0) return Error{Code::kUnavailable, std::string("the socket: ") + std::strerror(errno)};
        for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
                int number;
                std::memcpy(&number, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
                passed_.reset(number);  // what was passed before it is closed
            }
        }
        had += static_cast<size_t>(n);
        at_ += static_cast<size_t>(n);
    }
    return true;
}

Result<bool> UnixFrameReader::read(int fd) {
    if (whole_) begin();
    if (at_ < sizeof(header_)) {
        Result<bool> filled = fill(fd, reinterpret_cast<std::byte*>(&header_) + at_, sizeof(header_) - at_);
        if (!filled || !*filled) return filled;
        if (header_.magic != kMagic || header_.version != kVersion || header_.length > bytes_max_) {
            return Error{Code::kProtocol, "the socket brought no frame of this protocol"};
        }
        body_.resize(header_.length);
    }
    size_t had = at_ - sizeof(header_);
    Result<bool> filled = fill(fd, body_.data() + had, body_.size() - had);
    whole_ = filled && *filled;
    return filled;
}

}  // namespace moonpool::transport::host
