// Encoding and decoding of the log's format; docs/ssd.md has the byte tables, and this file is the only one
// that knows them. No I/O and no state: any thread may call any function.
//
// Decoding trusts nothing. The bytes may be of another log that had the disk before, of an earlier life of
// the same segment, torn by a power failure, or made by an attacker with access to the disk. Hence each
// structure has a magic number, a checksum that begins with the log's id, and lengths that are compared
// with what is there before they are used. What fails a check is absent, not an error: recovery goes on
// with the rest. Only the superblock has errors in words, for the operator reads them.
#include "ssd/record.hpp"

#include <cstring>

#include "base/crc32c.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint64_t kSuperblockMagic = 0x474F4C4453535F4DULL;  // "M_SSDLOG"
constexpr uint64_t kSegmentMagic = 0x4745534453535F4DULL;     // "M_SSDSEG"
constexpr uint64_t kFooterMagic = 0x444E454453535F4DULL;      // "M_SSDEND"
constexpr uint32_t kRecordMagic = 0x3152504D;                 // "MPR1"

// Each starts with a magic number, and its checksum covers all that follows it.
// The structures below are copied to and from the disk as they stand: little-endian, no padding that the
// compiler would choose. The asserts on their sizes break the build where that is not so.
struct SuperblockBytes {
    uint64_t magic;
    uint32_t crc;
    uint32_t version;
    LogId id;
    uint64_t segment_bytes;
    uint64_t first_number;
};
static_assert(sizeof(SuperblockBytes) == 48);

struct SegmentBytes {
    uint64_t magic;
    uint32_t crc;
    uint32_t zero;
    uint64_t number;
    uint64_t tail;
};
static_assert(sizeof(SegmentBytes) == 32);

// `segment` repeats the number of the segment in each record: a segment that is used again still holds
// records of its former life, with sound checksums, and only the number tells them apart.
struct RecordBytes {
    uint32_t magic;
    uint32_t crc;
    uint64_t segment;
    uint64_t sequence;
    uint64_t size;
    uint32_t data_crc;
    uint16_t space_bytes;
    uint16_t name_bytes;
    uint16_t parent_bytes;
    uint8_t kind;
    uint8_t zero[5];
    uint64_t version;
    uint8_t more_zero[8];
};
static_assert(sizeof(RecordBytes) == 64);

struct FooterBytes {
    uint64_t magic;
    uint32_t crc;
    uint32_t summary_block;
    uint64_t number;
    uint32_t summary_bytes;
    uint32_t summary_crc;
    uint32_t count;
    uint32_t zero;
};
static_assert(sizeof(FooterBytes) == 40);

// A log's checksums begin with its id, so that nothing of another log that used the disk before fits.
uint32_t checksum(const LogId& id, const void* from, const void* end) {
    auto bytes =
        static_cast<size_t>(static_cast<const std::byte*>(end) - static_cast<const std::byte*>(from));
    return crc32c(crc32c(0, id.data(), id.size()), from, bytes);
}

template <class T>
uint32_t checksum_of(const LogId& id, const T& value) {
    return checksum(id, reinterpret_cast<const std::byte*>(&value.crc) + sizeof(value.crc), &value + 1);
}

template <class T>
void put(const T& value, std::byte* block) {
    std::memset(block, 0, kBlockBytes);
    std::memcpy(block, &value, sizeof(value));
}

template <class T>
T take(std::span<const std::byte> bytes) {
    T value{};
    if (bytes.size() >= sizeof(T)) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
}

}  // namespace

void encode_superblock(const Superblock& value, std::byte* block) {
    SuperblockBytes s{kSuperblockMagic, 0, kFormatVersion, value.id, value.segment_bytes, value.first_number};
    s.crc = checksum_of(LogId{}, s);
    put(s, block);
}

Result<Superblock> decode_superblock(std::span<const std::byte> block) {
    auto s = take<SuperblockBytes>(block);
    if (s.magic != kSuperblockMagic) return Error{Code::kInvalidArgument, "is no SSD log of moonpool"};
    // Before the checksum: of a later format neither its place nor what it covers is known, but the
    // operator is to be told the version.
    if (s.version != kFormatVersion) {
        return Error{Code::kInvalidArgument, "has format " + std::to_string(s.version) +
                                                 ", and this moonpool reads format " +
                                                 std::to_string(kFormatVersion)};
    }
    bool sound =
        s.crc == checksum_of(LogId{}, s) && s.segment_bytes != 0 && s.segment_bytes % kBlockBytes == 0;
    if (!sound) return Error{Code::kCorrupt, "has a damaged superblock"};
    return Superblock{s.id, s.segment_bytes, s.first_number};
}

void encode_segment_header(const LogId& id, const SegmentHeader& value, std::byte* block) {
    SegmentBytes s{kSegmentMagic, 0, 0, value.number, value.tail};
    s.crc = checksum_of(id, s);
    put(s, block);
    std::memcpy(block + kBlockBytes / 2, &s, sizeof(s));  // a damaged sector must not hide the segment
}

std::optional<SegmentHeader> decode_segment_header(const LogId& id, std::span<const std::byte> block) {
    if (block.size() < kBlockBytes) return std::nullopt;
    for (std::span<const std::byte> copy : {block, block.subspan(kBlockBytes / 2)}) {
        auto s = take<SegmentBytes>(copy);
        if (s.magic == kSegmentMagic && s.crc == checksum_of(id, s)) return SegmentHeader{s.number, s.tail};
    }
    return std::nullopt;
}

// The two candidates: right behind the header, at the next multiple of 64, or at a page of its own. The
// nearer one wins only where it saves a page, as with small objects. It is computed from header and size
// alone, so that it need not be stored.
uint32_t Record::data_offset() const {
    uint64_t close = (uint64_t{header_bytes()} + 63) & ~uint64_t{63};
    uint64_t apart = round_up_to_block(header_bytes());
    return static_cast<uint32_t>(round_up_to_block(close + size) < round_up_to_block(apart + size) ? close
                                                                                                   : apart);
}

// The format has 16 bits for each text. The node's own bounds are lower; this one is the last guard.
bool Record::encodable() const {
    constexpr size_t kTextMax = UINT16_MAX;
    return space.size() <= kTextMax && name.size() <= kTextMax && parent.size() <= kTextMax &&
           header_bytes() <= kHeaderBytesMax;
}

void encode_record(const LogId& id, const Record& record, std::byte* header) {
    RecordBytes r{};
    r.magic = kRecordMagic;
    r.segment = record.segment;
    r.sequence = record.sequence;
    r.size = record.size;
    r.data_crc = record.crc;
    r.space_bytes = static_cast<uint16_t>(record.space.size());
    r.name_bytes = static_cast<uint16_t>(record.name.size());
    r.parent_bytes = static_cast<uint16_t>(record.parent.size());
    r.kind = static_cast<uint8_t>(record.kind);
    r.version = record.version;
    std::byte* at = header + sizeof(r);
    for (std::string_view text : {record.space, record.name, record.parent}) {
        if (!text.empty()) std::memcpy(at, text.data(), text.size());
        at += text.size();
    }
    // The checksum covers the texts, which follow the structure, so it is computed after they stand there,
    // and the structure is copied once more with it.
    std::memcpy(header, &r, sizeof(r));
    r.crc = checksum(id, header + offsetof(RecordBytes, segment), at);
    std::memcpy(header, &r, sizeof(r));
}

std::optional<Record> decode_record(const LogId& id, std::span<const std::byte> bytes) {
    if (bytes.size() < sizeof(RecordBytes)) return std::nullopt;
    auto r = take<RecordBytes>(bytes);
    if (r.magic != kRecordMagic) return std::nullopt;
    // Three times 16 bits and a constant: the sum cannot overflow. It is compared with the span before the
    // checksum runs over so many bytes.
    size_t header_bytes = sizeof(r) + r.space_bytes + r.name_bytes + r.parent_bytes;
    if (header_bytes > kHeaderBytesMax || header_bytes > bytes.size()) return std::nullopt;
    if (r.crc != checksum(id, bytes.data() + offsetof(RecordBytes, segment), bytes.data() + header_bytes)) {
        return std::nullopt;
    }
    if (r.kind != static_cast<uint8_t>(RecordKind::kObject) &&
        r.kind != static_cast<uint8_t>(RecordKind::kRemovals)) {
        return std::nullopt;
    }
    Record record;
    record.kind = static_cast<RecordKind>(r.kind);
    record.segment = r.segment;
    record.sequence = r.sequence;
    record.size = r.size;
    record.crc = r.data_crc;
    record.version = r.version;
    const auto* text = reinterpret_cast<const char*>(bytes.data()) + sizeof(r);
    record.space = std::string_view(text, r.space_bytes);
    record.name = std::string_view(text + r.space_bytes, r.name_bytes);
    record.parent = std::string_view(text + r.space_bytes + r.name_bytes, r.parent_bytes);
    return record;
}

// The summary repeats what recovery needs of each record, so that a start reads some KiB of a segment and
// not all of it. Removals have no other copy that is read, hence their data goes along.
void SummaryWriter::add(const LogId& id, uint32_t block, const Record& record,
                        std::span<const uint64_t> removals) {
    size_t at = bytes_.size();
    bytes_.resize(at + bytes_for(record));
    std::memcpy(bytes_.data() + at, &block, sizeof(block));
    encode_record(id, record, bytes_.data() + at + sizeof(block));
    if (record.kind == RecordKind::kRemovals) {
        std::memcpy(bytes_.data() + at + sizeof(block) + record.header_bytes(), removals.data(),
                    removals.size_bytes());
    }
    ++count_;
}

void encode_footer(const LogId& id, const Footer& value, std::byte* block) {
    FooterBytes f{kFooterMagic, 0, value.summary_block, value.number, value.summary_bytes, value.summary_crc,
                  value.count,  0};
    f.crc = checksum_of(id, f);
    put(f, block);
}

std::optional<Footer> decode_footer(const LogId& id, std::span<const std::byte> block) {
    auto f = take<FooterBytes>(block);
    if (f.magic != kFooterMagic || f.crc != checksum_of(id, f)) return std::nullopt;
    return Footer{f.number, f.summary_block, f.summary_bytes, f.summary_crc, f.count};
}

namespace {

// The numbers that a removal record carries: first the tail when it was written, then sequences of removed
// objects.
bool read_removals(FoundRecord& found, std::span<const std::byte> data) {
    const Record& record = found.record;
    if (record.size % sizeof(uint64_t) != 0 || record.size > kRemovalsMax * sizeof(uint64_t)) return false;
    if (data.size() < record.size || crc32c(0, data.data(), record.size) != record.crc) return false;
    found.removals.resize(record.size / sizeof(uint64_t));
    if (!found.removals.empty()) std::memcpy(found.removals.data(), data.data(), record.size);
    return true;
}

}  // namespace

std::optional<std::vector<FoundRecord>> decode_summary(const LogId& id, const Footer& footer,
                                                       std::span<const std::byte> summary) {
    if (summary.size() < footer.summary_bytes) return std::nullopt;
    summary = summary.first(footer.summary_bytes);
    if (crc32c(0, summary.data(), summary.size()) != footer.summary_crc) return std::nullopt;
    std::vector<FoundRecord> all;
    while (!summary.empty()) {
        FoundRecord found;
        if (summary.size() < sizeof(found.block)) return std::nullopt;
        std::memcpy(&found.block, summary.data(), sizeof(found.block));
        summary = summary.subspan(sizeof(found.block));
        std::optional<Record> record = decode_record(id, summary);
        // All or nothing: a summary with one bad row is not believed, and the caller scans the segment.
        if (!record || record->segment != footer.number) return std::nullopt;
        found.record = *record;
        summary = summary.subspan(record->header_bytes());
        if (record->kind == RecordKind::kRemovals) {
            if (!read_removals(found, summary)) return std::nullopt;
            summary = summary.subspan(record->size);
        }
        all.push_back(std::move(found));
    }
    if (all.size() != footer.count) return std::nullopt;
    return all;
}

std::vector<FoundRecord> scan_segment(const LogId& id, uint64_t number, std::span<const std::byte> segment) {
    std::vector<FoundRecord> all;
    // Records begin at block borders, one behind the other. Where none begins, or its data is torn, the
    // next block is tried: a later record may be whole, because writes of one segment are not ordered among
    // themselves.
    for (uint64_t at = kBlockBytes; at + kBlockBytes <= segment.size();) {
        std::span<const std::byte> rest = segment.subspan(at);
        std::optional<Record> record = decode_record(id, rest);
        uint64_t next = at + kBlockBytes;
        // size first: a huge one must not wrap around in the sums.
        if (record && record->segment == number && record->size <= rest.size() &&
            record->bytes() <= rest.size()) {
            std::span<const std::byte> data = rest.subspan(record->data_offset(), record->size);
            FoundRecord found{static_cast<uint32_t>(at / kBlockBytes), *record, {}};
            bool sound = record->kind == RecordKind::kRemovals
                             ? read_removals(found, data)
                             : crc32c(0, data.data(), data.size()) == record->crc;
            if (sound) {
                all.push_back(std::move(found));
                next = at + record->bytes();
            }
        }
        at = next;
    }
    return all;
}

}  // namespace moonpool::ssd
