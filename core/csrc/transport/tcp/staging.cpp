#include "transport/tcp/staging.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace moonpool::transport::tcp {

std::pair<size_t, size_t> Cursor::next(size_t bytes, iovec* out) const {
    size_t ranges = 0, all = 0, at = at_;
    for (size_t i = part_; i < count_ && all < bytes; ++i, at = 0) {
        size_t n = std::min(parts_[i].iov_len - at, bytes - all);
        if (n == 0) continue;
        out[ranges++] = {static_cast<std::byte*>(parts_[i].iov_base) + at, n};
        all += n;
    }
    return {ranges, all};
}

void Cursor::advance(size_t bytes) {
    while (bytes != 0) {
        size_t n = std::min(bytes, left_of_part());
        at_ += n;
        bytes -= n;
        skip_empty();
    }
}

void Cursor::skip_empty() {
    while (part_ < count_ && at_ == parts_[part_].iov_len) {
        ++part_;
        at_ = 0;
    }
}

// Its pages are reserved: one that could not be had later would be a SIGBUS.
Result<std::unique_ptr<Staging>> Staging::make() {
    Fd fd(::memfd_create("moonpool-tls", MFD_CLOEXEC));
    if (!fd.valid() || ::fallocate(fd.get(), 0, 0, kStagingBytes) != 0) {
        int error = errno;
        const char* remedy = error == EMFILE || error == ENFILE ? "raise the limit of open files (ulimit -n)"
                                                                : "give the process more memory";
        return Error{Code::kOs, std::string("no memory that TLS copies through can be had: ") +
                                    std::strerror(error) + "; " + remedy};
    }
    Result<Mapping> mapping = Mapping::map(fd.get(), kStagingBytes, true);
    if (!mapping) return mapping.error();
    return std::unique_ptr<Staging>(new Staging(std::move(fd), std::move(*mapping)));
}

ssize_t Staging::gather(const iovec* ranges, size_t count) const {
    ssize_t n;
    do {
        n = ::pwritev(fd_.get(), ranges, static_cast<int>(count), 0);
    } while (n < 0 && errno == EINTR);
    return n;
}

bool Staging::scatter(Cursor& to, size_t bytes, std::vector<size_t>* unmapped) const {
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
        if (n == 0) errno = EIO;
        if (n == 0 || errno != EFAULT || unmapped == nullptr) return false;
        if (unmapped->empty() || unmapped->back() != to.part()) unmapped->push_back(to.part());
        size_t skipped = std::min(to.left_of_part(), bytes - done);
        to.advance(skipped);
        done += skipped;
    }
    return true;
}

Status StagingPool::reserve() {
    MutexLock lock(mutex_);
    if (made_ == kMost) return success();
    Result<std::unique_ptr<Staging>> made = Staging::make();
    if (!made) return made_ != 0 ? success() : Status(made.error());
    free_.push_back(std::move(*made));
    ++made_;
    free_again_.notify_one();
    return success();
}

StagingPool::Lease StagingPool::take() {
    MutexLock lock(mutex_);
    free_again_.wait(lock, [this]() REQUIRES(mutex_) { return !free_.empty(); });
    std::unique_ptr<Staging> staging = std::move(free_.back());
    free_.pop_back();
    return {*this, std::move(staging)};
}

void StagingPool::give_back(std::unique_ptr<Staging> staging) {
    MutexLock lock(mutex_);
    free_.push_back(std::move(staging));
    free_again_.notify_one();
}

}  // namespace moonpool::transport::tcp
