#include "io/opened_file.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace moonpool::io {

namespace {

constexpr uint64_t kBytesMax = uint64_t{1} << 62;
constexpr uint64_t kBlockBytesMax = 64u << 10;

Error cannot_open(const std::string& path, const std::string& why) {
    return Error{Code::kInvalidArgument, "the file " + path + " cannot be opened: " + why};
}

// The reason why a file can be read and not written.
bool only_readable(int error) {
    return error == EACCES || error == EPERM || error == EROFS || error == ETXTBSY;
}

// Looked at before it is opened: to open a FIFO waits for its other end.
Status check_kind(const std::string& path, bool create) {
    struct stat about {};
    if (::stat(path.c_str(), &about) != 0) {
        if (errno == ENOENT && create) return success();
        std::string hint = errno == ENOENT ? "; give a size to make it" : "";
        return cannot_open(path, std::strerror(errno) + hint);
    }
    if (S_ISREG(about.st_mode) || S_ISBLK(about.st_mode)) return success();
    return cannot_open(path, "it is neither a file nor a block device");
}

struct Alignment {
    uint64_t block_bytes = kBlockBytes;
    uint32_t memory = 512;
    bool direct = true;
};

// What direct reads and writes of it ask for. A block is a page at least: an edge's page is no other write's.
Alignment alignment_of(int fd) {
    Alignment found;
#ifdef STATX_DIOALIGN
    struct statx about {};
    if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) == 0 &&
        (about.stx_mask & STATX_DIOALIGN) != 0) {
        found.direct = about.stx_dio_offset_align != 0 && about.stx_dio_offset_align <= kBlockBytesMax;
        found.block_bytes = std::max<uint64_t>(kBlockBytes, about.stx_dio_offset_align);
        found.memory = std::bit_ceil(std::max(about.stx_dio_mem_align, 1u));
    }
#else
    (void)fd;
#endif
    return found;
}

Status lengthen(int fd, const std::string& path, uint64_t bytes) {
    off_t length = ::lseek(fd, 0, SEEK_END);
    if (length < 0) return os_error("asking for the length of " + path);
    if (static_cast<uint64_t>(length) >= bytes) return success();
    struct stat about {};
    if (::fstat(fd, &about) == 0 && S_ISBLK(about.st_mode)) {
        return Error{Code::kTooLarge, "the device " + path + " has " + std::to_string(length) +
                                          " bytes, not " + std::to_string(bytes)};
    }
    if (::ftruncate(fd, static_cast<off_t>(bytes)) == 0) return success();
    return os_error("making " + path + " " + std::to_string(bytes) + " bytes long");
}

}  // namespace

Result<std::shared_ptr<OpenedFile>> OpenedFile::open(const std::string& path, const OpenOptions& options) {
    if (path.empty() || path.find('\0') != std::string::npos) {
        return Error{Code::kInvalidArgument,
                     "a file is opened by its path, which is neither empty nor has a NUL"};
    }
    const bool create = options.bytes.has_value();
    if (create && (!options.writable || *options.bytes > kBytesMax)) {
        return cannot_open(path, options.writable ? "no file has " + std::to_string(*options.bytes) + " bytes"
                                                  : "a size is for a file that is to be written");
    }
    if (Status sound = check_kind(path, create); !sound) return sound.error();
    Parts parts;
    parts.path = path;
    int flags = O_CLOEXEC | O_NOCTTY | (options.writable ? O_RDWR : O_RDONLY) | (create ? O_CREAT : 0);
    if (!options.writable) parts.read_only = "it was opened for reading only";
    Fd plain(::open(path.c_str(), flags | (options.writable ? O_DSYNC : 0), 0600));
    if (!plain.valid() && options.writable && !create && only_readable(errno)) {
        parts.read_only = std::strerror(errno);
        flags = O_CLOEXEC | O_NOCTTY | O_RDONLY;
        plain.reset(::open(path.c_str(), flags));
    }
    if (!plain.valid()) return cannot_open(path, std::strerror(errno));
    if (create) {
        if (Status made = lengthen(plain.get(), path, *options.bytes); !made) return made.error();
    }
    // By its number, not by its path: it is the same file, whatever the path names by now.
    std::string again = "/proc/self/fd/" + std::to_string(plain.get());
    Alignment alignment = alignment_of(plain.get());
    Fd direct;
    if (alignment.direct) direct.reset(::open(again.c_str(), (flags & ~O_CREAT) | O_DIRECT));
    if (direct.valid()) {
        parts.blocks = file_of(std::move(direct), true, 0);
        parts.edges = file_of(std::move(plain), false, 0);
        parts.block_bytes = alignment.block_bytes;
        parts.memory_align = alignment.memory;
    } else {
        // Every write would wait for the disk.
        if (Fd cached(::open(again.c_str(), flags & ~O_CREAT)); cached.valid()) plain = std::move(cached);
        parts.blocks = file_of(std::move(plain), false, 0);
    }
    return std::make_shared<OpenedFile>(std::move(parts));
}

Result<uint64_t> OpenedFile::look() {
    uint64_t bytes = parts_.blocks->size();
    if (int fd = parts_.blocks->fd(); fd >= 0) {
        off_t end = ::lseek(fd, 0, SEEK_END);  // of a device, too; no read or write uses the position
        if (end < 0) return os_error("asking for the length of " + parts_.path);
        bytes = static_cast<uint64_t>(end);
    }
    length_ = bytes;
    return bytes;
}

}  // namespace moonpool::io
