#include "directory/master_protocol.hpp"

#include <utility>

#include "directory/protocol.hpp"
#include "directory/questions.hpp"
#include "wire/error_frame.hpp"

namespace moonpool {

namespace {

Error malformed(const char* what) {
    return Error{Code::kProtocol, std::string("a frame ") + what + "; the connection is closed"};
}

}  // namespace

MasterProtocol::MasterProtocol(MasterProtocolHost host, LinkId link, Caller caller, std::string tenant,
                               const Access& access)
    : host_(std::move(host)), link_(link), caller_(caller), tenant_(std::move(tenant)), access_(access) {}

void MasterProtocol::closed() {
    if (node_ != kNoNode) host_.master.disconnected(node_, link_);
}

// The service that the connection was opened for decides what it may ask. A frame of the other
// service is malformed here.
Status MasterProtocol::on_frame(uint64_t now_ms, const FrameHeader& header, Reader body,
                                std::vector<std::byte>& out) {
    promises_ = false;
    if (header.kind == Kind::kMasters && caller_ != Caller::kStandby && host_.masters) {
        takes_masters_ = true;
        write_masters_frame(out, host_.masters());
        return success();
    }
    if (caller_ == Caller::kNode) {
        switch (header.kind) {
            case Kind::kJoin:
                return on_join(header, body, now_ms, out);
            case Kind::kDelta:
                return on_delta(body, now_ms, out);
            case Kind::kBeat:
                return on_beat(header, body, now_ms, out);
            case Kind::kLeave:
                return on_leave(now_ms);
            case Kind::kRemovals:
                return on_removals(body, now_ms);
            default:
                break;
        }
    } else if (caller_ == Caller::kClient) {
        if (!access_.may_write() && changes_objects(header.kind, body)) {
            Error why = may_not_write(access_, tenant_);
            write_error(out, why.code, why.text, header.request_id);
            return success();
        }
        switch (header.kind) {
            case Kind::kMembers:
                return on_members(header, body, now_ms, out);
            case Kind::kLocate:
                return on_locate(header, body, now_ms, out);
            case Kind::kPlace:
                return on_place(header, body, out);
            case Kind::kForget:
                return on_forget(header, body, now_ms, out);
            case Kind::kOrdered:
                return on_ordered(header, body, now_ms, out);
            default:
                break;
        }
    } else {
        switch (header.kind) {
            case Kind::kMirror:
                return on_mirror(body);
            case Kind::kMirrored:
                return on_mirrored(body);
            case Kind::kLeave:
                host_.on_standby_left();
                return success();
            case Kind::kHandOver:
                return on_hand_over(body, out);
            default:
                break;
        }
    }
    return malformed("has a kind that this connection does not know");
}

Status MasterProtocol::on_join(const FrameHeader& header, Reader body, uint64_t now_ms,
                               std::vector<std::byte>& out) {
    NodeIdentity identity;
    NodeLoad load;
    if (!read_identity(body, identity) || identity.name.empty() || !read_load(body, load) ||
        !read_event_endpoints(body, identity)) {
        return malformed("is no JOIN");
    }
    std::optional<Version> applied;
    if (body.left() != 0) applied = body.number<Version>();  // else it is of an earlier version
    const bool recovered = body.left() != 0 && (body.number<uint8_t>() & kJoinRecovered) != 0;
    if (!body.ok()) return malformed("ends early");
    if (node_ != kNoNode) return malformed("joins a second time");
    Result<Master::JoinAnswer> joined = host_.master.join(now_ms, identity, load, link_, applied, recovered);
    if (!joined) {
        if (host_.on_join_refused) host_.on_join_refused(joined.error());
        return joined.error();
    }
    node_ = joined->id;
    // The node's former connection, which may hang half open for minutes. Its end finds that it is no
    // longer the node's link and says nothing.
    if (joined->close != kNoLink) host_.close_link(joined->close);
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    Writer w(out);
    w.number(node_);
    w.number(static_cast<uint8_t>(joined->resumed ? kJoinResumed : 0));
    w.number(uint8_t{0});
    // The master sets the pace and the frame size, so that they are configured in one place for the
    // cluster.
    w.number(host_.master.beat_ms(host_.beat_ms));
    w.number(host_.master.limits().hashes_per_frame);
    w.number(host_.master.membership().epoch());
    write_due(w);
    w.number(host_.master.first());
    write_pace(w);
    finish_frame(out, at);
    return success();
}

void MasterProtocol::write_due(Writer& w) const {
    const DropList& drops = host_.master.drops(node_);
    uint32_t most = host_.master.limits().drops_per_answer;
    write_drops(w, drops, most);
    write_versions(w, drops, most, host_.master.closed());
}

// Behind all else: a node of the release before reads no further, and keeps the pace of its JOIN.
void MasterProtocol::write_pace(Writer& w) const {
    w.number(host_.master.batch_ms());
    w.number(host_.master.beat_ms(host_.beat_ms));
    w.number(host_.master.beats_per_answer(host_.beat_ms));
}

// Whether this connection still speaks for its node: an incarnation ends by silence, or another connection
// has it.
bool MasterProtocol::seated() const { return node_ != kNoNode && host_.master.current(node_, link_); }

// One way: no answer. The node learns that it lost its seat by the error frame that ends the connection.
Status MasterProtocol::on_delta(Reader body, uint64_t now_ms, std::vector<std::byte>& out) {
    auto flags = body.number<uint8_t>();
    body.bytes(3);
    auto n = body.number<uint32_t>();
    Version applied = (flags & kDeltaApplied) != 0 ? body.number<Version>() : kNoVersion;
    if (!body.ok() || n > host_.master.limits().hashes_per_frame ||
        body.left() != uint64_t{n} * kDeltaRowBytes) {
        return malformed("is no DELTA");
    }
    if (!seated()) return Error{Code::kClosed, "this node is no longer in the pool; join again"};
    uint64_t drops_before = host_.master.drops(node_).end();
    if (!host_.master.delta(now_ms, node_, link_, flags, applied, body.bytes(body.left()))) {
        return malformed("has a row that makes no sense");
    }
    // A copy that was removed before its node told of it goes at once: an answer to a BEAT that was not
    // asked.
    if (host_.master.drops(node_).end() != drops_before && host_.master.knows_versions(node_)) {
        write_beat_answer(0, out);
    }
    return success();
}

Status MasterProtocol::on_beat(const FrameHeader& header, Reader body, uint64_t now_ms,
                               std::vector<std::byte>& out) {
    auto drops_done = body.number<uint64_t>();
    NodeLoad load;
    if (!read_load(body, load)) return malformed("is no BEAT");
    std::optional<Version> applied;
    if (body.left() != 0) applied = body.number<Version>();  // else it is of an earlier version
    if (!body.ok()) return malformed("ends early");
    if (!seated()) return Error{Code::kClosed, "this node is no longer in the pool; join again"};
    host_.master.beat(now_ms, node_, link_, load, drops_done, applied);
    if ((header.flags & kFlagOneWay) == 0) {
        write_beat_answer(header.request_id, out);
    } else if (!host_.master.drops(node_).empty()) {
        write_beat_answer(0, out);
    }
    return success();
}

// request_id: 0 where it was not asked for; then without the pace.
void MasterProtocol::write_beat_answer(uint64_t request_id, std::vector<std::byte>& out) const {
    size_t at = begin_frame(out, Kind::kBeat, kFlagAnswer, request_id);
    Writer w(out);
    w.number(host_.master.membership().epoch());
    write_due(w);
    if (request_id != 0) write_pace(w);
    finish_frame(out, at);
}

// u64 complete since, u32 n, n hashes with a version each
Status MasterProtocol::on_removals(Reader body, uint64_t now_ms) {
    auto complete_since = body.number<Version>();
    auto n = body.number<uint32_t>();
    if (!body.ok() || n > host_.master.limits().hashes_per_frame ||
        body.left() != uint64_t{n} * kRemovalBytes) {
        return malformed("is no REMOVALS");
    }
    if (!seated()) return Error{Code::kClosed, "this node is no longer in the pool; join again"};
    std::vector<Drop> rows(n);
    for (Drop& row : rows) {
        row.hash = read_hash(body);
        row.version = body.number<Version>();
    }
    host_.master.removals(now_ms, node_, link_, complete_since, rows);
    return success();
}

// An answer of its own: the connection, over which keys are looked up, stays.
bool MasterProtocol::refuse(const std::function<std::optional<Error>()>& why, const FrameHeader& header,
                            std::vector<std::byte>& out) {
    std::optional<Error> refusal = why ? why() : std::nullopt;
    if (refusal) write_error(out, refusal->code, refusal->text, header.request_id);
    return refusal.has_value();
}

// Keys of other ranges: nothing that this master says of them would hold.
bool MasterProtocol::refuse_outside(std::string_view hashes, const FrameHeader& header,
                                    std::vector<std::byte>& out) const {
    const Range& range = host_.master.range();
    if (range.is_all()) return false;
    for (size_t at = 0; at < hashes.size(); at += sizeof(Hash128)) {
        if (range.contains(hash_at(hashes.data() + at))) continue;
        write_error(out, Code::kInvalidArgument,
                    "a key is of another range of the shards than this master's, " + range.text(),
                    header.request_id);
        return true;
    }
    return false;
}

// text16 name, text16 address; a standby of the release before ends it before the address
Status MasterProtocol::on_mirror(Reader body) {
    std::string name, address;
    if (!read_text(body, name)) return malformed("is no MIRROR");
    if (body.left() != 0 && !read_text(body, address)) return malformed("ends early");
    std::optional<Error> refusal = host_.on_standby(name, address);
    return refusal ? Status(*refusal) : success();
}

// u64 number of a MIRROR frame
Status MasterProtocol::on_mirrored(Reader body) {
    auto number = body.number<uint64_t>();
    if (!body.done() || !host_.master.mirror().heard(number)) return malformed("is no MIRRORED");
    host_.on_heard();
    return success();
}

// text16 address, u32 nodes -> nothing, or why not, as an ERROR has it
Status MasterProtocol::on_hand_over(Reader body, std::vector<std::byte>& out) {
    std::string address;
    if (!read_text(body, address)) return malformed("is no HAND_OVER");
    auto told = body.number<uint32_t>();
    if (!body.done()) return malformed("is no HAND_OVER");
    std::optional<Error> why = host_.on_hand_over(address, told);
    if (why) write_hand_over_refusal(out, *why);
    return success();
}

// The seat is cleared at once. The node closes the connection afterwards, and its end finds no member.
Status MasterProtocol::on_leave(uint64_t now_ms) {
    if (!seated()) return Error{Code::kClosed, "this node is no longer in the pool"};
    if (host_.on_leave) host_.on_leave(node_);
    host_.master.left(now_ms, node_, link_);
    return success();
}

// u64 known epoch, u8 flags, which a client of the release before does not send
Status MasterProtocol::on_members(const FrameHeader& header, Reader body, uint64_t now_ms,
                                  std::vector<std::byte>& out) {
    auto known = body.number<uint64_t>();
    uint8_t takes = body.left() != 0 ? body.number<uint8_t>() : uint8_t{0};
    if (!body.ok()) return malformed("is no MEMBERS");
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    Writer w(out);
    w.number(host_.master.membership().epoch());
    const MemberAnswers::Answer& answer =
        host_.master.members_since(now_ms, known, (takes & kMembersTake) != 0);
    // Told with every answer, also when the list has not changed: the end of the filling moves no epoch.
    bool filling = host_.master.filling(now_ms);
    w.number(static_cast<uint8_t>(answer.flags | (filling ? kMembersFilling : 0)));
    w.bytes(answer.rows.data(), answer.rows.size());
    w.number(host_.master.newest());
    finish_frame(out, at);
    return success();
}

// u8 flags, u8 holders at most, u16 width, u32 n, n hashes -> u64 epoch, u32 n, per key u8 count and holders,
// u64 newest version; with kLocateOrder u64 version of the first key, u8 whether the master is filling up;
// with kLocateUnique per key u8 Taken
Status MasterProtocol::on_locate(const FrameHeader& header, Reader body, uint64_t now_ms,
                                 std::vector<std::byte>& out) {
    LocateHead head = LocateHead::read(body);
    if (!body.ok() || body.left() != uint64_t{head.n} * sizeof(Hash128)) return malformed("is no LOCATE");
    // A frame is served in one piece on the loop; the limit bounds how long all others wait for it.
    if (head.n > host_.master.limits().hashes_per_frame)
        return malformed("asks for more keys than the limit");
    std::string_view hashes = body.bytes(body.left());
    if (refuse_outside(hashes, header, out)) return success();
    if ((head.flags & kLocateOrder) != 0 && refuse(host_.why_no_orders, header, out)) return success();
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    Writer w(out);
    w.number(host_.master.membership().epoch());
    if ((head.flags & kLocateOrder) != 0) {
        promises_ = true;
        auto placing = static_cast<NodeId>(head.width - 1);  // 0: it is a removal
        std::vector<Taken> taken;
        bool unique = (head.flags & kLocateUnique) != 0;
        Version first = host_.master.order(now_ms, hashes, placing, w, unique ? &taken : nullptr);
        w.number(host_.master.newest());
        w.number(first);
        w.number(static_cast<uint8_t>(host_.master.filling(now_ms)));
        for (Taken row : taken) w.number(static_cast<uint8_t>(row));
    } else {
        host_.master.locate(hashes, head.flags, head.holders_max, head.width, w);
        w.number(host_.master.newest());
    }
    finish_frame(out, at);
    return success();
}

// u64 bytes, u16 n, u8 flags, u8 zero, u16 nodes to avoid, u16 hosts to avoid, nodes, hosts -> u16 n, nodes
Status MasterProtocol::on_place(const FrameHeader& header, Reader body, std::vector<std::byte>& out) {
    auto bytes = body.number<uint64_t>();
    auto n = body.number<uint16_t>();
    auto flags = body.number<uint8_t>();
    body.number<uint8_t>();
    auto nodes = body.number<uint16_t>();
    auto hosts = body.number<uint16_t>();
    // A host has two bytes of length at least. The check comes before the vectors are made, so that counts
    // alone cannot allocate.
    if (!body.ok() || uint64_t{nodes} * 2 + uint64_t{hosts} * 2 > body.left())
        return malformed("is no PLACE");
    std::vector<NodeId> avoid_nodes(nodes);
    for (NodeId& node : avoid_nodes) node = body.number<NodeId>();
    std::vector<std::string_view> avoid_hosts(hosts);
    for (std::string_view& host : avoid_hosts) host = body.text16();
    if (!body.ok()) return malformed("is no PLACE");
    std::vector<NodeId> chosen =
        host_.master.place(tenant_, bytes, n, avoid_nodes, avoid_hosts, (flags & kPlaceEvict) != 0);
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    Writer w(out);
    w.number(static_cast<uint16_t>(chosen.size()));
    for (NodeId id : chosen) w.number(id);
    w.number(host_.master.newest());
    finish_frame(out, at);
    return success();
}

// An Ordered -> u32 n, of each key the last version that was given
Status MasterProtocol::on_ordered(const FrameHeader& header, Reader body, uint64_t now_ms,
                                  std::vector<std::byte>& out) {
    std::optional<Ordered> done = Ordered::read(body);
    if (!done) return malformed("is no ORDERED");
    if (done->keys() > host_.master.limits().hashes_per_frame)
        return malformed("orders more keys than the limit");
    if (refuse_outside(done->hashes, header, out)) return success();
    if (refuse(host_.why_no_ends, header, out)) return success();
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    Writer w(out);
    host_.master.ordered(now_ms, *done, w);
    finish_frame(out, at);
    return success();
}

// u32 n, u16 unreached nodes, u16 zero, nodes, n hashes -> u32 rows
Status MasterProtocol::on_forget(const FrameHeader& header, Reader body, uint64_t now_ms,
                                 std::vector<std::byte>& out) {
    auto n = body.number<uint32_t>();
    auto nodes = body.number<uint16_t>();
    body.number<uint16_t>();
    if (!body.ok() || body.left() != uint64_t{nodes} * 2 + uint64_t{n} * sizeof(Hash128)) {
        return malformed("is no FORGET");
    }
    if (n > host_.master.limits().hashes_per_frame) return malformed("forgets more keys than the limit");
    std::vector<NodeId> unreached(nodes);
    for (NodeId& node : unreached) node = body.number<NodeId>();
    std::string_view hashes = body.bytes(body.left());
    if (refuse_outside(hashes, header, out)) return success();
    if (refuse(host_.why_no_orders, header, out)) return success();
    promises_ = true;
    uint32_t rows = host_.master.forget(now_ms, hashes, unreached);
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    Writer(out).number(rows);
    finish_frame(out, at);
    return success();
}

}  // namespace moonpool
