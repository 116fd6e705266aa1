// PinnedArena: the parts of the own node's arena that a card reads without a copy by the CPU. The arena is
// mapped read-only and pinned from its front on, as far as a caller asks and the node has settled it.
//
// A load that reads an object here keeps the PinnedArena by a shared_ptr until the object's end(). So the
// pins and the mapping go when no owner is left: neither before the last copy has ended nor, of a node that
// has ended, long after, when they would keep memory from its successor.
//
// Copies of another component's (LMCache's kernels) have no end that is known here. They read views(), which
// own the PinnedArena and the objects' pin at the node: their memory goes to no other object meanwhile.
//
// Threads: grow() on one, the others on any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "device/registered_parts.hpp"
#include "store/client/client.hpp"

namespace moonpool {

// What grow() came to.
struct ArenaPins {
    uint64_t pinned_bytes = 0, arena_bytes = 0;
    std::string why;  // there are fewer than were asked for and than the arena has; empty: there are not
};

class PinnedArena : public std::enable_shared_from_this<PinnedArena> {
   public:
    struct Options {
        uint64_t part_bytes = device::RegisteredParts::kPartBytes;
        uint64_t object_bytes_min = 0;  // shorter objects are left to the ring
    };
    static Result<std::shared_ptr<PinnedArena>> open(std::shared_ptr<const device::Device> device,
                                                     Client& client, const Options& options);
    ~PinnedArena();
    PinnedArena(const PinnedArena&) = delete;

    // Pins more, until `bytes` are pinned.
    ArenaPins grow(uint64_t bytes);
    // client: as of views(). See Client::lives().
    bool alive(Client& client) const { return client.lives(*arena_); }

    // The object, if a card can read it here now; the card's copies end before end().
    std::optional<OwnArena::Read> begin(std::string_view holders, const Descriptor& handed) const;
    uint64_t address(const OwnArena::Read& read) const;
    // Of those that were good at their end.
    void note_reads(Client& client, std::span<const OwnArena::Read> reads) const {
        client.note_reads(*arena_, reads);
    }

    // Objects for a card, or the CPU, to read them here as long as their views' owners live. No owner: it
    // does not lie in one pinned part of this life of the node, and is not pinned. client: of the arena's
    // tenant.
    Result<std::vector<ObjectView>> views(Client& client, std::span<const std::string_view> names) const;

    // A card may read here for ever: pins and mapping stay.
    void leak() { leaked_ = true; }

   private:
    // Object i, if it is one for views().
    ObjectView view(const Pinned& pinned, size_t i) const;

    PinnedArena(std::shared_ptr<const device::Device> device, std::unique_ptr<OwnArena> arena,
                const Options& options)
        : options_(options),
          arena_(std::move(arena)),
          parts_(std::move(device), arena_->data(), options.part_bytes) {}

    const Options options_;
    const std::unique_ptr<OwnArena> arena_;
    device::RegisteredParts parts_;
    std::atomic<bool> leaked_{false};
};

}  // namespace moonpool
