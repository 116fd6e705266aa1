#include "ssd/set_block.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/crc32c.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint64_t kSetMagic = 0x544553445353504DULL;     // "MPSSDSET"
constexpr uint64_t kOrdersMagic = 0x44524F445353504DULL;  // "MPSSDORD"

// As they stand on the disk: little-endian, no padding that the compiler would choose.
struct MemberBytes {
    LogId id;
    uint64_t last_epoch, last_id, before_epoch, before_id;
    uint64_t state;
};
static_assert(sizeof(MemberBytes) == 56);

struct SetBytes {
    uint64_t magic;
    uint32_t crc;
    uint32_t count;
    LogId set;
    uint64_t revision, epoch, opening, applied, filter_life;
    MemberBytes members[kSetMembersMax];
};
static_assert(sizeof(SetBytes) == 72 + kSetMembersMax * 56 && sizeof(SetBytes) <= kBlockBytes);

// Behind it, where the caller has several orders. An earlier release reads SetBytes only, where `applied` is
// 0 then: it takes the directory for one that has carried out no removal.
struct OrdersBytes {
    uint64_t magic;
    uint32_t crc;
    uint32_t count;
    uint64_t revision;  // of the SetBytes that it stands behind
    uint64_t applied[kOrdersMax];
};
static_assert(sizeof(OrdersBytes) == 24 + kOrdersMax * 8 &&
              sizeof(SetBytes) + sizeof(OrdersBytes) <= kBlockBytes);

struct SectorBytes {
    uint32_t crc;
    uint32_t zero;
    uint64_t life;
};
static_assert(sizeof(SectorBytes) == 16);

// With the log's id in front, as all checksums of a log.
uint32_t checksum_behind(const LogId& log, const void* crc, const void* end) {
    const auto* from = static_cast<const std::byte*>(crc) + sizeof(uint32_t);
    auto bytes = static_cast<size_t>(static_cast<const std::byte*>(end) - from);
    return crc32c(crc32c(0, log.data(), log.size()), from, bytes);
}

// None: there is one order.
std::optional<std::vector<uint64_t>> applied_behind(const LogId& log, std::span<const std::byte> bytes,
                                                    uint64_t revision) {
    OrdersBytes o{};
    if (bytes.size() < sizeof(o)) return std::nullopt;
    std::memcpy(&o, bytes.data(), sizeof(o));
    bool sound = o.magic == kOrdersMagic && o.crc == checksum_behind(log, &o.crc, &o + 1) &&
                 o.revision == revision && o.count >= 1 && o.count <= kOrdersMax;
    if (!sound) return std::nullopt;
    return std::vector<uint64_t>(o.applied, o.applied + o.count);
}

}  // namespace

void encode_set_block(const LogId& log, const SetBlock& value, std::byte* block) {
    SetBytes s{};
    s.magic = kSetMagic;
    s.count = static_cast<uint32_t>(std::min(value.members.size(), kSetMembersMax));
    s.set = value.set;
    s.revision = value.revision;
    s.epoch = value.opening.epoch;
    s.opening = value.opening.id;
    s.applied = value.applied.size() == 1 ? value.applied.front() : 0;
    s.filter_life = value.filter_life;
    for (uint32_t i = 0; i < s.count; ++i) {
        const SetMember& m = value.members[i];
        s.members[i] = {m.id,           m.last.epoch, m.last.id,
                        m.before.epoch, m.before.id,  static_cast<uint64_t>(m.state)};
    }
    s.crc = checksum_behind(log, &s.crc, &s + 1);
    std::memset(block, 0, kBlockBytes);
    std::memcpy(block, &s, sizeof(s));
    if (value.applied.size() == 1) return;
    OrdersBytes o{};
    o.magic = kOrdersMagic;
    o.count = static_cast<uint32_t>(std::min(value.applied.size(), kOrdersMax));
    o.revision = value.revision;
    std::copy_n(value.applied.begin(), o.count, o.applied);
    o.crc = checksum_behind(log, &o.crc, &o + 1);
    std::memcpy(block + sizeof(s), &o, sizeof(o));
}

std::optional<SetBlock> decode_set_block(const LogId& log, std::span<const std::byte> block) {
    SetBytes s{};
    if (block.size() < sizeof(s)) return std::nullopt;
    std::memcpy(&s, block.data(), sizeof(s));
    bool sound = s.magic == kSetMagic && s.crc == checksum_behind(log, &s.crc, &s + 1) &&
                 s.count <= kSetMembersMax && s.epoch != 0;
    if (!sound) return std::nullopt;
    SetBlock value;
    value.set = s.set;
    value.revision = s.revision;
    value.opening = {s.epoch, s.opening};
    value.applied =
        applied_behind(log, block.subspan(sizeof(s)), s.revision).value_or(std::vector{s.applied});
    value.filter_life = s.filter_life;
    for (uint32_t i = 0; i < s.count; ++i) {
        const MemberBytes& m = s.members[i];
        if (m.state > static_cast<uint64_t>(SetMember::State::kGone)) return std::nullopt;
        value.members.push_back({m.id,
                                 {m.last_epoch, m.last_id},
                                 {m.before_epoch, m.before_id},
                                 static_cast<SetMember::State>(m.state)});
    }
    return value;
}

std::optional<std::pair<SetBlock, uint32_t>> newest_set_block(const LogId& log,
                                                              std::span<const std::byte> area) {
    std::optional<std::pair<SetBlock, uint32_t>> newest;
    for (uint32_t place = 0; place < kFilterBlock && (place + 1) * kBlockBytes <= area.size(); ++place) {
        std::optional<SetBlock> found = decode_set_block(log, area.subspan(place * kBlockBytes, kBlockBytes));
        if (found && (!newest || found->revision > newest->first.revision))
            newest.emplace(std::move(*found), place);
    }
    return newest;
}

ChangeFilter::ChangeFilter(uint64_t life)
    : life_(life), bits_(kBits / 8, 0), known_(kSectors, false), dirty_(kFilterBlocks, true) {}

bool ChangeFilter::may_contain(const Hash128& hash) const {
    for (int probe = 0; probe < kProbes; ++probe) {
        uint64_t bit = place(hash, probe);
        if ((bits_[bit / 8] >> (bit % 8) & 1) == 0) return false;
    }
    return true;
}

// Full, it says yes to everything: no more to write, and what is away is void when it returns.
bool ChangeFilter::add(const Hash128& hash) {
    bool is_new = false;
    for (int probe = 0; probe < kProbes; ++probe) {
        uint64_t bit = place(hash, probe);
        auto mask = static_cast<uint8_t>(1u << (bit % 8));
        if ((byte_of(bit) & mask) != 0) continue;
        byte_of(bit) |= mask;
        ++ones_;
        is_new = true;
        dirty_[bit / kSectorBits / (kBlockBytes / kSectorBytes)] = true;
    }
    if (is_new && is_full()) fill();
    return is_new;
}

void ChangeFilter::fill() {
    std::ranges::fill(bits_, uint8_t{0xFF});
    ones_ = kBits;
    dirty_.assign(kFilterBlocks, true);
}

void ChangeFilter::unite(const LogId& log, std::span<const std::byte> area) {
    for (uint32_t sector = 0; sector < kSectors; ++sector) {
        uint64_t at = kFilterBlock * kBlockBytes + uint64_t{sector} * kSectorBytes;
        if (at + kSectorBytes > area.size()) return;
        SectorBytes s{};
        std::memcpy(&s, area.data() + at, sizeof(s));
        uint32_t crc = checksum_behind(log, area.data() + at, area.data() + at + kSectorBytes);
        if (s.life != life_ || s.crc != crc) continue;
        known_[sector] = true;
        const auto* from = reinterpret_cast<const uint8_t*>(area.data() + at + kHeaderBytes);
        uint8_t* to = bits_.data() + uint64_t{sector} * (kSectorBits / 8);
        for (uint32_t i = 0; i < kSectorBits / 8; ++i) to[i] |= from[i];
    }
}

void ChangeFilter::end_unite() {
    ones_ = 0;
    for (uint8_t byte : bits_) ones_ += static_cast<uint64_t>(std::popcount(byte));
    if (std::ranges::find(known_, false) != known_.end() || is_full()) fill();
}

bool ChangeFilter::dirty() const { return std::ranges::find(dirty_, true) != dirty_.end(); }

std::vector<uint32_t> ChangeFilter::take_dirty() {
    std::vector<uint32_t> blocks;
    for (uint32_t i = 0; i < kFilterBlocks; ++i) {
        if (dirty_[i]) blocks.push_back(i);
    }
    dirty_.assign(kFilterBlocks, false);
    return blocks;
}

std::vector<std::byte> ChangeFilter::block(const LogId& log, uint32_t block) const {
    std::vector<std::byte> bytes(kBlockBytes);
    constexpr uint32_t kEach = kBlockBytes / kSectorBytes;
    for (uint32_t i = 0; i < kEach; ++i) {
        std::byte* at = bytes.data() + i * kSectorBytes;
        uint64_t sector = uint64_t{block} * kEach + i;
        std::memcpy(at + kHeaderBytes, bits_.data() + sector * (kSectorBits / 8), kSectorBits / 8);
        SectorBytes s{0, 0, life_};
        std::memcpy(at, &s, sizeof(s));
        s.crc = checksum_behind(log, at, at + kSectorBytes);
        std::memcpy(at, &s, sizeof(s));
    }
    return bytes;
}

}  // namespace moonpool::ssd
