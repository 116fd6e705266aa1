// Memory through which bytes inside TLS pass where OpenSSL may not copy by itself: memory that a user has
// registered, and may unmap, and ranges that are too small for a TLS record each.
//
// Staging      a memfd and its mapping. pwritev(2) and preadv(2) copy between it and memory of users, and
//              meet the EFAULT of what is not mapped, where a copy by code of this process would be a
//              SIGSEGV. They reach what recvmsg and sendmsg reach, pinned memory of cards' drivers included,
//              and need no right that a container may lack, as process_vm_readv does.
// StagingPool  those of one engine. A connection reserves before it is made, so that no descriptor and no
//              memory can be missing when it is used. Any thread; take() waits for copies of other threads
//              alone, never for a peer.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "memory/mapping.hpp"
#include "wire/tls.hpp"

namespace moonpool::transport::tcp {

inline constexpr size_t kPartsMax = 1024;
inline constexpr size_t kStagingBytes = 8 * kTlsRecordBytes;

// A place within a list of ranges, which moves forward.
class Cursor {
   public:
    Cursor(const iovec* parts, size_t count) : parts_(parts), count_(count) { skip_empty(); }

    bool at_end() const { return part_ == count_; }
    size_t part() const { return part_; }
    size_t left_of_part() const { return parts_[part_].iov_len - at_; }
    // The next `bytes` at most, as ranges in `out`; -> how many ranges, and their bytes.
    std::pair<size_t, size_t> next(size_t bytes, iovec* out) const;
    void advance(size_t bytes);

   private:
    void skip_empty();

    const iovec* parts_;
    size_t count_, part_ = 0, at_ = 0;
};

class Staging {
   public:
    static Result<std::unique_ptr<Staging>> make();

    std::byte* data() const { return mapping_.data(); }
    // -> bytes until the first that is not mapped, at most kStagingBytes; -1: errno says why.
    ssize_t gather(const iovec* ranges, size_t count) const;
    // The first `bytes` of it. The number of each part that is not mapped is told in `unmapped` (null: fails
    // with EFAULT), and it is skipped. False: errno says why.
    bool scatter(Cursor& to, size_t bytes, std::vector<size_t>* unmapped) const;

   private:
    Staging(Fd fd, Mapping mapping) : fd_(std::move(fd)), mapping_(std::move(mapping)) {}

    Fd fd_;
    Mapping mapping_;
};

class StagingPool {
   public:
    static constexpr size_t kMost = 32;  // threads that copy at once

    // For one more connection: one more Staging where there can be one. An error: there is none at all.
    Status reserve() EXCLUDES(mutex_);

    class Lease {
       public:
        Lease(StagingPool& pool, std::unique_ptr<Staging> staging)
            : pool_(pool), staging_(std::move(staging)) {}
        ~Lease() { pool_.give_back(std::move(staging_)); }
        Lease(const Lease&) = delete;
        const Staging* operator->() const { return staging_.get(); }

       private:
        StagingPool& pool_;
        std::unique_ptr<Staging> staging_;
    };
    // Behind a reserve() that succeeded.
    Lease take() EXCLUDES(mutex_);

   private:
    void give_back(std::unique_ptr<Staging> staging) EXCLUDES(mutex_);

    Mutex mutex_;
    CondVar free_again_;
    std::vector<std::unique_ptr<Staging>> free_ GUARDED_BY(mutex_);
    size_t made_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool::transport::tcp
