#include "store/node/out_queue.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace moonpool {

void OutQueue::truncate(size_t size) { frames_.resize(std::max(sent_, std::min(frames_.size(), size))); }

size_t OutQueue::gather(iovec* parts, size_t parts_max, uint64_t max) const {
    size_t n = 0;
    size_t at = sent_;
    uint64_t bytes = 0;
    auto frames_until = [&](size_t end) {
        if (end == at || n == parts_max) return;
        parts[n++] = iovec{const_cast<std::byte*>(frames_.data()) + at, end - at};
        bytes += end - at;
        at = end;
    };
    for (const OutPiece& piece : pieces_) {
        frames_until(piece.at);
        if (n == parts_max || bytes >= max) return n;
        parts[n++] = iovec{const_cast<std::byte*>(piece.data), std::min(piece.size, max - bytes)};
        bytes += parts[n - 1].iov_len;
        if (parts[n - 1].iov_len < piece.size) return n;
    }
    frames_until(frames_.size());
    return n;
}

void OutQueue::advance(uint64_t n, std::vector<OutPiece>& done) {
    while (n != 0) {
        size_t frames_end = pieces_.empty() ? frames_.size() : pieces_.front().at;
        if (sent_ < frames_end) {
            uint64_t step = std::min<uint64_t>(n, frames_end - sent_);
            sent_ += step;
            n -= step;
            continue;
        }
        OutPiece& piece = pieces_.front();
        uint64_t step = std::min(n, piece.size);
        piece.data += step;
        piece.size -= step;
        piece_bytes_ -= step;
        n -= step;
        if (piece.size == 0) {
            done.push_back(piece);
            pieces_.pop_front();
        }
    }
    if (sent_ == frames_.size() && pieces_.empty()) {
        if (frames_.capacity() > (1u << 20)) frames_ = {};
        frames_.clear();
        sent_ = 0;
    }
}

bool OutQueue::flush(int fd, TlsStream* tls, uint64_t max, std::vector<OutPiece>& done, uint64_t& moved) {
    constexpr size_t kParts = 64;
    iovec parts[kParts];
    uint64_t sent = 0;
    if (tls != nullptr && !tls->flush(fd)) return errno == EAGAIN;
    while (backlog() != 0 && sent < max) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = gather(parts, kParts, max - sent);
        ssize_t n = tls != nullptr ? tls->send(fd, parts, message.msg_iovlen)
                                   : ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN;
        }
        moved += static_cast<uint64_t>(n);
        sent += static_cast<uint64_t>(n);
        advance(static_cast<uint64_t>(n), done);
    }
    return true;
}

}  // namespace moonpool
