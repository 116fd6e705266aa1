// Slices and their pieces: what a task has to move next, what was done of it, and when it ends.
#include <algorithm>

#include "base/clock.hpp"
#include "transport/nic/link.hpp"

namespace moonpool::transport::nic {

namespace {

constexpr uint64_t kWholeBytes = 128u << 10;  // a slice up to here is not cut
constexpr uint64_t kKeylessNs = 2'000'000;    // memory that gets its keys is looked at again
constexpr int kRefusedMax = 3;                // of one slice

}  // namespace

void Link::piece_done(const Piece& piece, Tally& tally) {
    Task& task = *piece.task;
    Job& job = task.job;
    --task.open;
    if (!job.is_waiting(piece.slice)) return;
    const Slice& slice = job.slices[piece.slice];
    if (piece.bytes != slice.length) {
        uint64_t& rest = task.rest.try_emplace(piece.slice, slice.length).first->second;
        rest -= piece.bytes;
        if (rest != 0) return;
        task.rest.erase(piece.slice);
    }
    job.bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
    job.done(piece.slice);
    tally.count(slice.direction == Direction::kWrite, slice.length);
}

void Link::put_back(const Piece& piece) {
    --piece.task->open;
    if (piece.task->job.is_waiting(piece.slice)) {
        piece.task->again.push_back({piece.slice, piece.at, piece.bytes});
        context_.counters.retries_total.fetch_add(1, std::memory_order_relaxed);
    }
}

Task::Range* Link::next_range(Task& task) const {
    while (!task.again.empty() && !task.job.is_waiting(task.again.front().slice)) task.again.pop_front();
    if (!task.again.empty()) return &task.again.front();
    const Job& job = task.job;
    while (task.next < job.slices.size() && !job.is_waiting(task.next)) ++task.next;
    if (task.next == job.slices.size()) return nullptr;
    task.again.push_back({task.next, 0, job.slices[task.next].length});
    ++task.next;
    return &task.again.front();
}

// Of what the task has to move next.
int Link::node_of(Task& task) const {
    const Task::Range* range = next_range(task);
    if (range == nullptr) return -1;
    const Slice& slice = task.job.slices[range->slice];
    const Region& local = *task.job.locals[range->slice];
    std::shared_ptr<KeyedRegion> keyed = keys_->find(local.id);
    if (keyed == nullptr || !local.contains(slice.local, slice.length)) return -1;
    return keyed->node((slice.local + range->at - local.address) / keyed->chunk_bytes);
}

const RemoteRegion* Link::find_remote(uint64_t address, uint64_t bytes) const {
    auto it = known_.upper_bound(address);
    if (it == known_.begin()) return nullptr;
    const RemoteRegion& row = std::prev(it)->second;
    return row.contains(address, bytes) ? &row : nullptr;
}

// Null: it has no keys.
KeyedRegion* Link::find_keyed(Task& task, const Region& local) const {
    auto& [region, keyed] = task.keyed_last;
    if (region == &local && keyed != nullptr) return keyed.get();
    if (keyed != nullptr) task.keyed_others.try_emplace(region, std::move(keyed));
    region = &local;
    auto known = task.keyed_others.find(&local);
    keyed = known != task.keyed_others.end() ? known->second : keys_->find(local.id);
    return keyed.get();
}

// Whether the rail has another piece of the task to carry.
bool Link::take_piece(Rail& rail, Task& task) {
    Job& job = task.job;
    while (Task::Range* range = next_range(task)) {
        const size_t i = range->slice;
        const Slice& slice = job.slices[i];
        auto leave = [&](std::string why) {
            task.left_undone = Error{Code::kUnavailable, std::move(why)};
            task.again.pop_front();
        };
        Region& local = *job.locals[i];
        if (!local.contains(slice.local, slice.length)) {
            job.fail(i, Code::kProtocol, kOutsideText);
            continue;
        }
        // Of the whole slice: it lies in one region.
        const RemoteRegion* remote = find_remote(slice.remote, slice.length);
        if (remote == nullptr) {
            task.unknown.push_back(*range);
            task.again.pop_front();
            continue;
        }
        std::string why;
        const bool of_card = remote->kind == MemoryKind::kDevice;
        if (!reaches(remote->kind, &why) || (of_card && remote->devices == 0)) {
            leave(why.empty() ? "the peer's NIC has no keys for memory of a card" : std::move(why));
            continue;
        }
        if (auto found = task.refused.find(i); found != task.refused.end() && found->second >= kRefusedMax) {
            leave("the peer's NIC refuses memory that the peer lists");
            continue;
        }
        const KeyedRegion* keyed = find_keyed(task, local);
        if (local.closing()) {
            job.fail(i, Code::kInvalidArgument, "the local region was deregistered");
            continue;
        }
        if (keyed == nullptr) {  // of a slot, which is no region
            leave("no NIC has a key for the local memory");
            continue;
        }
        const uint64_t from = slice.local + range->at - local.address;
        const uint64_t to = slice.remote + range->at - remote->address;
        Key here = keyed->key(from / keyed->chunk_bytes, rail.device), there;
        if (remote->devices > rail.peer_device) {
            there = remote->keys[to / remote->chunk_bytes * remote->devices + rail.peer_device];
        } else if (remote->devices != 0) {
            there.state = KeyState::kRefused;
        }
        if (here.state == KeyState::kRefused || there.state == KeyState::kRefused) {
            leave(here.state == KeyState::kRefused ? keyed->why_refused()
                                                   : "the peer's NIC has no key: " + remote->why_refused);
            continue;
        }
        if (here.state == KeyState::kPending || there.state == KeyState::kPending) {
            if (!job.last_path) {
                leave("the memory is getting its keys");
            } else {
                task.keyless.push_back(*range);
                task.again.pop_front();
                keyless_until_ns_ = clock() + kKeylessNs;
            }
            // Asked for again.
            if (there.state == KeyState::kPending) known_.erase(remote->address);
            continue;
        }
        const int node = keyed->node(from / keyed->chunk_bytes);
        if (uneven_ && is_for_nearer(rail, task, node, std::min(range->bytes, options_.nic.piece_bytes))) {
            return false;
        }
        if (!task.held.hold(local)) {
            job.fail(i, Code::kInvalidArgument, "the local region was deregistered");
            continue;
        }
        uint64_t n =
            range->bytes <= kWholeBytes ? range->bytes : std::min(range->bytes, options_.nic.piece_bytes);
        n = std::min(n, rail.batch_bytes());
        n = std::min({n, keyed->chunk_bytes - from % keyed->chunk_bytes,
                      remote->chunk_bytes - to % remote->chunk_bytes});
        rail.add({&task, i, range->at, n}, slice.direction == Direction::kWrite,
                 {slice.local + range->at, here.local, 0, local.on_card()},
                 {slice.remote + range->at, there.remote, to % remote->chunk_bytes});
        note_missed(rail, node);
        ++task.open;
        range->at += n;
        range->bytes -= n;
        if (range->bytes == 0) task.again.pop_front();
        return true;
    }
    return false;
}

bool Link::wants_rail(const Task& task) const {
    return !task.job.stopped() && task.job.waiting != 0 &&
           (!task.again.empty() || task.next < task.job.slices.size());
}

bool Link::is_late(const Task& task) const {
    const Job& job = task.job;
    return wall_ns_ > job.progress_ns.load(std::memory_order_relaxed) +
                          static_cast<uint64_t>(job.timeout_ms) * 1'000'000;
}

// A task that must end waits for no answer of the peer, nor for a rail that has been silent as long as the
// task may wait. What may still arrive is repeated over no path.
void Link::give_up_open(Task& task, uint64_t now) {
    const bool late = is_late(task);
    if (!late && !task.job.stopped() && !closed_) return;
    for (const auto& rail : rails_) {
        const uint64_t patience_ns = static_cast<uint64_t>(task.job.timeout_ms) * 1'000'000;
        if (late && rail->state == Rail::State::kUp && rail->busy() &&
            now > rail->progress_ns() + patience_ns) {
            stop(*rail, "nothing moved until the deadline of a transfer", true);
        }
        std::erase_if(rail->fenced, [&](const Piece& piece) REQUIRES(mutex_) {
            if (piece.task != &task) return false;
            --task.open;
            rail->unsettled = true;
            if (late && task.job.is_waiting(piece.slice)) {
                task.job.fail(piece.slice, Code::kTimeout,
                              rail->name() + ": " + rail->why + "; the peer did not end its side in time");
            }
            return true;
        });
    }
}

bool Link::may_end(Task& task, uint64_t now) {
    if (task.open != 0) give_up_open(task, now);
    if (task.open != 0) return false;
    Job& job = task.job;
    if (job.waiting == 0) return true;
    auto end = [&](Code code, std::string why) {
        task.status = Error{code, std::move(why)};
        return true;
    };
    if (closed_) return end(Code::kUnavailable, "the segment was closed");
    if (job.stopped()) return end(Code::kClosed, "stopped");
    if (is_late(task)) return end(Code::kTimeout, rails_.front()->why);
    if (!task.unknown.empty() || !task.keyless.empty()) return false;
    if (!wants_rail(task)) {
        task.status = task.left_undone;
        return true;
    }
    if (!all_settled()) {
        return task.faults >= kFaultsMax
                   ? end(Code::kUnavailable, "the peer has not ended a connection whose writes were given up")
                   : false;
    }
    const Rail* tried = nullptr;
    for (const auto& rail : rails_) {
        if (rail->state != Rail::State::kDown || may_connect(*rail, now)) return false;
        if (tried == nullptr || rail->faults > tried->faults) tried = rail.get();
    }
    return end(Code::kUnavailable, tried->port_up() ? tried->why : "the port " + tried->name() + " is down");
}

}  // namespace moonpool::transport::nic
