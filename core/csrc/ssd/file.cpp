#include "ssd/file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

namespace moonpool::ssd {

namespace {

class RealFile : public File {
   public:
    RealFile(Fd fd, bool direct, uint64_t size) : fd_(std::move(fd)), direct_(direct), size_(size) {}

    int read(uint64_t offset, std::byte* to, size_t bytes) override {
        while (bytes != 0) {
            ssize_t n = ::pread(fd_.get(), to, bytes, static_cast<off_t>(offset));
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return errno;
            if (n == 0) return EIO;  // the file is shorter than it was made
            offset += static_cast<uint64_t>(n);
            to += n;
            bytes -= static_cast<size_t>(n);
        }
        return 0;
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

// The directory is made, or is empty, or has the file already.
Status prepare_directory(const std::string& path) {
    namespace fs = std::filesystem;
    fs::path directory = fs::path(path).parent_path();
    if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
        return os_error("making " + directory.string());
    std::error_code error;
    if (fs::exists(path, error)) return success();
    fs::directory_iterator entries(directory, error);
    if (error) return Error{Code::kOs, "reading " + directory.string() + ": " + error.message()};
    for (const fs::directory_entry& entry : entries) {
        if (entry.path().filename() == "lost+found") continue;
        return Error{Code::kInvalidArgument, directory.string() + " holds files that are not moonpool's (" +
                                                 entry.path().filename().string() +
                                                 "); give an empty directory"};
    }
    return success();
}

}  // namespace

Result<std::unique_ptr<File>> open_file(const std::string& path) {
    if (Status fit = prepare_directory(path); !fit) return fit.error();
    constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    bool direct = true;
    Fd fd(::open(path.c_str(), kFlags | O_DIRECT, 0600));
    if (!fd.valid() && errno == EINVAL) {
        direct = false;
        fd.reset(::open(path.c_str(), kFlags, 0600));
    }
    if (!fd.valid()) return os_error("opening " + path);
    struct stat about {};
    if (::fstat(fd.get(), &about) != 0) return os_error("opening " + path);
    return std::unique_ptr<File>(new RealFile(std::move(fd), direct, static_cast<uint64_t>(about.st_size)));
}

}  // namespace moonpool::ssd
