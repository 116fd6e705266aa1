// Why nothing comes back. A directory that takes part in an opening is told all that happens until the next
// one. Of one that does not, `filter_` has every key that was put, replaced or removed since: on all
// directories that are there, within a tenth of a second. When it returns, what the filter names is removed
// from it, and that is synced, before its block says that it is there. If the filter is full, or the
// directory was used apart from the others meanwhile, all of it is void; and so is all of the others then,
// since neither can be said to be newer.
#include "ssd/log_set.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <random>

namespace moonpool::ssd {

namespace {

constexpr uint64_t kSaveMs = 1000;
constexpr uint64_t kEpochShift = 40;  // of sequences: those of a later opening are higher, whatever was lost
constexpr uint64_t kEpochMax = 1u << 22;
constexpr uint32_t kHashesPerPiece = 65536;

uint64_t random_number() {
    std::random_device random;
    return (uint64_t{random()} << 32 | random()) | 1;
}

// Calls begin(done) and waits for the log; false: it was refused, or failed.
template <class Begin>
bool wait_for(Log& log, Begin begin) {
    auto promise = std::make_shared<std::promise<Outcome>>();
    std::future<Outcome> future = promise->get_future();
    if (!begin([promise](Outcome outcome) { promise->set_value(outcome); })) return false;
    while (log.is_stepped() && future.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
        log.step(true);
    return future.get() == Outcome::kDone;
}

bool sync_and_wait(Log& log) {
    return wait_for(log, [&](Done done) {
        log.sync(std::move(done));
        return true;
    });
}

// Runs `done` when the last of its copies has gone.
std::shared_ptr<void> at_end(std::function<void()> done) {
    return {nullptr, [done = std::move(done)](void*) {
                if (done) done();
            }};
}

}  // namespace

Result<std::unique_ptr<LogSet>> LogSet::open(std::vector<Log*> logs,
                                             const std::shared_ptr<std::atomic<uint64_t>>& sequence,
                                             size_t orders) {
    std::unique_ptr<LogSet> set(new LogSet(std::move(logs), orders));
    if (Status status = set->compare(); !status) return status.error();
    // A directory whose block cannot be written is away from now on, for the others.
    do {
        if (set->there() == 0) break;
        set->open_next();
    } while (!set->write_all());
    uint64_t least = std::min(set->opening_.epoch, kEpochMax) << kEpochShift;
    uint64_t known = sequence->load();
    while (known < least && !sequence->compare_exchange_weak(known, least)) {
    }
    return set;
}

LogSet::LogSet(std::vector<Log*> logs, size_t orders)
    : logs_(std::move(logs)),
      in_set_(logs_.size(), true),
      places_(logs_.size(), 0),
      applied_(orders, 0),
      acks_(std::make_shared<Acks>(logs_.size())) {
    MutexLock lock(acks_->mutex);
    acks_->openings.resize(logs_.size());
}

size_t LogSet::there() const { return static_cast<size_t>(std::ranges::count(in_set_, true)); }

uint64_t LogSet::away() const {
    return static_cast<uint64_t>(std::ranges::count(members_, State::kAway, &SetMember::state));
}

// Finds the block that was written last, and what each directory is by it. Removes what is void.
Status LogSet::compare() {
    size_t n = logs_.size();
    std::vector<std::optional<SetBlock>> blocks(n);
    size_t newest = n;
    auto age = [&](size_t i) { return std::pair(blocks[i]->opening.epoch, blocks[i]->revision); };
    for (size_t i = 0; i < n; ++i) {
        auto found = newest_set_block(logs_[i]->id(), logs_[i]->area());
        if (!found) continue;
        blocks[i] = std::move(found->first);
        places_[i] = 1 - found->second;
        if (newest == n || age(i) > age(newest)) newest = i;
        revision_ = std::max(revision_, blocks[i]->revision);
        MutexLock lock(acks_->mutex);
        acks_->openings[i] = blocks[i]->opening;
    }
    if (newest == n) {
        // New, or of an earlier release: they are one set from now on.
        for (int half = 0; half < 2; ++half) {
            uint64_t number = random_number();
            std::memcpy(set_.data() + 8 * half, &number, sizeof(number));
        }
        return success();
    }
    const SetBlock& last = *blocks[newest];
    set_ = last.set;
    opening_ = last.opening;
    members_ = last.members;
    enum class Place : uint8_t { kCurrent, kLate, kVoid, kNew };
    std::vector<Place> places(n, Place::kCurrent);
    bool apart = false;
    for (size_t i = 0; i < n; ++i) {
        if (!blocks[i]) {
            std::vector<Hash128> any;
            logs_[i]->hashes(0, UINT32_MAX, any);
            places[i] = any.empty() ? Place::kNew : Place::kVoid;
            continue;
        }
        if (blocks[i]->set != set_) {
            return Error{Code::kInvalidArgument,
                         logs_[i]->directory() + " and " + logs_[newest]->directory() +
                             " belong to different nodes, or were never used together; remove " + kLogFile +
                             " from the one whose content is to go"};
        }
        if (blocks[i]->opening == opening_) continue;
        auto member = std::ranges::find(members_, logs_[i]->id(), &SetMember::id);
        if (member == members_.end()) {
            places[i] = Place::kVoid;
        } else if (!member->was_at(blocks[i]->opening)) {
            apart = true;
        } else if (member->state == State::kAway) {
            places[i] = Place::kLate;
        } else if (member->state == State::kGone) {
            places[i] = Place::kVoid;
        }
    }
    if (apart) {
        std::ranges::fill(places, Place::kVoid);
        // What the filter names is of one of the two lives only.
        for (SetMember& member : members_) member.state = State::kGone;
    }

    if (last.filter_life != 0) {
        filter_.emplace(last.filter_life);
        for (size_t i = 0; i < n; ++i) {
            if (blocks[i] && blocks[i]->opening == opening_) filter_->unite(logs_[i]->id(), logs_[i]->area());
        }
        filter_->end_unite();
    }
    bool some = false;
    for (size_t i = 0; i < n; ++i) {
        if (places[i] == Place::kLate && (!filter_ || filter_->is_full())) places[i] = Place::kVoid;
        bool counts = places[i] == Place::kCurrent || places[i] == Place::kLate;
        if (counts && blocks[i]) {
            std::vector<uint64_t> applied = blocks[i]->applied;
            if (applied.size() != applied_.size()) applied.assign(applied_.size(), 0);
            for (size_t order = 0; order < applied_.size(); ++order)
                applied_[order] = some ? std::min(applied_[order], applied[order]) : applied[order];
            some = true;
        }
        if (places[i] == Place::kCurrent || places[i] == Place::kNew) continue;
        const ChangeFilter* only = places[i] == Place::kLate ? &*filter_ : nullptr;
        if (!drop(i, only)) in_set_[i] = false;
        note_ += (note_.empty() ? "" : "; ") + logs_[i]->directory();
        if (apart) {
            note_ += " was used apart from the others of its node: its content is void";
        } else if (only == nullptr) {
            note_ += " was away from its node for too long: its content is void";
        } else {
            note_ += " was away from its node: what changed meanwhile is void";
        }
    }
    return success();
}

// Durably, before its block may say that it is there. False: it takes no more writes.
bool LogSet::drop(size_t i, const ChangeFilter* only) {
    uint32_t cursor = 0;
    do {
        std::vector<Hash128> hashes;
        cursor = logs_[i]->hashes(cursor, kHashesPerPiece, hashes);
        for (const Hash128& hash : hashes) {
            if (only == nullptr || only->may_contain(hash)) voided_ += logs_[i]->remove(hash);
        }
    } while (cursor != 0);
    return sync_and_wait(*logs_[i]);
}

// The next opening, of the directories that are there.
void LogSet::open_next() {
    Opening next{opening_.epoch + 1, random_number()};
    MutexLock lock(acks_->mutex);
    for (SetMember& member : members_) {
        auto log = std::ranges::find(logs_, member.id, [](const Log* l) { return l->id(); });
        auto i = static_cast<size_t>(log - logs_.begin());
        if (log != logs_.end() && in_set_[i]) {
            member = {member.id, next, acks_->openings[i], State::kThere};
        } else if (member.state == State::kThere) {
            member.state = State::kAway;
        }
        // Of what it missed nothing more is said.
        if (member.state == State::kAway && filter_ && filter_->is_full()) member.state = State::kGone;
    }
    for (size_t i = 0; i < logs_.size(); ++i) {
        bool known = std::ranges::find(members_, logs_[i]->id(), &SetMember::id) != members_.end();
        if (in_set_[i] && !known)
            members_.push_back({logs_[i]->id(), next, acks_->openings[i], State::kThere});
    }
    // The oldest of those that are not there.
    while (members_.size() > kSetMembersMax) {
        auto oldest = std::ranges::min_element(members_, {}, [](const SetMember& m) {
            return std::pair(m.state == State::kThere, m.last.epoch);
        });
        members_.erase(oldest);
    }
    bool some_away = std::ranges::find(members_, State::kAway, &SetMember::state) != members_.end();
    if (!some_away) {
        filter_.reset();
    } else if (!filter_) {
        filter_.emplace(next.id);
    } else {
        filter_->dirty_all();
    }
    opening_ = next;
}

std::vector<std::byte> LogSet::block_of(size_t i) const {
    SetBlock block;
    block.set = set_;
    block.revision = revision_;
    block.opening = opening_;
    block.applied = applied_;
    block.filter_life = filter_ ? filter_->life() : 0;
    block.members = members_;
    std::vector<std::byte> bytes(kBlockBytes);
    encode_set_block(logs_[i]->id(), block, bytes.data());
    return bytes;
}

bool LogSet::write_and_wait(size_t i, uint32_t block, std::span<const std::byte> bytes) {
    return wait_for(*logs_[i],
                    [&](Done done) { return logs_[i]->write_area(block, bytes, std::move(done)); });
}

// The filter first: a block that names one vouches for all of it. False when one of them failed; it is out
// then.
bool LogSet::write_all() {
    ++revision_;
    std::vector<uint32_t> blocks;
    if (filter_) blocks = filter_->take_dirty();
    auto each = [&](auto write) {
        for (size_t i = 0; i < logs_.size(); ++i) {
            if (in_set_[i]) in_set_[i] = write(i);
        }
    };
    std::vector<bool> before = in_set_;
    each([&](size_t i) {
        bool written = std::ranges::all_of(blocks, [&](uint32_t b) {
            return write_and_wait(i, kFilterBlock + b, filter_->block(logs_[i]->id(), b));
        });
        return written && (blocks.empty() || sync_and_wait(*logs_[i]));
    });
    if (in_set_ != before) return false;
    each([&](size_t i) {
        if (!write_and_wait(i, places_[i], block_of(i)) || !sync_and_wait(*logs_[i])) return false;
        places_[i] = 1 - places_[i];
        MutexLock lock(acks_->mutex);
        acks_->openings[i] = opening_;
        return true;
    });
    if (in_set_ != before) return false;
    // Once more at the other place: a block that is damaged later must not make the opening unknown.
    each([&](size_t i) { return write_and_wait(i, places_[i], block_of(i)) && sync_and_wait(*logs_[i]); });
    return in_set_ == before;
}

// ---- while it is open

void LogSet::note(const Hash128& hash) {
    if (filter_ && filter_->add(hash) && !acks_->in_flight) begin(false);
}

void LogSet::set_applied(size_t order, uint64_t version) {
    if (version <= applied_[order]) return;
    applied_[order] = version;
    dirty_ = true;
}

void LogSet::on_tick(uint64_t now_ms) {
    bool fewer = false;
    for (size_t i = 0; i < logs_.size(); ++i) {
        if (!in_set_[i] || (!acks_->failed[i] && logs_[i]->accepts_writes())) continue;
        in_set_[i] = false;
        fewer = true;
    }
    // What it misses from now on is told to the others.
    if (fewer && there() != 0) {
        open_next();
        dirty_ = true;
        saved_ms_ = 0;
    }
    if (acks_->in_flight) return;
    bool due = dirty_ && now_ms - saved_ms_ >= kSaveMs;
    if (due) saved_ms_ = now_ms;
    if (due || !wanted_.empty()) {
        begin(true);
    } else if (filter_ && filter_->dirty()) {
        begin(false);
    }
}

void LogSet::save(std::function<void()> done) {
    if (!dirty_ && !(filter_ && filter_->dirty()) && !acks_->in_flight) return done();
    wanted_.push_back(std::move(done));
    if (!acks_->in_flight) begin(true);
}

// One at a time: two writes of one block may end in any order. Filter; sync, for what the block vouches for;
// block.
void LogSet::begin(bool with_block) {
    std::vector<std::function<void()>> wanted;
    if (with_block) {
        ++revision_;
        dirty_ = false;
        wanted.swap(wanted_);
    }
    acks_->in_flight = true;
    std::shared_ptr<void> end = at_end([acks = acks_, wanted = std::move(wanted)] {
        acks->in_flight = false;
        for (const auto& done : wanted) done();
    });
    std::vector<uint32_t> blocks;
    if (filter_) blocks = filter_->take_dirty();
    for (size_t i = 0; i < logs_.size(); ++i) {
        if (!in_set_[i]) continue;
        Log* log = logs_[i];
        auto fine = [acks = acks_, i](Outcome outcome) {
            if (outcome != Outcome::kDone) acks->failed[i] = true;
            return outcome == Outcome::kDone;
        };
        std::function<void()> write_block = [] {};
        if (with_block) {
            write_block = [acks = acks_, log, i, fine, end, bytes = block_of(i), at = places_[i],
                           opening = opening_] {
                if (acks->failed[i]) return;
                log->sync([=](Outcome synced) {
                    if (!fine(synced)) return;
                    auto written = [=](Outcome outcome) {
                        if (!fine(outcome)) return;
                        {
                            MutexLock lock(acks->mutex);
                            if (acks->openings[i] == opening) return;
                        }
                        log->sync([=](Outcome durable) {
                            if (!fine(durable)) return;
                            MutexLock lock(acks->mutex);
                            acks->openings[i] = opening;
                            (void)end;
                        });
                    };
                    if (!log->write_area(at, bytes, written)) fine(Outcome::kRefused);
                });
            };
        }
        if (with_block) places_[i] = 1 - places_[i];
        std::shared_ptr<void> filter_written = at_end([write_block, end] { write_block(); });
        for (uint32_t b : blocks) {
            auto written = [fine, filter_written](Outcome outcome) { fine(outcome); };
            if (!log->write_area(kFilterBlock + b, filter_->block(log->id(), b), written))
                fine(Outcome::kRefused);
        }
    }
}

}  // namespace moonpool::ssd
