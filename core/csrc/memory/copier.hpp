// Copier: copies and sums bytes of some kinds of memory. Besides transports and system calls only copiers
// touch what a MemoryRef names, so a new kind of memory is one more Copier in the table of copier.cpp.
//
// The rule of checksums: the copier of the memory where bytes end makes their checksum, while it copies them
// there or, when a system call put them there, right afterwards. No layer above loads them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/result.hpp"
#include "memory/memory_ref.hpp"

namespace moonpool {

// A device's order of copies. A copier of host memory ignores it: its copies are over on return.
namespace device {
class Stream;
}
using device::Stream;

class Copier {
   public:
    virtual ~Copier() = default;
    virtual std::string_view name() const = 0;
    virtual bool can(MemoryKind from, MemoryKind to) const = 0;
    // `to` and `from` have the same length and do not overlap. crc: CRC-32C, continued over the bytes; null:
    // not computed.
    virtual Status copy(const MemoryRef& to, const MemoryRef& from, uint32_t* crc,
                        Stream* stream = nullptr) const = 0;
    // Continues `crc` over bytes that lie in memory of a kind with can(kind, kind).
    virtual Status sum(const MemoryRef& bytes, uint32_t& crc, Stream* stream = nullptr) const = 0;
};

// Null when no copier of this build copies between these kinds.
const Copier* find_copier(MemoryKind from, MemoryKind to);

// Several ranges to one, one after another; `to` has room for all of them.
Status gather(const MemoryRef& to, std::span<const MemoryRef> from, uint32_t* crc);
// One range to several: the first `from.bytes` bytes of `to`; what is left of `to` stays as it is.
Status scatter(std::span<const MemoryRef> to, const MemoryRef& from, uint32_t* crc);
// Continues `crc` over bytes where they lie, by the copier of their kind of memory.
Status sum(const MemoryRef& bytes, uint32_t& crc);
// The checksum of the first `bytes` bytes of the parts.
Result<uint32_t> checksum(std::span<const MemoryRef> parts, uint64_t bytes);

}  // namespace moonpool
