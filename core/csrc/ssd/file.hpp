// File: all that the SSD tier asks of the operating system about one file; the seam for tests, whose files
// fail, tear, fill up or are slow.
//
// Reads and writes return 0 or an errno, and move all of the bytes or fail. Offset, size and address are
// multiples of kBlockBytes. They may be called from several threads at a time, for ranges that do not
// overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/fd.hpp"
#include "base/result.hpp"

namespace moonpool::ssd {

inline constexpr uint64_t kBlockBytes = 4096;
inline uint64_t round_up_to_block(uint64_t n) { return (n + kBlockBytes - 1) & ~(kBlockBytes - 1); }

class File {
   public:
    virtual ~File() = default;

    virtual int read(uint64_t offset, std::byte* to, size_t bytes) = 0;
    virtual int write(uint64_t offset, const std::byte* from, size_t bytes) = 0;
    virtual int sync() = 0;                       // what was written before survives a power failure
    virtual int reserve(uint64_t bytes) = 0;      // the file has that length, and the disk the room for it
    virtual int lock() = 0;                       // EWOULDBLOCK: another process has it
    virtual uint64_t size() const = 0;            // when it was opened
    virtual bool direct() const { return true; }  // the page cache is passed by
    virtual int fd() const { return -1; }         // for io_uring; -1: only by the calls above
};

// Opens or creates.
using OpenFile = std::function<Result<std::unique_ptr<File>>(const std::string& path)>;
Result<std::unique_ptr<File>> open_file(const std::string& path);

}  // namespace moonpool::ssd
