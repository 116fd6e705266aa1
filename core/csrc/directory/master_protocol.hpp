// MasterProtocol: the master's side of one connection without its socket: frames in, answers out. MasterLink
// drives it over a socket, and the simulator of tests/sim over a simulated network.
//
// It knows whether a node, a client or a standby is at the other end, and lets each ask only what is its own.
// All bytes of a peer are untrusted: each handler compares counts with the bytes that are there before it
// reads rows.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "directory/master.hpp"
#include "directory/master_list.hpp"
#include "wire/access.hpp"
#include "wire/frame.hpp"

namespace moonpool {

// What a connection's frames change, and whom else they concern.
struct MasterProtocolHost {
    Master& master;
    uint32_t beat_ms;                        // between two beats of a node, at least
    std::function<void(LinkId)> close_link;  // a node's former connection
    std::function<void(NodeId)> on_leave;    // before its seat is cleared
    std::function<void(const Error&)> on_join_refused;
    // Why this master begins no removals now, or ends none, if so.
    std::function<std::optional<Error>()> why_no_orders, why_no_ends;
    // A standby asks for all, under that name; why not, if it may not.
    // address: host:port by which it is reached, empty where it does not say.
    std::function<std::optional<Error>(const std::string& name, const std::string& address)> on_standby;
    std::function<void()> on_heard;         // the standby has heard more
    std::function<void()> on_standby_left;  // it ends, and does not take over
    // It asks to be the owner, at that address; so many nodes have told it all. Why it is not, if so.
    std::function<std::optional<Error>(const std::string& address, uint32_t told)> on_hand_over;
    // Where the masters are, for a caller that asks to be told from now on; null: this one does not tell.
    std::function<MasterList()> masters = nullptr;
};

enum class Caller : uint8_t { kNode, kClient, kStandby };

class MasterProtocol {
   public:
    MasterProtocol(MasterProtocolHost host, LinkId link, Caller caller, std::string tenant,
                   const Access& access = {});
    const std::string& tenant() const { return tenant_; }
    const Access& access() const { return access_; }

    // Appends the answer to `out`, if the frame has one. An error ends the connection, after a frame that
    // tells it; half an answer may stand in `out` then.
    Status on_frame(uint64_t now_ms, const FrameHeader& header, Reader body, std::vector<std::byte>& out);
    // The connection is over. Whatever ended it, its member is suspect from now on, unless it has said that
    // it leaves, or has another connection.
    void closed();

    NodeId node() const { return node_; }  // after JOIN; else kNoNode
    // Whether the last frame's answer waits until the standby has heard of what it changed: a place in the
    // order. So a removal that any node was told of is known to the standby, also where its client or this
    // master ends before the end of it.
    bool promises() const { return promises_; }
    bool takes_masters() const { return takes_masters_; }  // MASTERS frames, whenever the list changes

   private:
    Status on_join(const FrameHeader& header, Reader body, uint64_t now_ms, std::vector<std::byte>& out);
    Status on_delta(Reader body, uint64_t now_ms, std::vector<std::byte>& out);
    Status on_beat(const FrameHeader& header, Reader body, uint64_t now_ms, std::vector<std::byte>& out);
    Status on_leave(uint64_t now_ms);
    Status on_members(const FrameHeader& header, Reader body, uint64_t now_ms, std::vector<std::byte>& out);
    Status on_locate(const FrameHeader& header, Reader body, uint64_t now_ms, std::vector<std::byte>& out);
    Status on_place(const FrameHeader& header, Reader body, std::vector<std::byte>& out);
    Status on_forget(const FrameHeader& header, Reader body, uint64_t now_ms, std::vector<std::byte>& out);
    Status on_ordered(const FrameHeader& header, Reader body, uint64_t now_ms, std::vector<std::byte>& out);
    Status on_removals(Reader body, uint64_t now_ms);
    Status on_mirror(Reader body);
    Status on_mirrored(Reader body);
    Status on_hand_over(Reader body, std::vector<std::byte>& out);
    bool refuse_outside(std::string_view hashes, const FrameHeader& header,
                        std::vector<std::byte>& out) const;
    static bool refuse(const std::function<std::optional<Error>()>& why, const FrameHeader& header,
                       std::vector<std::byte>& out);
    void write_due(Writer& w) const;
    void write_pace(Writer& w) const;
    void write_beat_answer(uint64_t request_id, std::vector<std::byte>& out) const;
    bool seated() const;

    MasterProtocolHost host_;
    LinkId link_;
    Caller caller_;
    std::string tenant_;
    Access access_;
    NodeId node_ = kNoNode;
    bool promises_ = false, takes_masters_ = false;
};

}  // namespace moonpool
