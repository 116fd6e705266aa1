// The members of the pool in memory that a node shares with the processes of its host: what the master last
// told the node, so that the processes need not ask.
//
//   header (one page) | rows, as an answer to MEMBERS has them
//
// One writer, the node's relay, and any number of readers in other processes. The header has a lock of the
// kind of the shared index (store/shared/shared_index.hpp): `seq` is odd while something is written, and what
// was read counts where seq is the same before and after. A reader takes nothing on trust: the number of
// bytes is compared with what is mapped, and the rows with their checksum.
//
// The memory is as long as it ever gets, and sealed; pages that nothing was written to take no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/fd.hpp"
#include "base/result.hpp"
#include "directory/version.hpp"
#include "memory/mapping.hpp"

namespace moonpool {

inline constexpr uint64_t kMembersFileBytes = (64u << 20) + kPageBytes;

// What the header says, besides its lock.
struct MembersHead {
    uint64_t life = 0;  // of the node's connection to the master, as it told its clients; 0: it has none
    uint64_t epoch = 0;
    uint64_t flags = 0;  // of the answer to MEMBERS
    Version newest = kNoVersion;
    uint64_t heard_ms = 0;  // when the master said so, by CLOCK_MONOTONIC
    uint64_t bytes = 0;     // of the rows
    uint64_t crc = 0;       // and their CRC-32C

    friend bool operator==(const MembersHead&, const MembersHead&) = default;
};

class MembersWriter {
   public:
    static Result<MembersWriter> create();

    // A descriptor of the same memory that cannot be mapped writable.
    Result<Fd> read_only_fd() const;
    // rows: nothing: those that there are stay. False: they have no room, and nothing is there now.
    bool publish(MembersHead head, std::optional<std::span<const std::byte>> rows);
    void withdraw();  // no process reads it any more, until the next publish()

   private:
    void write_rows(std::span<const std::byte> rows);
    void write_head(const MembersHead& head, uint64_t seq);

    Fd fd_;
    Mapping mapping_;
    uint64_t seq_ = 0;
    MembersHead head_;
};

class MembersReader {
   public:
    // An error: it is no such memory, or could be cut short under its reader.
    static Result<MembersReader> open(const Fd& fd);

    // Nothing: it is being written, again and again.
    std::optional<MembersHead> head() const;
    // With the rows that belong to it.
    std::optional<MembersHead> read(std::vector<std::byte>& rows) const;

   private:
    std::optional<MembersHead> head_at(uint64_t& seq) const;
    bool is_still(uint64_t seq) const;

    Mapping mapping_;
};

}  // namespace moonpool
