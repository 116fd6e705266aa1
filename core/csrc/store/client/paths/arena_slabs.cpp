// The half of ArenaPath that says where in the arena an object is written: in slabs, leased from the node,
// which small objects share.
#include <algorithm>

#include "store/client/paths/arena_path.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kObjectAlign = 64;     // a cache line: neighbours do not share one
constexpr uint64_t kLeaseAheadSlabs = 4;  // a batch leases at most this many slabs in one piece

}  // namespace

ArenaPath::Slab::~Slab() {
    if (!path.session_.alive()) return;
    (void)path.arena_.protect(extent.offset, extent.size, false);
    path.session_.post(Kind::kReturn, [this](Writer& w) { w.number(extent.offset); });
}

Result<std::shared_ptr<ArenaPath::Slab>> ArenaPath::lease(uint64_t min, uint64_t want, std::string& why,
                                                          int timeout_ms) {
    Extent extent;
    Status status = session_.call(
        Kind::kLease,
        [&](Writer& w) {
            w.number(min);
            w.number(want);
        },
        [&](Reader& r) {
            extent.offset = r.number<uint64_t>();
            extent.size = r.number<uint64_t>();
            why = std::string(r.text16());
            return r.done() && extent.size <= arena_.size() && extent.offset <= arena_.size() - extent.size;
        },
        timeout_ms);
    if (!status) return status.error();
    if (extent.size == 0) return std::shared_ptr<Slab>();
    auto slab = std::make_shared<Slab>(*this, extent);
    if (Status writable = make_writable(extent); !writable) return writable.error();
    return slab;
}

Status ArenaPath::make_writable(Extent extent) {
    if (Status status = arena_.protect(extent.offset, extent.size, true); !status) return status;
    bool fresh = false;
    {
        MutexLock lock(populated_mutex_);
        populated_.resize(arena_.size() / kHugePageBytes + 1);
        for (uint64_t page = extent.offset / kHugePageBytes; page <= (extent.end() - 1) / kHugePageBytes;
             ++page) {
            fresh |= !populated_[page];
            populated_[page] = true;
        }
    }
    if (fresh) arena_.populate_for_write(extent.offset, extent.size);
    return success();
}

uint64_t ArenaPath::room_bytes(uint64_t size) {
    return (size + kObjectAlign - 1) / kObjectAlign * kObjectAlign;
}

Result<ArenaPath::Room> ArenaPath::reserve(uint64_t size, uint64_t ahead, std::shared_ptr<Slab>& own,
                                           std::string& why, int timeout_ms) {
    if (size == 0) return Room{};
    if (size > session_.object_bytes_max()) {
        why = "an object of " + std::to_string(size) + " bytes is over the limit of " +
              std::to_string(session_.object_bytes_max()) + " bytes (node.object_share_max of the arena)";
        return Room{};
    }
    uint64_t need = room_bytes(size);
    if (own == nullptr || own->cursor + need > own->extent.size) {
        own.reset();  // goes back once it is committed, so that what is in it may make room
        if (need + ahead < session_.slab_bytes()) return reserve_shared(size, ahead, why, timeout_ms);
        uint64_t want = std::max(need, std::min(need + ahead, session_.slab_bytes() * kLeaseAheadSlabs));
        Result<std::shared_ptr<Slab>> slab = lease(need, want, why, timeout_ms);
        if (!slab) return slab.error();
        if (*slab == nullptr) return Room{};
        own = std::move(*slab);
    }
    Room room{own, Extent{own->extent.offset + own->cursor, size}};
    own->cursor += need;
    return room;
}

// For what is less than a slab: all threads fill one.
Result<ArenaPath::Room> ArenaPath::reserve_shared(uint64_t size, uint64_t ahead, std::string& why,
                                                  int timeout_ms) {
    uint64_t need = room_bytes(size);
    MutexLock lock(slab_mutex_);
    if (slab_ == nullptr || slab_->cursor + need > slab_->extent.size) {
        // A large object gets a lease of its own; the slab for small ones stays as it is.
        bool own = need > session_.slab_bytes() / 2 && ahead == 0;
        if (!own) slab_.reset();  // goes back once its last writer has committed
        Result<std::shared_ptr<Slab>> slab = lease(need, own ? need : session_.slab_bytes(), why, timeout_ms);
        if (!slab) return slab.error();
        if (*slab == nullptr) return Room{};
        if (own) {
            (*slab)->cursor = need;
            return Room{*slab, Extent{(*slab)->extent.offset, size}};
        }
        slab_ = std::move(*slab);
    }
    Room room{slab_, Extent{slab_->extent.offset + slab_->cursor, size}};
    slab_->cursor += need;
    return room;
}

void ArenaPath::unreserve(Room& room) {
    if (room.slab == nullptr) return;
    MutexLock lock(slab_mutex_);
    uint64_t need = room_bytes(room.extent.size);
    if (room.slab->extent.offset + room.slab->cursor == room.extent.offset + need) room.slab->cursor -= need;
    room.slab.reset();
}

void ArenaPath::retire() {
    MutexLock lock(slab_mutex_);
    slab_.reset();
}

}  // namespace moonpool
