#include "memory/copier.hpp"

#include <algorithm>
#include <string>

#include "base/copy.hpp"
#include "base/crc32c.hpp"
#include "memory/kind_name.hpp"

namespace moonpool {

namespace {

// One pass over the bytes, with or without the checksum: what is copied is in the cache when it is summed.
class HostCopier final : public Copier {
   public:
    std::string_view name() const override { return "host"; }
    bool can(MemoryKind from, MemoryKind to) const override {
        return reachable_by_cpu(from) && reachable_by_cpu(to);
    }
    Status copy(const MemoryRef& to, const MemoryRef& from, uint32_t* crc, Stream*) const override {
        if (crc == nullptr) {
            moonpool::copy(to.data(), from.data(), from.bytes);
        } else {
            *crc = copy_crc32c(*crc, to.data(), from.data(), from.bytes);
        }
        return success();
    }
    Status sum(const MemoryRef& bytes, uint32_t& crc, Stream*) const override {
        crc = crc32c(crc, bytes.data(), bytes.bytes);
        return success();
    }
};

const HostCopier kHostCopier;
const Copier* const kCopiers[] = {&kHostCopier};

Error no_copier(MemoryKind from, MemoryKind to) {
    return Error{Code::kInvalidArgument, "this build copies no bytes from " + kind_name(from) +
                                             " memory to " + kind_name(to) + " memory"};
}

// The copier of the last pair of kinds: parts of one object mostly are of one kind.
class Chosen {
   public:
    const Copier* between(MemoryKind from, MemoryKind to) {
        if (copier_ == nullptr || from != from_ || to != to_) {
            copier_ = find_copier(from, to);
            from_ = from;
            to_ = to;
        }
        return copier_;
    }

   private:
    const Copier* copier_ = nullptr;
    MemoryKind from_{}, to_{};
};

}  // namespace

const Copier* find_copier(MemoryKind from, MemoryKind to) {
    for (const Copier* copier : kCopiers) {
        if (copier->can(from, to)) return copier;
    }
    return nullptr;
}

Status gather(const MemoryRef& to, std::span<const MemoryRef> from, uint32_t* crc) {
    Chosen chosen;
    uint64_t at = 0;
    for (const MemoryRef& part : from) {
        const Copier* copier = chosen.between(part.kind, to.kind);
        if (copier == nullptr) return no_copier(part.kind, to.kind);
        if (Status copied = copier->copy(to.sub(at, part.bytes), part, crc); !copied) return copied;
        at += part.bytes;
    }
    return success();
}

Status scatter(std::span<const MemoryRef> to, const MemoryRef& from, uint32_t* crc) {
    Chosen chosen;
    uint64_t at = 0;
    for (const MemoryRef& part : to) {
        uint64_t n = std::min(part.bytes, from.bytes - at);
        if (n == 0) continue;  // an empty part, or nothing is left
        const Copier* copier = chosen.between(from.kind, part.kind);
        if (copier == nullptr) return no_copier(from.kind, part.kind);
        if (Status copied = copier->copy(part.sub(0, n), from.sub(at, n), crc); !copied) return copied;
        at += n;
    }
    return success();
}

Status sum(const MemoryRef& bytes, uint32_t& crc) {
    if (bytes.bytes == 0) return success();
    const Copier* copier = find_copier(bytes.kind, bytes.kind);
    if (copier == nullptr) {
        return Error{Code::kInvalidArgument,
                     "this build makes no checksum of " + kind_name(bytes.kind) + " memory"};
    }
    return copier->sum(bytes, crc);
}

Result<uint32_t> checksum(std::span<const MemoryRef> parts, uint64_t bytes) {
    uint32_t crc = 0;
    for (const MemoryRef& part : parts) {
        uint64_t n = std::min(bytes, part.bytes);
        if (Status summed = sum(part.sub(0, n), crc); !summed) return summed.error();
        bytes -= n;
    }
    return crc;
}

}  // namespace moonpool
