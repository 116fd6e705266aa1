#include "directory/mirror.hpp"

#include <cstring>

namespace moonpool {

void MirrorHead::write(Writer& w) const {
    w.number(number);
    w.number(flags);
    w.number(first);
    w.number(newest);
    w.number(closed);
    w.number(complete_since);
}

MirrorHead MirrorHead::read(Reader& r) {
    MirrorHead head;
    head.number = r.number<uint64_t>();
    head.flags = r.number<uint8_t>();
    head.first = r.number<Version>();
    head.newest = r.number<Version>();
    head.closed = r.number<Version>();
    head.complete_since = r.number<Version>();
    return head;
}

void MirrorEnded::write(Writer& w) const {
    w.number(done.first);
    w.number(static_cast<uint32_t>(done.keys()));
    w.number(static_cast<uint16_t>(nodes.size()));
    for (const Incarnation& node : nodes) w.bytes(node.data(), node.size());
    w.bytes(done.hashes.data(), done.hashes.size());
    w.bytes(done.told.data(), done.told.size());
    w.bytes(done.placed.data(), done.placed.size());
}

std::optional<MirrorEnded> MirrorEnded::read(Reader& r) {
    MirrorEnded ended;
    ended.done.first = r.number<Version>();
    uint64_t n = r.number<uint32_t>();
    auto nodes = r.number<uint16_t>();
    if (!r.ok() || nodes * sizeof(Incarnation) > r.left()) return std::nullopt;
    ended.nodes.resize(nodes);
    ended.done.nodes.resize(nodes, kNoNode);
    for (Incarnation& node : ended.nodes) std::memcpy(node.data(), r.bytes(node.size()).data(), node.size());
    uint64_t bits = n * ended.done.row_bytes();
    if (!r.ok() || r.left() < n * sizeof(Hash128) + 2 * bits) return std::nullopt;
    ended.done.hashes = r.bytes(n * sizeof(Hash128));
    ended.done.told = r.bytes(bits);
    ended.done.placed = r.bytes(bits);
    return ended;
}

void Mirror::removal(const Hash128& hash, const Removal& removal) {
    if (!attached_) return;
    Writer w = record(MirrorRecord::kRemoval);
    write_hash(w, hash);
    w.number(removal.version);
    w.number(removal.place);
    w.number(static_cast<uint8_t>(removal.of_absent));
}

void Mirror::placed(const Hash128& hash, const Incarnation& node, Version version, bool here) {
    if (!attached_) return;
    Writer w = record(MirrorRecord::kPlaced);
    write_hash(w, hash);
    w.bytes(node.data(), node.size());
    w.number(version);
    w.number(static_cast<uint8_t>(here));
}

void Mirror::open(Version first, Version last) {
    if (!attached_) return;
    Writer w = record(MirrorRecord::kOpen);
    w.number(first);
    w.number(last);
}

void Mirror::ended(const MirrorEnded& ended) {
    if (!attached_) return;
    Writer w = record(MirrorRecord::kEnded);
    ended.write(w);
}

void Mirror::cut(uint64_t now_ms, MirrorHead head, std::vector<std::byte>& out) {
    head.number = ++last_;
    size_t at = begin_frame(out, Kind::kMirror, kFlagOneWay, 0);
    Writer w(out);
    head.write(w);
    w.bytes(records_.data(), records_.size());
    finish_frame(out, at);
    records_.clear();
    if (records_.capacity() > (1u << 16)) decltype(records_)().swap(records_);
    unheard_.push_back({head.number, now_ms, head.closed, (head.flags & kMirrorWhole) != 0});
    cut_at_ms_ = now_ms;
}

bool Mirror::heard(uint64_t number) {
    if (number > last_ || number <= heard_) return false;
    heard_ = number;
    while (!unheard_.empty() && unheard_.front().number <= number) {
        closed_heard_ = unheard_.front().closed;
        whole_ |= unheard_.front().whole;
        unheard_.pop_front();
    }
    return true;
}

}  // namespace moonpool
