#include "store/shared/shared_index.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <bit>
#include <cstring>

#include "memory/seal.hpp"

namespace moonpool {

namespace {

inline constexpr uint16_t kLongName = UINT16_MAX;
inline constexpr uint64_t kInvalid = 1;
inline constexpr int kChainMax = 64;  // a reader gives up there: the writer may have bent the chain under it

// Chains of two or three where every slot is taken, which is where objects are of 1 KiB each. A bucket a slot
// would be four times the memory, of which each lookup of larger objects misses a line.
uint32_t buckets_for(uint32_t slots) { return std::bit_ceil(slots / 4 + slots / 8 + 1); }
uint64_t entries_offset(uint32_t buckets) {
    return round_up_to_page(kPageBytes + uint64_t{buckets} * sizeof(uint32_t));
}

}  // namespace

Result<IndexReader> IndexReader::open(int fd, uint64_t bytes, const Incarnation& incarnation) {
    if (bytes < kPageBytes) return Error{Code::kProtocol, "the node's shared index is too small to be one"};
    Result<Mapping> mapping = Mapping::map(fd, bytes, false);
    if (!mapping) return mapping.error();
    IndexHeader header;
    std::memcpy(&header, mapping->data(), sizeof(header));
    if (header.magic != kIndexMagic || header.incarnation != incarnation || header.buckets == 0 ||
        !std::has_single_bit(header.buckets) ||
        entries_offset(header.buckets) + uint64_t{header.slots} * sizeof(IndexEntry) > bytes) {
        return Error{Code::kProtocol, "the node's shared index has another form than this client knows"};
    }
    IndexReader reader;
    reader.slots_ = header.slots;
    reader.bucket_mask_ = header.buckets - 1;
    reader.buckets_ = reinterpret_cast<const std::atomic<uint32_t>*>(mapping->data() + kPageBytes);
    reader.entries_ = reinterpret_cast<const IndexEntry*>(mapping->data() + entries_offset(header.buckets));
    reader.mapping_ = std::move(*mapping);
    return reader;
}

std::optional<IndexHit> IndexReader::find(uint32_t space, const Hash128& hash, std::string_view name) const {
    uint32_t link = buckets_[hash.low & bucket_mask_].load(std::memory_order_acquire);
    for (int step = 0; link != 0 && link <= slots_ && step < kChainMax; ++step) {
        const IndexEntry& entry = entries_[link - 1];
        uint64_t seq = entry.seq.load(std::memory_order_acquire);
        uint32_t next = entry.next.load(std::memory_order_acquire);
        if ((seq & 1) == 0 && entry.hash_low == hash.low && entry.hash_high == hash.high &&
            entry.space == space && entry.name_size == name.size() &&
            std::memcmp(entry.name, name.data(), name.size()) == 0) {
            IndexHit hit{&entry, seq, entry.offset, entry.size, entry.crc, link - 1};
            if (hit.still_valid()) return hit;
            return std::nullopt;
        }
        link = next;
    }
    return std::nullopt;
}

std::optional<IndexHit> IndexReader::at(uint32_t slot, uint64_t generation) const {
    if (slot >= slots_) return std::nullopt;
    const IndexEntry& entry = entries_[slot];
    uint64_t seq = entry.seq.load(std::memory_order_acquire);
    if (seq != 2 * generation) return std::nullopt;
    return IndexHit{&entry, seq, entry.offset, entry.size, entry.crc, slot};
}

uint64_t IndexWriter::bytes_for(uint32_t slots) {
    return round_up_to_page(entries_offset(buckets_for(slots)) + uint64_t{slots} * sizeof(IndexEntry));
}

Result<IndexWriter> IndexWriter::create(uint32_t slots, const Incarnation& incarnation) {
    IndexWriter writer;
    uint64_t bytes = bytes_for(slots);
    writer.fd_.reset(::memfd_create("moonpool-index", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!writer.fd_.valid()) return os_error("memfd_create");
    if (::ftruncate(writer.fd_.get(), static_cast<off_t>(bytes)) != 0)
        return os_error("ftruncate of a memfd");
    Result<Mapping> mapping = Mapping::map(writer.fd_.get(), bytes, true);
    if (!mapping) return mapping.error();
    // The node itself goes by what stands there: no client may write to it.
    if (Status status = keep_private(writer.fd_.get()); !status) return status.error();
    if (Status status = seal_memory(writer.fd_.get(), true); !status) return status.error();
    IndexHeader header{kIndexMagic, slots, buckets_for(slots), incarnation, 0, 0, 0, 0, 0, {}, 0};
    std::memcpy(mapping->data(), &header, sizeof(header));
    writer.slots_ = slots;
    writer.bucket_mask_ = header.buckets - 1;
    writer.buckets_ = reinterpret_cast<std::atomic<uint32_t>*>(mapping->data() + kPageBytes);
    writer.entries_ = reinterpret_cast<IndexEntry*>(mapping->data() + entries_offset(header.buckets));
    writer.mapping_ = std::move(*mapping);
    return writer;
}

Result<Fd> IndexWriter::read_only_fd() const {
    Fd fd(::open(("/proc/self/fd/" + std::to_string(fd_.get())).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return os_error("reopening the shared index read-only");
    return fd;
}

void IndexWriter::publish(uint32_t slot, uint64_t generation, uint32_t space, const Hash128& hash,
                          std::string_view name, Extent extent, uint32_t crc) {
    IndexEntry& entry = entries_[slot];
    entry.seq.store(kInvalid, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.hash_low = hash.low;
    entry.hash_high = hash.high;
    entry.offset = extent.offset;
    entry.size = extent.size;
    entry.crc = crc;
    entry.space = space;
    entry.tier = 1;
    if (name.size() <= kInlineName) {
        entry.name_size = static_cast<uint16_t>(name.size());
        std::memcpy(entry.name, name.data(), name.size());
    } else {
        entry.name_size = kLongName;
    }
    entry.seq.store(2 * generation, std::memory_order_release);
    std::atomic<uint32_t>& bucket = buckets_[hash.low & bucket_mask_];
    entry.next.store(bucket.load(std::memory_order_relaxed), std::memory_order_release);
    bucket.store(slot + 1, std::memory_order_release);
}

void IndexWriter::retract(uint32_t slot) {
    IndexEntry& entry = entries_[slot];
    entry.seq.store(kInvalid, std::memory_order_relaxed);
    // Whatever is written into the object's memory from here on is written after seq became odd.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::atomic<uint32_t>* link = &buckets_[entry.hash_low & bucket_mask_];
    while (link->load(std::memory_order_relaxed) != slot + 1) {
        link = &entries_[link->load(std::memory_order_relaxed) - 1].next;
    }
    link->store(entry.next.load(std::memory_order_relaxed), std::memory_order_release);
}

void IndexWriter::supersede(uint32_t used) {
    for (uint32_t slot = 0; slot < used; ++slot)
        entries_[slot].seq.store(kInvalid, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Last: a client that sees it asks for a new index.
    auto* header = reinterpret_cast<IndexHeader*>(mapping_.data());
    __atomic_store_n(&header->superseded, 1, __ATOMIC_RELEASE);
}

void IndexWriter::revive(uint32_t slot, uint64_t generation) {
    entries_[slot].seq.store(2 * generation, std::memory_order_release);
}

void IndexWriter::end_supersede() {
    auto* header = reinterpret_cast<IndexHeader*>(mapping_.data());
    __atomic_store_n(&header->superseded, 0, __ATOMIC_RELEASE);
}

uint32_t IndexWriter::first(const Hash128& hash) const {
    return buckets_[hash.low & bucket_mask_].load(std::memory_order_relaxed) - 1;
}

uint32_t IndexWriter::next(uint32_t slot) const {
    return entries_[slot].next.load(std::memory_order_relaxed) - 1;
}

}  // namespace moonpool
