// Memory shared between processes: a memfd and the views of it.
//
// Mapping  a range of addresses over a memfd; unmapped by its destructor.
// Huge pages are what makes leases cheap: turning a slab writable and back costs 40 us a MiB with pages of 4
// KiB and 0.2 us with pages of 2 MiB (a copy: 60 us). They need no setting of the system: MADV_COLLAPSE asks
// for them range by range (Linux 6.1), and where it is refused everything works the same, a little slower.
//
// Arena    the node's own memory of a tenant. Its length is fixed at birth (sealed against shrinking, so that
// no
//          client can make a reader fault), its pages are reserved step by step by commit(): reading or
//          writing a committed page cannot fail for lack of memory, which would be a SIGBUS in the thread
//          that touched it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/fd.hpp"
#include "base/result.hpp"

namespace moonpool {

class Mapping {
   public:
    Mapping() = default;
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();

    static Result<Mapping> map(int fd, uint64_t bytes, bool writable);

    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }

    // Makes [offset, offset + bytes) writable or read-only again. Page aligned. The page table entries stay,
    // so a range that has been touched once costs no page fault the next time.
    Status protect(uint64_t offset, uint64_t bytes, bool writable);

    // Fills the page tables of a writable range in one call instead of one fault for each 4 KiB.
    void populate_for_write(uint64_t offset, uint64_t bytes);

    // Gathers a range, whole huge pages of it, into huge pages; 2 ms a MiB. Its bytes may be in use
    // meanwhile.
    bool collapse(uint64_t offset, uint64_t bytes);

    // It stays mapped for ever: for memory that a card may still read.
    void leak() { data_ = nullptr; }

   private:
    std::byte* data_ = nullptr;
    uint64_t size_ = 0;
};

class Arena {
   public:
    static Result<Arena> create(const std::string& name, uint64_t bytes);
    // The memory of another process's arena, of which `committed` bytes are reserved. An error: it is no file
    // of that size whose size stays.
    static Result<Arena> adopt(Fd fd, uint64_t bytes, uint64_t committed);

    // Reserves the pages of [committed(), committed() + bytes).
    Status commit(uint64_t bytes);

    // Gives the pages of a range back to the system. A process that touches them before commit_range() gets
    // zeros, which are not accounted for.
    Status give_back(uint64_t offset, uint64_t bytes);
    // Reserves pages anew; committed() stays.
    Status commit_range(uint64_t offset, uint64_t bytes);

    // Makes huge pages of a committed range; false when the kernel does not.
    bool collapse(uint64_t offset, uint64_t bytes) { return mapping_.collapse(offset, bytes); }

    int fd() const { return fd_.get(); }
    uint64_t size() const { return mapping_.size(); }
    uint64_t committed() const { return committed_; }
    const std::byte* data() const { return mapping_.data(); }
    std::byte* writable() const { return mapping_.data(); }  // what arrives over TCP or from SSD

   private:
    Fd fd_;
    Mapping mapping_;
    uint64_t committed_ = 0;
};

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kHugePageBytes = 2u << 20;
inline uint64_t round_up_to_page(uint64_t n) { return (n + kPageBytes - 1) & ~(kPageBytes - 1); }

inline uint64_t round_up_to_huge_page(uint64_t n) { return (n + kHugePageBytes - 1) & ~(kHugePageBytes - 1); }

}  // namespace moonpool
