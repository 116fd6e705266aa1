// The rows are written behind a posix_fallocate(3): where the kernel has no memory for them, that is an error
// of the call, and not a SIGBUS. Readers copy them word by word, as a seqlock asks for.
#include "directory/members_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/crc32c.hpp"
#include "memory/seal.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kMembersMagic = 0x31424D454D4C504DULL;  // "MPLMEMB1"
constexpr int kMembersTries = 16;                          // of a reader, while the writer writes
constexpr size_t kMembersHeadWords = sizeof(MembersHead) / sizeof(uint64_t);
static_assert(sizeof(MembersHead) == kMembersHeadWords * sizeof(uint64_t));

uint64_t load_word(const std::byte* at) {
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(at), __ATOMIC_RELAXED);
}
void store_word(std::byte* at, uint64_t value) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(at), value, __ATOMIC_RELAXED);
}

// Of the page: u64 magic, u64 seq, then the head.
constexpr size_t kMembersSeqAt = 8, kMembersHeadAt = 16;

}  // namespace

Result<MembersWriter> MembersWriter::create() {
    MembersWriter writer;
    writer.fd_.reset(::memfd_create("moonpool-members", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!writer.fd_.valid()) return os_error("memfd_create");
    const int fd = writer.fd_.get();
    if (::ftruncate(fd, static_cast<off_t>(kMembersFileBytes)) != 0) return os_error("ftruncate of a memfd");
    if (int error = ::posix_fallocate(fd, 0, kPageBytes); error != 0)
        return os_error("reserving a page of a memfd", error);
    Result<Mapping> mapping = Mapping::map(fd, kMembersFileBytes, true);
    if (!mapping) return mapping.error();
    if (Status status = keep_private(fd); !status) return status.error();
    if (Status status = seal_memory(fd, true); !status) return status.error();
    writer.mapping_ = std::move(*mapping);
    store_word(writer.mapping_.data(), kMembersMagic);
    return writer;
}

Result<Fd> MembersWriter::read_only_fd() const {
    Fd fd(::open(("/proc/self/fd/" + std::to_string(fd_.get())).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return os_error("reopening the list of members read-only");
    return fd;
}

// seq is odd before anything else is, and even after all.
bool MembersWriter::publish(MembersHead head, std::optional<std::span<const std::byte>> rows) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(mapping_.data() + kMembersSeqAt), seq_ + 1,
                     __ATOMIC_RELAXED);
    std::atomic_thread_fence(std::memory_order_release);
    bool fits = !rows || rows->size() <= kMembersFileBytes - kPageBytes;
    if (fits && rows && !rows->empty()) {
        int error;
        do {
            error = ::posix_fallocate(fd_.get(), static_cast<off_t>(kPageBytes),
                                      static_cast<off_t>(rows->size()));
        } while (error == EINTR);
        fits = error == 0;
        if (fits) write_rows(*rows);
    }
    if (rows) {
        head.bytes = rows->size();
        head.crc = crc32c(0, rows->data(), rows->size());
    } else {
        head.bytes = head_.bytes;
        head.crc = head_.crc;
    }
    head_ = fits ? head : MembersHead{};
    seq_ += 2;
    write_head(head_, seq_);
    return fits;
}

// Word by word, as they are read. What is behind the last one is none of it.
void MembersWriter::write_rows(std::span<const std::byte> rows) {
    std::byte* to = mapping_.data() + kPageBytes;
    for (size_t at = 0; at < rows.size(); at += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, rows.data() + at, std::min(sizeof(word), rows.size() - at));
        store_word(to + at, word);
    }
}

void MembersWriter::withdraw() { (void)publish({}, std::span<const std::byte>{}); }

void MembersWriter::write_head(const MembersHead& head, uint64_t seq) {
    uint64_t words[kMembersHeadWords];
    std::memcpy(words, &head, sizeof(head));
    for (size_t i = 0; i < kMembersHeadWords; ++i) {
        store_word(mapping_.data() + kMembersHeadAt + i * sizeof(uint64_t), words[i]);
    }
    __atomic_store_n(reinterpret_cast<uint64_t*>(mapping_.data() + kMembersSeqAt), seq, __ATOMIC_RELEASE);
}

Result<MembersReader> MembersReader::open(const Fd& fd) {
    struct stat what {};
    if (::fstat(fd.get(), &what) != 0) return os_error("fstat of the list of members");
    int seals = ::fcntl(fd.get(), F_GET_SEALS);
    bool fits = seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && what.st_size > static_cast<off_t>(kPageBytes) &&
                what.st_size <= static_cast<off_t>(1ull << 32);
    if (!fits)
        return Error{Code::kProtocol, "the node's list of members is no memory of the kind it should be"};
    MembersReader reader;
    Result<Mapping> mapping = Mapping::map(fd.get(), static_cast<uint64_t>(what.st_size), false);
    if (!mapping) return mapping.error();
    reader.mapping_ = std::move(*mapping);
    if (load_word(reader.mapping_.data()) != kMembersMagic)
        return Error{Code::kProtocol, "the node's list of members does not begin as one"};
    return reader;
}

std::optional<MembersHead> MembersReader::head_at(uint64_t& seq) const {
    seq =
        __atomic_load_n(reinterpret_cast<const uint64_t*>(mapping_.data() + kMembersSeqAt), __ATOMIC_ACQUIRE);
    if ((seq & 1) != 0) return std::nullopt;
    uint64_t words[kMembersHeadWords];
    for (size_t i = 0; i < kMembersHeadWords; ++i) {
        words[i] = load_word(mapping_.data() + kMembersHeadAt + i * sizeof(uint64_t));
    }
    MembersHead head;
    std::memcpy(&head, words, sizeof(head));
    if (!is_still(seq)) return std::nullopt;
    return head;
}

bool MembersReader::is_still(uint64_t seq) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return load_word(mapping_.data() + kMembersSeqAt) == seq;
}

std::optional<MembersHead> MembersReader::head() const {
    uint64_t seq = 0;
    for (int i = 0; i < kMembersTries; ++i) {
        if (std::optional<MembersHead> head = head_at(seq)) return head;
    }
    return std::nullopt;
}

std::optional<MembersHead> MembersReader::read(std::vector<std::byte>& rows) const {
    uint64_t seq = 0;
    for (int i = 0; i < kMembersTries; ++i) {
        std::optional<MembersHead> head = head_at(seq);
        if (!head) continue;
        // Of a whole head: a lie, which another look does not make true.
        if (head->bytes > mapping_.size() - kPageBytes) return std::nullopt;
        const uint64_t words = (head->bytes + 7) / 8;
        rows.resize(words * 8);
        const std::byte* from = mapping_.data() + kPageBytes;
        for (uint64_t k = 0; k < words; ++k) {
            uint64_t word = load_word(from + k * 8);
            std::memcpy(rows.data() + k * 8, &word, 8);
        }
        if (!is_still(seq)) continue;
        rows.resize(head->bytes);
        if (crc32c(0, rows.data(), rows.size()) != head->crc) return std::nullopt;
        return head;
    }
    return std::nullopt;
}

}  // namespace moonpool
