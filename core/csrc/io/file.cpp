#include "io/file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

namespace moonpool::io {

namespace {

class RealFile : public File {
   public:
    RealFile(Fd fd, bool direct, uint64_t size) : fd_(std::move(fd)), direct_(direct), size_(size) {}

    ReadResult read(uint64_t offset, std::byte* to, size_t bytes) override {
        size_t done = 0;
        while (done != bytes) {
            ssize_t n = ::pread(fd_.get(), to + done, bytes - done, static_cast<off_t>(offset + done));
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return {errno, done};
            done += static_cast<size_t>(n);
            if (n == 0 || (done != bytes && stopped_at_the_end(*this, done))) return {kFileEnds, done};
        }
        return {0, done};
    }

    int write(uint64_t offset, const std::byte* from, size_t bytes) override {
        while (bytes != 0) {
            ssize_t n = ::pwrite(fd_.get(), from, bytes, static_cast<off_t>(offset));
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return errno;
            offset += static_cast<uint64_t>(n);
            from += n;
            bytes -= static_cast<size_t>(n);
        }
        return 0;
    }

    int sync() override { return ::fdatasync(fd_.get()) == 0 ? 0 : errno; }

    int reserve(uint64_t bytes) override {
        if (bytes < size_) return ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
        int error = ::posix_fallocate(fd_.get(), 0, static_cast<off_t>(bytes));
        if (error == EOPNOTSUPP || error == EINVAL) {
            error = ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
        }
        return error;
    }

    int lock() override { return ::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0 ? 0 : errno; }
    uint64_t size() const override { return size_; }
    bool direct() const override { return direct_; }
    int fd() const override { return fd_.get(); }

   private:
    Fd fd_;
    bool direct_;
    uint64_t size_;
};

}  // namespace

std::unique_ptr<File> file_of(Fd fd, bool direct, uint64_t size) {
    return std::make_unique<RealFile>(std::move(fd), direct, size);
}

}  // namespace moonpool::io
