// OpenedFile: a file or a block device whose bytes transfers read and write.
//
// It is open twice: whole blocks go past the page cache, the parts of blocks at the edges of a write go
// through it, where the kernel keeps the other bytes of the block and the file's length. An edge is written
// with O_DSYNC: no page is left over that the kernel would write later, over newer bytes of a neighbour, and
// a full or broken disk is told at once. Where the file system knows no O_DIRECT, all goes through the page
// cache.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.hpp"
#include "io/file.hpp"

namespace moonpool::io {

struct OpenOptions {
    bool writable = true;
    // It is made where there is none, and longer where it is shorter: with a hole, not with room on the disk.
    std::optional<uint64_t> bytes;
};

class OpenedFile {
   public:
    struct Parts {
        std::string path;
        std::unique_ptr<File> blocks;
        std::unique_ptr<File> edges;  // null: `blocks` takes any range
        uint64_t block_bytes = kBlockBytes;
        uint32_t memory_align = 512;  // of what a direct read or write moves
        std::string read_only;        // why; empty: it is writable
    };

    // The error says in one sentence what is wrong with the path.
    static Result<std::shared_ptr<OpenedFile>> open(const std::string& path, const OpenOptions& options);
    explicit OpenedFile(Parts parts) : parts_(std::move(parts)) { (void)look(); }

    const std::string& path() const { return parts_.path; }
    File& blocks() const { return *parts_.blocks; }
    File& edges() const { return parts_.edges ? *parts_.edges : *parts_.blocks; }
    // Whether blocks() takes whole blocks only, at aligned memory.
    bool direct() const { return parts_.edges != nullptr; }
    uint64_t block_bytes() const { return parts_.block_bytes; }
    uint32_t memory_align() const { return parts_.memory_align; }
    const std::string& read_only() const { return parts_.read_only; }

    uint64_t length() const { return length_.load(std::memory_order_relaxed); }  // when it was last looked at
    Result<uint64_t> look();                                                     // how long it is now

   private:
    const Parts parts_;
    std::atomic<uint64_t> length_{0};
};

// How an engine opens them; tests give files that fail.
using OpenForTransfers =
    std::function<Result<std::shared_ptr<OpenedFile>>(const std::string& path, const OpenOptions& options)>;

}  // namespace moonpool::io
