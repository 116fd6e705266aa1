// What stands on the disk: superblock, segment header, record, summary and footer (docs/ssd.md has the byte
// tables). Pure: bytes in, values out. Everything that is read back is untrusted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "ssd/file.hpp"

namespace moonpool::ssd {

using LogId = std::array<uint8_t, 16>;

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr uint64_t kSegmentsBegin = 65536;   // in the file; the superblock stands before
inline constexpr uint32_t kHeaderBytesMax = 16384;  // of a record
inline constexpr uint32_t kRemovalsMax = 500;       // in one record: it stays within one block

struct Superblock {
    LogId id{};
    uint64_t segment_bytes = 0;
    uint64_t first_number = 0;  // of the first segment that this log wrote
};
void encode_superblock(const Superblock& value, std::byte* block);
// Says what is wrong in words that go on "PATH ...".
Result<Superblock> decode_superblock(std::span<const std::byte> block);

struct SegmentHeader {
    uint64_t number = 0;  // grows by one with each segment that is opened; no number comes twice
    uint64_t tail = 0;    // no segment below it counted any more when this one was opened
};
void encode_segment_header(const LogId& id, const SegmentHeader& value, std::byte* block);
std::optional<SegmentHeader> decode_segment_header(const LogId& id, std::span<const std::byte> block);

enum class RecordKind : uint8_t { kObject = 1, kRemovals = 2 };

// The views point into whatever was decoded.
struct Record {
    RecordKind kind = RecordKind::kObject;
    uint64_t segment = 0;   // number of the segment it was written to
    uint64_t sequence = 0;  // of its commit to this log; the same in a copy that the collector made
    uint64_t size = 0;
    uint32_t crc = 0;
    uint64_t version = 0;    // given by its writer; 0 in records of earlier releases
    std::string_view space;  // tenant 0 namespace 0 fingerprint
    std::string_view name;
    std::string_view parent;

    uint32_t header_bytes() const {
        return static_cast<uint32_t>(64 + space.size() + name.size() + parent.size());
    }
    // Data begins at a page of its own, so that it is read without its header, unless it saves a page to
    // begin right behind it.
    uint32_t data_offset() const;
    uint64_t bytes() const { return round_up_to_block(data_offset() + size); }
    bool encodable() const;
};
void encode_record(const LogId& id, const Record& record, std::byte* header);
// Looks at no more than the span. The data is not looked at.
std::optional<Record> decode_record(const LogId& id, std::span<const std::byte> bytes);

// The summary of a sealed segment: each record's place and header, of removals the data too.
class SummaryWriter {
   public:
    void add(const LogId& id, uint32_t block, const Record& record, std::span<const uint64_t> removals);
    static uint64_t bytes_for(const Record& record) {
        return 4 + record.header_bytes() + (record.kind == RecordKind::kRemovals ? record.size : 0);
    }
    uint64_t bytes() const { return bytes_.size(); }
    uint32_t count() const { return count_; }
    const std::vector<std::byte>& data() const { return bytes_; }

   private:
    std::vector<std::byte> bytes_;
    uint32_t count_ = 0;
};

struct Footer {
    uint64_t number = 0;
    uint32_t summary_block = 0;  // in the segment
    uint32_t summary_bytes = 0;
    uint32_t summary_crc = 0;
    uint32_t count = 0;
};
void encode_footer(const LogId& id, const Footer& value, std::byte* block);
std::optional<Footer> decode_footer(const LogId& id, std::span<const std::byte> block);

struct FoundRecord {
    uint32_t block = 0;  // in the segment
    Record record;
    std::vector<uint64_t> removals;
};
// Nothing when the summary is not what the footer says.
std::optional<std::vector<FoundRecord>> decode_summary(const LogId& id, const Footer& footer,
                                                       std::span<const std::byte> summary);

// The records of a segment that was not sealed, each with sound data. Bytes of earlier lives are passed over.
std::vector<FoundRecord> scan_segment(const LogId& id, uint64_t number, std::span<const std::byte> segment);

}  // namespace moonpool::ssd
