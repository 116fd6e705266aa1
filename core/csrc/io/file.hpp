// File: all that the SSD tier and transfers ask of the operating system about one file; the seam for tests,
// whose files fail, tear, fill up or are slow.
//
// A direct() file passes the page cache by: offset, size and address are multiples of kBlockBytes (the
// address of what its device asks for). Calls may come from several threads at a time, for ranges that do not
// overlap.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/fd.hpp"

namespace moonpool::io {

inline constexpr uint64_t kBlockBytes = 4096;
inline uint64_t round_up_to_block(uint64_t n) { return (n + kBlockBytes - 1) & ~(kBlockBytes - 1); }

inline constexpr int kFileEnds = ENODATA;  // a read: the file has no more bytes

struct ReadResult {
    int error = 0;     // an errno
    size_t bytes = 0;  // that were read; with kFileEnds: all that there were
};

class File {
   public:
    virtual ~File() = default;

    // All of the bytes, or an error.
    virtual ReadResult read(uint64_t offset, std::byte* to, size_t bytes) = 0;
    virtual int write(uint64_t offset, const std::byte* from, size_t bytes) = 0;  // 0, or an errno
    virtual int sync() = 0;                       // what was written before survives a power failure
    virtual int reserve(uint64_t bytes) = 0;      // the file has that length, and the disk the room for it
    virtual int lock() = 0;                       // EWOULDBLOCK: another process has it
    virtual uint64_t size() const = 0;            // when it was opened
    virtual bool direct() const { return true; }  // the page cache is passed by
    virtual int fd() const { return -1; }         // for io_uring; -1: only by the calls above
};

std::unique_ptr<File> file_of(Fd fd, bool direct, uint64_t size);

// A read past the page cache that stopped early: whether it did so at the file's end, which no disk has in
// the middle of a sector.
inline bool stopped_at_the_end(const File& file, size_t moved) { return file.direct() && moved % 512 != 0; }

}  // namespace moonpool::io
