// Log: objects in one directory of a disk, in the order they were written (docs/ssd.md). The public face of
// the SSD tier's storage; log_parts.hpp has the machinery.
//
// Every call returns at once: I/O is done by threads of the log, and what is queued has a maximum. Any thread
// may call; callbacks run on the log's thread and must not block.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "base/xxh3.hpp"
#include "io/queue.hpp"
#include "ssd/file.hpp"

namespace moonpool::ssd {

inline constexpr const char* kLogFile = "moonpool.ssd";
inline constexpr uint32_t kSegmentsMin = 8;

// For a caller that simulates time (tests/sim). Such a log has neither a thread nor a clock: it works in
// Log::step() alone, on the caller's thread, and recovers and closes there, too. Production gives none, and
// pays a comparison where a log opens, closes, or looks whether a sync is due.
struct Stepping {
    // Its wake() tells the caller that step() has something to do. reap() with a time to wait must end one of
    // the operations in flight, if there is any.
    std::function<std::unique_ptr<io::Queue>()> queue;
    std::function<uint64_t()> now_ms;
};

struct LogOptions {
    std::string directory;
    uint64_t bytes = 0;          // of the directory's file, at most
    uint64_t segment_bytes = 0;  // 0: 1/64 of bytes, between 4 and 64 MiB
    uint32_t depth = 32;         // reads in flight, and writes
    uint32_t io_bytes = 1u << 20;
    std::string io = "auto";    // io_uring, threads
    uint32_t queue_max = 1024;  // reads that wait, and writes
    uint32_t records_max = 0;   // 0: one for each 32 KiB, between 4,096 and 4 Mi
    uint32_t sync_ms = 1000;    // what was written is made safe against a power failure this often
    std::shared_ptr<std::atomic<uint64_t>> sequence;  // shared by the logs of one node
    OpenFile open;                                    // empty: open_file
    std::optional<Stepping> stepping;                 // none: the log has a thread
    // Objects that the log no longer has though no caller removed them; on the log's thread.
    std::function<void(const std::vector<Hash128>&)> on_gone;
};

enum class Outcome {
    kDone,
    kMiss,     // it is not there (any more), or its bytes are not what was written
    kFailed,   // the disk failed
    kRefused,  // closed, read-only, or too large
};
using Done = std::function<void(Outcome)>;

struct Key {
    uint32_t space = 0;  // as space() gave it
    Hash128 hash;
    std::string_view name;
};

struct Found {
    uint64_t sequence = 0;
    uint64_t version = 0;
    uint64_t size = 0;
    uint32_t crc = 0;
    std::string parent;
};

struct Listed {
    uint64_t sequence = 0;
    uint64_t size = 0;
    uint32_t crc = 0;
    std::string name;
};

class Log {
   public:
    // Reads what is there. The error is one sentence with the remedy.
    static Result<std::unique_ptr<Log>> open(LogOptions options);
    ~Log();
    Log(const Log&) = delete;

    // The number of a space: "tenant 0 namespace 0 fingerprint".
    uint32_t space(std::string_view identity);
    // Its caller does not use that number any more. Once no object is of that space it may be another's.
    void leave_space(uint32_t space);

    // with_parent: its name too. Marks it as used.
    std::optional<Found> find(const Key& key, bool with_parent = false);

    // Writes an object of one or several parts, which must stay as they are until done is called. False: the
    // queue is full, and done will not be called. An older object of that key is gone from now on.
    // version: its place in an order of its caller's; 0: older than all.
    bool write(const Key& key, std::string_view parent, std::vector<std::span<const std::byte>> parts,
               uint32_t crc, Done done, uint64_t version = 0);
    // Into `to`, which has the object's size. The bytes have passed their checksum when the outcome is kDone.
    bool read(const Key& key, std::span<std::byte> to, Done done);
    bool remove(const Key& key);
    // By the hash alone, as the directory knows it.
    std::optional<uint64_t> sequence(const Hash128& hash) const;
    bool has(const Hash128& hash) const { return sequence(hash).has_value(); }
    // Of two objects of one key the one with the higher rank counts: by version, then by sequence.
    using Rank = std::pair<uint64_t, uint64_t>;
    std::optional<Rank> rank(const Hash128& hash) const;
    bool remove(const Hash128& hash);
    // Removes what has a lower version, also what is being written. -> whether an object of that hash is
    // left.
    bool remove_older(const Hash128& hash, uint64_t version);
    // Bytes of the records of an owner: of spaces whose identity begins with it and a 0.
    uint64_t bytes_of(std::string_view owner) const;
    // Removes what was written the longest ago until it has at most so many, `most` objects in one call, and
    // none with a sequence above `newest`; they are told to on_gone. -> how many objects.
    uint32_t trim(std::string_view owner, uint64_t bytes_max, uint32_t most, uint64_t newest = UINT64_MAX);
    // When done is called, everything that was submitted before survives a power failure.
    void sync(Done done);

    // The area between the superblock and the first segment is the caller's, for what several logs have in
    // common. As it was when the log was opened; zeros in a new log.
    std::span<const std::byte> area() const;
    // Whole blocks, at a block of the area. False: nothing is written any more, and done will not be called.
    bool write_area(uint32_t block, std::span<const std::byte> bytes, Done done);

    // Objects of a space, from a cursor on; looks at no more than `scan` entries. -> the next cursor, 0: end.
    uint32_t list(uint32_t space, uint32_t cursor, uint32_t scan, std::vector<Listed>& out) const;

    uint32_t hashes(uint32_t cursor, uint32_t scan, std::vector<Hash128>& out) const;
    // Of a directory that is not used any more (ssd_off): what it held, and forgets from now on. Looks at no
    // more than `scan` entries.
    std::vector<Hash128> take_lost(uint32_t scan);

    // With Stepping: does what is queued, and calls back what has ended; wait: once more after an operation
    // has ended.
    void step(bool wait = false);
    bool is_stepped() const;

    // Finishes what was begun and seals the log; what still waits is refused. Idempotent.
    void close();

    bool accepts_writes() const;
    // Why it does not, in one sentence; empty while it does.
    std::string trouble() const;
    uint64_t object_bytes_max() const;  // larger ones are refused
    const std::string& directory() const;
    const std::array<uint8_t, 16>& id() const;
    std::vector<std::pair<const char*, uint64_t>> counters() const;
    const char* io_name() const;    // io_uring or threads
    std::string io_reason() const;  // why not io_uring, when it was to be tried
    bool check_integrity() const;

   private:
    struct Parts;
    explicit Log(std::unique_ptr<Parts> parts);
    std::unique_ptr<Parts> parts_;
};

}  // namespace moonpool::ssd
