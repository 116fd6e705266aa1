#include "device/piece_plan.hpp"

#include <algorithm>
#include <cstring>

namespace moonpool::device {

namespace {

constexpr uint64_t kRunAlign = 16;  // of a run in the staging memory: the kernel's widest word
// A run of fewer pieces on average is not worth the way through staging memory.
constexpr size_t kPiecesOfRunMin = 4;

uint64_t aligned(uint64_t bytes) { return (bytes + kRunAlign - 1) / kRunAlign * kRunAlign; }

// The runs of one direction, and where their pieces lie in the staging memory.
struct Runs {
    std::vector<Copy>& copies;
    uint64_t Copy::*link;
    uint64_t Copy::*staged;
    uint64_t at;  // of the next piece

    uint64_t place(const Copy& piece) {
        if (copies.empty() || copies.back().*link + copies.back().bytes != piece.*link) {
            at = aligned(at);
            copies.emplace_back();
            copies.back().*link = piece.*link;
            copies.back().*staged = at;
        }
        copies.back().bytes += piece.bytes;
        const uint64_t place = at;
        at += piece.bytes;
        return place;
    }
};

template <class T>
std::byte* append(std::byte* to, const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(to, values.data(), values.size() * sizeof(T));
    return to + values.size() * sizeof(T);
}

}  // namespace

void PieceList::add(const Copy& piece) {
    for (uint64_t at = 0; at < piece.bytes; at += kRowBytesMax) {
        const uint64_t from = piece.from + at;
        auto [low, high] = std::minmax_element(from_.begin(), from_.begin() + open_);
        // An object's place has 64 bits, and its rows are named by 32 bits from there on.
        if (open_ == kRowsOfObject ||
            (open_ != 0 && std::max(from, *high) - std::min(from, *low) > UINT32_MAX)) {
            close_object();
        }
        from_[open_++] = from;
        auto bytes = static_cast<uint32_t>(std::min(piece.bytes - at, kRowBytesMax));
        rows_.push_back({.address = piece.to + at, .stride = 0, .bytes = bytes, .offset = 0});
    }
}

void PieceList::close_object() {
    if (open_ == 0) return;
    const uint64_t low = *std::min_element(from_.begin(), from_.begin() + open_);
    for (size_t k = 0; k < open_; ++k) {
        rows_[rows_.size() - open_ + k].offset = static_cast<uint32_t>(from_[k] - low);
    }
    objects_.push_back({.staged = low, .block = 0, .column = static_cast<uint32_t>(objects_.size())});
    begins_.push_back(static_cast<uint32_t>(rows_.size()));
    open_ = 0;
}

uint64_t PieceList::bytes() const {
    return rows_.size() * sizeof(KvRow) + objects_.size() * sizeof(KvObject) +
           begins_.size() * sizeof(uint32_t);
}

void PieceList::write(std::byte* to) const { append(append(append(to, rows_), objects_), begins_); }

ObjectsJob PieceList::job(uint64_t list) const {
    const uint64_t objects = list + rows_.size() * sizeof(KvRow);
    return {.rows = list,
            .begins = objects + objects_.size() * sizeof(KvObject),
            .objects = objects,
            .count = static_cast<uint32_t>(objects_.size()),
            .split = 1,
            .staging = 0,
            .move = Move::kToKv};
}

PieceWays::PieceWays(std::span<const Copy> copies, const OnCard& on_card, uint64_t staging_bytes_max) {
    if (copies.size() < kSmallPiecesMin) return;
    ways_.reserve(copies.size());
    for (const Copy& copy : copies) {
        const Way way = way_of(copy, on_card);
        ways_.push_back(way);
        if (way == Way::kCopy) continue;
        Group& group = way == Way::kWithin ? within_ : way == Way::kScatter ? scatter_ : gather_;
        group.pieces += 1;
        group.rows += PieceList::rows_of(copy.bytes);
        if (way == Way::kWithin) continue;
        const uint64_t link = way == Way::kScatter ? copy.from : copy.to;
        if (group.runs == 0 || link != group.end) {
            group.runs += 1;
            group.bytes = aligned(group.bytes);
        }
        group.bytes += copy.bytes;
        group.end = link + copy.bytes;
    }
    scatter_.bytes = aligned(scatter_.bytes);
    for (Group* group : {&scatter_, &gather_}) {
        if (group->pieces < kSmallPiecesMin || group->pieces < kPiecesOfRunMin * group->runs) {
            drop(group == &scatter_ ? Way::kScatter : Way::kGather, *group);
        }
    }
    if (within_.pieces < kSmallPiecesMin) drop(Way::kWithin, within_);
    if (staged_bytes() > staging_bytes_max) drop_staged();
    if (within_.rows + scatter_.rows + gather_.rows > PieceList::kRowsMax) drop(Way::kWithin, within_);
    if (scatter_.rows + gather_.rows > PieceList::kRowsMax) drop_staged();
}

PieceWays::Way PieceWays::way_of(const Copy& copy, const OnCard& on_card) const {
    if (copy.bytes == 0 || copy.bytes >= kSmallWithinCard) return Way::kCopy;
    const bool to = on_card(copy.to, copy.bytes), from = on_card(copy.from, copy.bytes);
    if (to && from) return Way::kWithin;
    if (to == from || copy.bytes >= kSmallOverLink) return Way::kCopy;
    return to ? Way::kScatter : Way::kGather;
}

void PieceWays::drop(Way way, Group& group) {
    std::ranges::replace(ways_, way, Way::kCopy);
    group = {};
}

void PieceWays::drop_staged() {
    drop(Way::kScatter, scatter_);
    drop(Way::kGather, gather_);
}

PiecePlan::PiecePlan(std::span<const Copy> copies, const PieceWays& ways, uint64_t staging) {
    std::vector<Copy> scattered;
    Runs scatter{scattered, &Copy::from, &Copy::to, staging};
    Runs gather{out, &Copy::to, &Copy::from, staging + ways.gather_begin()};
    for (size_t i = 0; i < copies.size(); ++i) {
        const Copy& copy = copies[i];
        switch (ways[i]) {
            case PieceWays::Way::kCopy:
                in.push_back(copy);
                break;
            case PieceWays::Way::kWithin:
                list.add(copy);
                break;
            case PieceWays::Way::kScatter:
                list.add({.to = copy.to, .from = scatter.place(copy), .bytes = copy.bytes});
                break;
            case PieceWays::Way::kGather:
                list.add({.to = gather.place(copy), .from = copy.from, .bytes = copy.bytes});
                break;
        }
    }
    list.close();
    in.insert(in.end(), scattered.begin(), scattered.end());
}

}  // namespace moonpool::device
