#include "ssd/log_state.hpp"

namespace moonpool::ssd {

LogState::LogState(LogOptions log_options, const Superblock& block)
    : options(std::move(log_options)),
      superblock(block),
      slots(static_cast<uint32_t>((options.bytes - kSegmentsBegin) / superblock.segment_bytes)),
      index(slots),
      readers(slots, 0) {}

uint32_t LogState::open_space(std::string_view identity) {
    auto it = space_ids.find(identity);
    if (it == space_ids.end()) {
        // A few for each new one: what is not needed is never more than a fraction of what is.
        constexpr int kLooks = 8;
        for (int i = 0; i < kLooks && !spaces.empty(); ++i, ++space_cursor) {
            space_cursor %= static_cast<uint32_t>(spaces.size());
            Space& space = spaces[space_cursor];
            bool used = space.open || space.writes != 0 || index.count_in(space_cursor) != 0;
            if (space.identity == nullptr || used) continue;
            space_ids.erase(*space.identity);
            space = Space{};
            free_spaces.push_back(space_cursor);
        }
        auto id = static_cast<uint32_t>(spaces.size());
        if (free_spaces.empty()) {
            spaces.emplace_back();
        } else {
            id = free_spaces.back();
            free_spaces.pop_back();
        }
        spaces[id].identity = std::make_shared<const std::string>(identity);
        it = space_ids.emplace(*spaces[id].identity, id).first;
        index.set_owner(id, owner_of(identity));
    }
    spaces[it->second].open = true;
    return it->second;
}

uint32_t LogState::owner_of(std::string_view identity) {
    std::string_view owner = identity.substr(0, identity.find('\0'));
    auto known = owners.find(owner);
    if (known == owners.end()) known = owners.emplace(owner, static_cast<uint32_t>(owners.size() + 1)).first;
    return known->second;
}

void LogState::drop(const Hash128& hash, uint64_t sequence) {
    uint32_t at = index.find(hash);
    if (at == kNoEntry || index.entry(at).sequence != sequence) return;
    index.erase(at);
    push_removal(sequence);
}

// It is removed once more when it has arrived, so that a removal stands behind it; but only this one comes
// before a sync that is asked for next.
bool LogState::forget_writing(const Hash128& hash) {
    auto it = writing.find(hash.low);
    if (it == writing.end()) return false;
    push_removal(it->second.sequence);
    writing.erase(it);
    return true;
}

void LogState::push_removal(uint64_t sequence) {
    if (read_only) return;
    removals.push_back(sequence);
    ++removals_pushed;
}

bool LogState::end_writing(const WriteJob& job) {
    auto it = writing.find(job.hash.low);
    if (it == writing.end() || it->second.sequence != job.sequence) return false;
    writing.erase(it);
    return true;
}

void LogState::stop_writing(const std::string& why) {
    MutexLock lock(mutex);
    if (read_only) return;
    read_only = true;
    removals.clear();
    trouble = why + "; what it holds is still read, nothing more is written";
}

}  // namespace moonpool::ssd
