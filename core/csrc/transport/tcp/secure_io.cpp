#include "transport/tcp/secure_io.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/tsan.hpp"
#include "memory/mapping.hpp"

namespace moonpool::transport::tcp {

namespace {

constexpr size_t kStagingBytes = 8 * kTlsRecordBytes;

// A place within a list of ranges, which moves forward.
class Cursor {
   public:
    Cursor(const iovec* parts, size_t count) : parts_(parts), count_(count) { skip_empty(); }

    bool at_end() const { return part_ == count_; }
    size_t part() const { return part_; }
    size_t left_of_part() const { return parts_[part_].iov_len - at_; }
    // The next `bytes` at most, as ranges in `out`; -> how many ranges, and their bytes.
    std::pair<size_t, size_t> next(size_t bytes, iovec* out) const {
        size_t ranges = 0, all = 0, at = at_;
        for (size_t i = part_; i < count_ && all < bytes; ++i, at = 0) {
            size_t n = std::min(parts_[i].iov_len - at, bytes - all);
            if (n == 0) continue;
            out[ranges++] = {static_cast<std::byte*>(parts_[i].iov_base) + at, n};
            all += n;
        }
        return {ranges, all};
    }
    void advance(size_t bytes) {
        while (bytes != 0) {
            size_t n = std::min(bytes, left_of_part());
            at_ += n;
            bytes -= n;
            skip_empty();
        }
    }

   private:
    void skip_empty() {
        while (part_ < count_ && at_ == parts_[part_].iov_len) {
            ++part_;
            at_ = 0;
        }
    }

    const iovec* parts_;
    size_t count_, part_ = 0, at_ = 0;
};

class Staging {
   public:
    // Null: errno says why.
    static const Staging* of_this_thread() {
        static thread_local std::optional<Staging> staging;
        // A child of fork() would share the memory with its parent.
        if (!staging || staging->fork_.in_child()) staging.emplace();
        if (staging->mapping_.data() != nullptr) return &*staging;
        staging.reset();
        errno = ENOMEM;
        return nullptr;
    }

    // Its pages are reserved: one that could not be had later would be a SIGBUS.
    Staging() : fd_(::memfd_create("moonpool-tls", MFD_CLOEXEC)) {
        if (!fd_.valid() || ::fallocate(fd_.get(), 0, 0, kStagingBytes) != 0) return;
        Result<Mapping> mapping = Mapping::map(fd_.get(), kStagingBytes, true);
        if (mapping) mapping_ = std::move(*mapping);
    }

    std::byte* data() const { return mapping_.data(); }

    // -> bytes until the first that is not mapped, at most kStagingBytes; -1: errno says why.
    ssize_t gather(const iovec* ranges, size_t count) const {
        ssize_t n;
        do {
            n = ::pwritev(fd_.get(), ranges, static_cast<int>(count), 0);
        } while (n < 0 && errno == EINTR);
        return n;
    }

    // The first `bytes` of it. Parts that are not mapped are told and skipped. False: errno says why.
    bool scatter(Cursor& to, size_t bytes, std::vector<size_t>* unmapped) const {
        for (size_t done = 0; done < bytes;) {
            iovec ranges[kPartsMax];
            size_t count = to.next(bytes - done, ranges).first;
            ssize_t n = ::preadv(fd_.get(), ranges, static_cast<int>(count), static_cast<off_t>(done));
            if (n < 0 && errno == EINTR) continue;
            if (n > 0) {  // less than all: the next call begins with what is not mapped, and says so
                to.advance(static_cast<size_t>(n));
                done += static_cast<size_t>(n);
                continue;
            }
            if (n == 0 || errno != EFAULT || unmapped == nullptr) return false;
            if (unmapped->empty() || unmapped->back() != to.part()) unmapped->push_back(to.part());
            size_t skipped = std::min(to.left_of_part(), bytes - done);
            to.advance(skipped);
            done += skipped;
        }
        return true;
    }

   private:
    ForkGuard fork_;
    Fd fd_;
    Mapping mapping_;
};

}  // namespace

ssize_t SecureSocket::receive(const iovec* parts, size_t count, bool may_fault,
                              std::vector<size_t>* unmapped) const {
    OrderedByThePeer scope;  // others may use the same memory: what orders that is the peers' agreement
    if (tls == nullptr) {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(parts);
        message.msg_iovlen = count;
        return ::recvmsg(fd, &message, MSG_DONTWAIT);
    }
    Cursor to(parts, count);
    if (!may_fault) {
        iovec ranges[kPartsMax];
        size_t n = to.next(kSecureTurnBytes, ranges).first;
        return tls->receive(fd, ranges, n);
    }
    const Staging* staging = Staging::of_this_thread();
    if (staging == nullptr) return -1;
    ssize_t all = 0;
    while (!to.at_end() && static_cast<size_t>(all) < kSecureTurnBytes) {
        iovec ranges[kPartsMax];
        iovec room{staging->data(), to.next(kStagingBytes, ranges).second};
        ssize_t n = tls->receive(fd, &room, 1);
        if (n <= 0) return all != 0 ? all : n;
        if (!staging->scatter(to, static_cast<size_t>(n), unmapped)) return -1;
        all += n;
        if (static_cast<size_t>(n) < room.iov_len) break;
    }
    return all;
}

ssize_t SecureSocket::send(const iovec* parts, size_t count, bool may_fault) const {
    OrderedByThePeer scope;
    if (tls == nullptr) {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(parts);
        message.msg_iovlen = count;
        return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (!tls->flush(fd)) return -1;  // before anything is copied that has no room
    const Staging* staging = may_fault ? Staging::of_this_thread() : nullptr;
    if (may_fault && staging == nullptr) return -1;
    ssize_t all = 0;
    for (Cursor from(parts, count); !from.at_end() && static_cast<size_t>(all) < kSecureTurnBytes;) {
        iovec ranges[kPartsMax];
        auto [n_ranges, bytes] = from.next(kStagingBytes, ranges);
        if (may_fault) {
            ssize_t n = staging->gather(ranges, n_ranges);
            if (n <= 0) return all != 0 ? all : -1;
            bytes = static_cast<size_t>(n);
            ranges[0] = {staging->data(), bytes};
            n_ranges = 1;
        }
        ssize_t sent = tls->send(fd, ranges, n_ranges);
        if (sent < 0) return all != 0 ? all : -1;
        from.advance(static_cast<size_t>(sent));
        all += sent;
        if (tls->unsent() || static_cast<size_t>(sent) < bytes) break;
    }
    return all;
}

bool copy_to_user(void* to, const void* from, size_t size) {
    const Staging* staging = Staging::of_this_thread();
    if (staging == nullptr) return false;
    while (size != 0) {
        iovec part{to, std::min(size, kStagingBytes)};
        std::memcpy(staging->data(), from, part.iov_len);
        Cursor cursor(&part, 1);
        if (!staging->scatter(cursor, part.iov_len, nullptr)) return false;
        to = static_cast<std::byte*>(to) + part.iov_len;
        from = static_cast<const std::byte*>(from) + part.iov_len;
        size -= part.iov_len;
    }
    return true;
}

}  // namespace moonpool::transport::tcp
