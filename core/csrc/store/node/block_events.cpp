#include "store/node/block_events.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace moonpool {

namespace {

constexpr size_t kDigestBytes = 32, kFingerprintBytes = 32;
constexpr uint32_t kPiece = 4096;
constexpr uint32_t kDisk = 1u << 31;  // in a cursor; rows stay below it, as objects do

}  // namespace

BlockEvents::BlockEvents() : wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void BlockEvents::stored(std::string_view identity, const Hash128& hash, std::string_view name) {
    if (name.size() != kDigestBytes + kRangesBytes) return;
    MutexLock lock(mutex_);
    auto at = objects_.find(hash);
    if (at == objects_.end()) {
        uint32_t space = space_of(identity);
        if (space == kNoRow || objects_.size() == kObjectsMax) {
            ++counters_.ignored_total;
            return;
        }
        Space& of = spaces_[space];
        RangesName ranges;
        std::memcpy(ranges.data(), name.data() + kDigestBytes, ranges.size());
        bool wider = of.ranges.size() < kRangesMax && of.ranges.insert(ranges).second;
        Digest digest;
        std::memcpy(digest.data(), name.data(), digest.size());
        at = objects_.emplace(hash, Object{obtain(space, digest), {}}).first;
        for (uint32_t row = 0; wider && row < blocks_.end(); ++row) {
            if (blocks_[row].space != space) continue;
            tell(blocks_[row], 0);
            tell(blocks_[row], 1);
        }
    }
    count(at->second, 0, true);
}

void BlockEvents::change(const Hash128& hash, Tier tier, bool added) {
    MutexLock lock(mutex_);
    auto at = objects_.find(hash);
    if (at == objects_.end()) return;  // no block's, or from before this incarnation
    count(at->second, tier == Tier::kSsd ? 1 : 0, added);
    if (at->second.in[0] || at->second.in[1]) return;
    uint32_t row = at->second.block;
    objects_.erase(at);
    if (!blocks_[row].empty()) return;
    block_ids_.erase(BlockId{blocks_[row].digest, blocks_[row].space});
    blocks_.give(row);
}

void BlockEvents::count(Object& object, size_t tier, bool added) {
    if (object.in[tier] == added) return;
    object.in[tier] = added;
    Block& block = blocks_[object.block];
    block.objects[tier] = static_cast<uint16_t>(block.objects[tier] + (added ? 1 : -1));
    tell(block, tier);
}

// When it differs from what was told.
void BlockEvents::tell(Block& block, size_t tier) {
    bool whole = block.objects[tier] > 0 && block.objects[tier] >= spaces_[block.space].ranges.size();
    if (whole == block.told[tier]) return;
    block.told[tier] = whole;
    push({block.digest, block.space, static_cast<uint8_t>(tier), static_cast<uint8_t>(whole), 0});
}

uint32_t BlockEvents::space_of(std::string_view identity) {
    auto at = space_ids_.find(identity);
    if (at != space_ids_.end()) return at->second;
    size_t tenant = identity.find('\0');
    size_t name_space = tenant == std::string_view::npos ? tenant : identity.find('\0', tenant + 1);
    if (name_space == std::string_view::npos) return kNoRow;
    std::string_view fingerprint = identity.substr(name_space + 1);
    if (fingerprint.size() != kFingerprintBytes) return kNoRow;  // not of KV blocks
    auto number = static_cast<uint32_t>(spaces_.size());
    spaces_.push_back({std::string(fingerprint), {}});
    space_ids_.emplace(identity, number);
    return number;
}

uint32_t BlockEvents::obtain(uint32_t space, const Digest& digest) {
    auto [at, made] = block_ids_.emplace(BlockId{digest, space}, kNoRow);
    if (made) {
        at->second = blocks_.take();
        blocks_[at->second].digest = digest;
        blocks_[at->second].space = space;
    }
    return at->second;
}

void BlockEvents::push(const Row& row) {
    if (all_due_) return;
    if (rows_.size() == kRowsMax) {
        rows_.clear();
        all_due_ = true;
        ++counters_.overflows_total;
        return;
    }
    rows_.push_back(row);
    if (rows_.size() > 1) return;
    uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
}

bool BlockEvents::take(std::vector<Row>& out) {
    out.clear();
    MutexLock lock(mutex_);
    uint64_t count = 0;
    (void)!::read(wake_.get(), &count, sizeof(count));
    std::swap(rows_, out);
    bool complete = !all_due_;
    all_due_ = false;  // what follows is kept again, and the inventory is taken after this
    return complete;
}

void BlockEvents::inventory(uint32_t& cursor, std::vector<Row>& out) const {
    out.clear();
    MutexLock lock(mutex_);
    for (uint32_t left = kPiece; left > 0; --left) {
        const uint8_t tier = cursor < kDisk ? 0 : 1;
        const uint32_t row = cursor & ~kDisk;
        if (row >= blocks_.end()) {
            cursor = tier == 0 ? kDisk : 0;
            if (cursor == 0) return;
            continue;
        }
        const Block& block = blocks_[row];
        if (block.space != kNoRow && block.told[tier]) out.push_back({block.digest, block.space, tier, 1, 0});
        ++cursor;
    }
}

std::vector<std::string> BlockEvents::fingerprints() const {
    MutexLock lock(mutex_);
    std::vector<std::string> out;
    for (const Space& space : spaces_) out.push_back(space.fingerprint);
    return out;
}

BlockEvents::Counters BlockEvents::counters() const {
    MutexLock lock(mutex_);
    Counters out = counters_;
    out.blocks = blocks_.used();
    out.objects = objects_.size();
    return out;
}

bool BlockEvents::check_integrity() const {
    MutexLock lock(mutex_);
    std::vector<std::array<uint16_t, 2>> objects(blocks_.end());
    for (const auto& [hash, object] : objects_) {
        if (!object.in[0] && !object.in[1]) return false;
        for (size_t tier = 0; tier < 2; ++tier) {
            if (object.in[tier]) ++objects[object.block][tier];
        }
    }
    uint32_t used = 0;
    for (uint32_t row = 0; row < blocks_.end(); ++row) {
        const Block& block = blocks_[row];
        if (block.space == kNoRow) continue;
        ++used;
        if (block.objects != objects[row] || block.empty()) return false;
        auto at = block_ids_.find(BlockId{block.digest, block.space});
        if (at == block_ids_.end() || at->second != row) return false;
    }
    return used == blocks_.used() && used == block_ids_.size();
}

}  // namespace moonpool
