// The initiator's half of shared memory: proves that the peer is on this host, learns its regions, and
// moves slices by copies and process_vm calls.
//
// Threads: run() on the caller's thread or one of the engine's copying threads, several at a time. Nothing
// waits for the peer, but for open() and a refresh of the view.
//
// Between two calls: client_, path_ and peer_ are set by open() and never change. view_ is the peer's list of
// regions of one generation, never changed once it is there: a thread takes a reference and keeps it for its
// job. A refresh asks only for what has changed, and the two views share the rest. No thread is inside the
// gate or a local region except in the middle of Carrier::run(), and there for kAccessBytesMax at a time.
// Once alive() is false the peer has ended, and no memory of it is touched.
//
// One thread at a time asks the peer, in the client's turn: for the refresh of the view, or for a region's
// memory, which it maps then. view_mutex_ (which view is the newest) is held for a copy of a pointer.
#include "transport/shm/link.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>

#include "base/copy.hpp"
#include "transport/shm/call_ranges.hpp"

namespace moonpool::transport::shm {

namespace {

constexpr size_t kRangesMax = 512;   // in one process_vm call; the kernel takes 1,024
constexpr int kRefreshesMax = 1000;  // of the view in one job: the peer deregisters faster than we can look

constexpr size_t kLookedAtMax = 64;  // slices, before a job is handed to a thread

constexpr const char* kForbidden = "the kernel forbids process_vm_readv of the peer";

// A memfd that the peer passed.
Result<PeerMemory> map_passed(const Fd& passed, uint64_t bytes) {
    struct stat info {};
    int seals = ::fcntl(passed.get(), F_GET_SEALS);
    // Memory that could shrink under a reader would kill it.
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(passed.get(), &info) != 0 ||
        static_cast<uint64_t>(info.st_size) < bytes) {
        return Error{Code::kProtocol, "the peer passed memory that is not sealed"};
    }
    Result<Mapping> mapping = Mapping::map(passed.get(), round_up_to_page(bytes), true);
    if (!mapping) return mapping.error();
    return PeerMemory(std::move(*mapping));
}

// A piece of a DAX device, which is opened here by its name.
Result<PeerMemory> map_dax(const std::vector<std::byte>& answer, uint64_t bytes, const std::string& machine) {
    Reader r(answer);
    (void)r.number<uint64_t>();  // its size
    DaxPlace place;
    place.device = r.text16();
    place.offset = r.number<uint64_t>();
    place.nonce = r.number<uint64_t>();
    // A later version may append.
    if (!r.ok()) return Error{Code::kProtocol, "the peer passed no memory"};
    Result<Mapping> mapping = DaxMemory::map_peers(place, bytes, machine);
    if (!mapping) return mapping.error();
    return PeerMemory(std::move(*mapping), place.offset);
}

Error lost() { return Error{Code::kUnavailable, "the peer's process is gone"}; }

}  // namespace

Status Link::open(const PeerInfo& peer, const Identity& self, int timeout_ms) {
    if (peer.shm.socket.empty()) return Error{Code::kUnavailable, "the peer does not offer shared memory"};
    Result<host::Client::Turn> turn = client_.turn(host::Patience::until(timeout_ms));
    if (!turn) return turn.error();
    if (Status status = turn->open(peer.shm, peer, self); !status) return status;
    probe_process_vm();
    path_ = "shm (process " + std::to_string(client_.process()) + ")";
    peer_ = peer;
    return success();
}

// Reads the gate's page out of the peer: the right process, and the kernel lets us.
void Link::probe_process_vm() {
    if (client_.process() == 0) {
        no_process_vm_ = "the peer's process is in another pid namespace";
        return;
    }
    uint64_t seen = 0;
    iovec here{&seen, sizeof(seen)};
    iovec there{reinterpret_cast<void*>(client_.page_address()), sizeof(seen)};
    // A pid that was reused, or that of another namespace, reads other bytes than the nonce or none at
    // all.
    ssize_t n = ::process_vm_readv(client_.process(), &here, 1, &there, 1, 0);
    if (n != sizeof(seen)) {
        no_process_vm_ =
            std::string("the kernel forbids process_vm_readv of the peer (") + std::strerror(errno) + ")";
    } else if (seen != client_.nonce()) {
        no_process_vm_ = "the peer's process has another number here";
    }
    process_vm_ = no_process_vm_.empty();
}

bool Link::reaches(MemoryKind kind, std::string* why) const {
    std::string text;
    if (!client_.alive()) {
        text = lost().text;
    } else if (kind == MemoryKind::kHost && !process_vm_) {
        text = no_process_vm_.empty() ? kForbidden : no_process_vm_;
    } else if (kind != MemoryKind::kHost && kind != MemoryKind::kHostArena) {
        text = "shared memory does not reach memory of the kind \"" + kind_name(kind) + "\"";
    }
    if (why != nullptr) *why = text;
    return text.empty();
}

// Not where the peer would be asked, for its list of regions or for memory: it may stand still.
bool Link::runs_on_caller(const Job& job) const {
    std::shared_ptr<const View> known;
    {
        MutexLock lock(view_mutex_);
        known = view_;
    }
    if (known == nullptr || client_.gate()->page().generation.load() != known->generation) return false;
    return std::ranges::all_of(
        std::span(job.slices).first(std::min(job.slices.size(), kLookedAtMax)), [&](const Slice& slice) {
            const std::shared_ptr<Place>* place = known->places.find(slice.remote, slice.length);
            return place != nullptr &&
                   ((*place)->kind != MemoryKind::kHostArena || (*place)->memory() != nullptr);
        });
}

// kInvalidArgument: the peer has deregistered it.
Status Link::map(Place& place, const Job& job) {
    Result<host::Client::Turn> turn = client_.turn(host::Patience::of(job));
    if (!turn) return turn.error();
    if (place.mapped != nullptr) return success();  // another thread was faster
    std::vector<std::byte> question;
    Writer(question).number(place.id);
    if (Status status = turn->ask(Kind::kShmMap, question); !status) return status;
    const Fd& passed = turn->passed();
    Result<PeerMemory> mapped =
        passed.valid() ? map_passed(passed, place.length) : map_dax(turn->answer(), place.length, machine_);
    if (!mapped) return mapped.error();
    place.mapped = std::make_unique<PeerMemory>(std::move(*mapped));
    place.ready.store(place.mapped.get(), std::memory_order_release);
    return success();
}

// Regions that stay keep their Place, and with it their mapping.
Result<Link::Places> Link::changed(const Places& old, ChangedRows changes) {
    Places next = changes.whole ? Places() : old;
    for (const RegionChanges::Removed& removed : changes.removed) {
        const std::shared_ptr<Place>* place = next.at(removed.address);
        if (place != nullptr && (*place)->id == removed.id) next.remove(removed.address);
    }
    for (RegionRow& row : changes.added) {
        const std::shared_ptr<Place>* known = old.at(row.address);
        // Ids are never used twice, so the same id at the same place is the same memory.
        bool same = known != nullptr && (*known)->id == row.id && (*known)->length == row.length;
        if (next.overlapping(row.address, row.length) != nullptr || next.size() == kRegionsMax) {
            return Error{Code::kProtocol, "the peer sent a list of regions that contradicts itself"};
        }
        next.add(same ? *known : std::make_shared<Place>(std::move(row)));
    }
    return next;
}

// The peer's regions as known; what has changed is asked for when that is no newer than `fresher_than`.
Result<std::shared_ptr<const Link::View>> Link::view(const View* fresher_than, const Job& job) {
    auto known = [&] {
        MutexLock lock(view_mutex_);
        return view_;
    };
    // The usual way: no system call, and no lock but that one.
    std::shared_ptr<const View> old = known();
    if (old != nullptr && old.get() != fresher_than) return old;
    Result<host::Client::Turn> turn = client_.turn(host::Patience::of(job));
    if (!turn) return turn.error();
    if (std::shared_ptr<const View> now = known(); now != old) return now;  // another thread has just asked
    std::vector<std::byte> question = regions_question(peer_, old == nullptr ? 0 : old->edition);
    if (Status status = turn->ask(Kind::kEngineRegions, question); !status) return status.error();
    Reader r(turn->answer());
    auto next = std::make_shared<View>();
    next->generation = r.number<uint64_t>();
    std::optional<ChangedRows> changes = decode_changes(r);
    if (!changes) return Error{Code::kProtocol, "the peer sent an unreadable list of regions"};
    next->edition = changes->edition;
    Result<Places> places = changed(old == nullptr ? Places() : old->places, std::move(*changes));
    if (!places) return places.error();
    next->places = std::move(*places);
    MutexLock inner(view_mutex_);
    view_ = next;
    return std::shared_ptr<const View>(next);
}

// One job on its way: what it is inside of, and the ranges that wait for the next process_vm call.
class Link::Carrier {
   public:
    Carrier(Link& link, Job& job) : link_(link), job_(job), tally_(link.counters_) {}

    Status run() {
        Result<std::shared_ptr<const View>> view = link_.view(nullptr, job_);
        if (!view) return view.error();
        view_ = *view;
        for (size_t i = 0; i < job_.slices.size(); ++i) {
            if (!job_.is_waiting(i)) continue;
            if (Status status = carry(i); !status) return status;
        }
        if (Status status = flush(); !status) return status;
        leave();
        if (!link_.client_.alive()) return lost();
        if (job_.waiting == 0) return success();
        // Slices are left that this path cannot carry; the sentence says why.
        if (unmapped_) return *unmapped_;
        std::string why;
        (void)link_.reaches(unreached_, &why);
        return Error{Code::kUnavailable, why};
    }

   private:
    Status carry(size_t i) {
        const Slice& slice = job_.slices[i];
        const bool write = slice.direction == Direction::kWrite;
        uint64_t at = 0;
        do {
            if (job_.stopped()) return Error{Code::kClosed, "stopped"};
            // Again before every piece: it is what ends a visit that has lasted long enough.
            if (Status status = enter(); !status) return status;
            Place* place = place_of(slice.remote + at, slice.length - at);
            if (place == nullptr) {
                // The peer may have registered it since the view was taken: asked for once in a job.
                if (!refreshed_) {
                    refreshed_ = true;
                    if (Status status = refresh(); !status) return status;
                    continue;
                }
                fail(i, "the range " + range_text(slice) + " lies in no registered region of the peer");
                return success();
            }
            PeerMemory* memory = place->memory();
            if (memory == nullptr && place->kind == MemoryKind::kHostArena) {
                Result<bool> mapped = map(*place);
                if (!mapped) return mapped.error();
                if (*mapped) continue;
                return success();  // waits
            }
            // Left waiting, not failed: the next link of the peer may reach it.
            if (memory == nullptr && !(place->kind == MemoryKind::kHost && link_.process_vm_)) {
                unreached_ = place->kind;
                return success();  // waits
            }
            uint64_t n = std::min(slice.length - at, kAccessBytesMax - held_);
            Visit::Access mine = here_.reach(*job_.locals[i], slice.local, slice.length, at, n);
            if (mine == Visit::Access::kClosing) {
                fail(i, "the local region was deregistered");
                return success();
            }
            bool mapped = memory == nullptr || place->length <= memory->size();
            if (mine == Visit::Access::kOutside || !place->contains(slice.remote + at, n) || !mapped) {
                job_.fail(i, Code::kProtocol, kOutsideText);
                return success();
            }
            held_ += n;
            auto* local = reinterpret_cast<std::byte*>(slice.local + at);
            if (memory != nullptr) {
                uint64_t offset = slice.remote + at - place->address;
                memory->fill(offset, n);
                std::byte* remote = memory->data() + offset;
                moonpool::copy(write ? remote : local, write ? local : remote, n);
                at += n;
                if (at == slice.length) done(i);
            } else {
                // One call moves in one direction. Ranges gather until the direction changes, the call is
                // full, or the visit ends.
                if ((!pieces_.empty() && write != write_) || pieces_.size() == kRangesMax) {
                    if (Status status = flush(); !status) return status;
                    if (!job_.is_waiting(i)) return success();
                }
                write_ = write;
                pieces_.push_back({.slice = i,
                                   .last = at + n == slice.length,
                                   .region = place,
                                   .here = reinterpret_cast<char*>(local),
                                   .there = reinterpret_cast<char*>(slice.remote + at),
                                   .bytes = n});
                at += n;
            }
        } while (at < slice.length && job_.is_waiting(i));
        return success();
    }

    Place* place_of(uint64_t address, uint64_t bytes) {
        if (place_ == nullptr || !place_->contains(address, bytes)) {
            const std::shared_ptr<Place>* found = view_->places.find(address, bytes);
            place_ = found == nullptr ? nullptr : found->get();
        }
        return place_;
    }

    // Outside of the gate, since the peer is asked. True: look at the slice again; false: it waits.
    Result<bool> map(Place& place) {
        if (Status status = flush(); !status) return status.error();
        leave();
        Status mapped = link_.map(place, job_);  // view_ keeps the place
        if (mapped) return true;
        if (mapped.error().code == Code::kInvalidArgument && !refreshed_) {
            refreshed_ = true;  // deregistered since it was listed
            if (Status status = refresh(); !status) return status.error();
            return true;
        }
        unmapped_ = mapped.error();
        return false;
    }

    // Inside the gate, with a view that is still true. Leaves it now and then, so that no thread waits long
    // to deregister.
    Status enter() {
        if (pass_ && held_ < kAccessBytesMax) return success();
        if (Status status = flush(); !status) return status;
        leave();
        for (int round = 0; round < kRefreshesMax; ++round) {
            if (!link_.client_.alive()) return lost();
            // The gate refuses a view that is older than the peer's last deregistration.
            pass_.emplace(*link_.client_.gate(), view_->generation);
            if (pass_->open()) return success();
            pass_.reset();
            if (Status status = refresh(); !status) return status;
        }
        return Error{Code::kUnavailable, "the peer's regions change too fast"};
    }
    Status refresh() {
        if (Status status = flush(); !status) return status;
        leave();
        Result<std::shared_ptr<const View>> view = link_.view(view_.get(), job_);
        if (!view) return view.error();
        view_ = *view;
        return success();
    }
    void leave() {
        pass_.reset();
        here_.end();
        held_ = 0;
        place_ = nullptr;
    }

    // Moves the pieces that have gathered, by one process_vm call. The kernel stops at the first that it
    // cannot reach.
    Status flush() {
        size_t at = 0;
        while (at < pieces_.size()) {
            ranges_.build(std::span(pieces_).subspan(at), !write_);
            const std::span<const iovec> here = ranges_.here(), there = ranges_.there();
            const pid_t process = link_.client_.process();
            ssize_t n =
                write_ ? ::process_vm_writev(process, here.data(), here.size(), there.data(), there.size(), 0)
                       : ::process_vm_readv(process, here.data(), here.size(), there.data(), there.size(), 0);
            if (n > 0) {
                auto left = static_cast<size_t>(n);
                for (; at < pieces_.size(); ++at) {
                    Piece& piece = pieces_[at];
                    left -= std::min(left, piece.gap);
                    if (left < piece.bytes) {
                        piece.advance(left);
                        break;
                    }
                    left -= piece.bytes;
                    // Not done when an earlier piece of it has failed.
                    if (piece.last && job_.is_waiting(piece.slice)) done(piece.slice);
                }
                continue;
            }
            int error = errno;
            if (n < 0 && error == EINTR) continue;
            if (n < 0 && (error == EPERM || error == ENOSYS)) {
                link_.process_vm_ =
                    false;  // as it was allowed before, the reason is a change of the system's
                pieces_.clear();
                return Error{Code::kUnavailable, kForbidden};
            }
            if (n < 0 && error == ESRCH) {
                pieces_.clear();
                return lost();
            }
            size_t slice = pieces_[at].slice;
            if (job_.is_waiting(slice)) {
                fail(slice, "the range " + range_text(job_.slices[slice]) +
                                " is registered but not mapped (" + std::strerror(n < 0 ? error : EFAULT) +
                                ")");
            }
            // The slices behind it are carried on: one bad range must not fail a batch.
            while (at < pieces_.size() && pieces_[at].slice == slice) ++at;
        }
        pieces_.clear();
        return success();
    }
    void done(size_t i) {
        const Slice& slice = job_.slices[i];
        tally_.count(slice.direction == Direction::kWrite, slice.length);
        job_.bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
        job_.done(i);
    }
    void fail(size_t i, const std::string& why) { job_.fail(i, Code::kInvalidArgument, why); }

    Link& link_;
    Job& job_;
    Tally tally_;
    std::shared_ptr<const View> view_;
    Place* place_ = nullptr;
    std::optional<host::Pass> pass_;
    Visit here_;
    uint64_t held_ = 0;
    bool refreshed_ = false;
    bool write_ = false;
    MemoryKind unreached_ = MemoryKind::kHost;  // of a slice that waits for another path
    std::optional<Error> unmapped_;             // why such a slice's region was not mapped
    std::vector<Piece> pieces_;
    CallRanges ranges_;
};

Status Link::run(Job& job) { return Carrier(*this, job).run(); }

}  // namespace moonpool::transport::shm
