// MasterProtocol: the master's side of one connection without its socket: frames in, answers out. MasterLink
// drives it over a socket, and the simulator of tests/sim over a simulated network.
//
// It knows whether a node or a client is at the other end, and lets each ask only what is its own. All bytes
// of a peer are untrusted: each handler compares counts with the bytes that are there before it reads rows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "directory/master.hpp"
#include "wire/frame.hpp"

namespace moonpool {

// What a connection's frames change, and whom else they concern.
struct MasterProtocolHost {
    Master& master;
    uint32_t beat_ms;                        // between two beats of a node, at least
    std::function<void(LinkId)> close_link;  // a node's former connection
    std::function<void(NodeId)> on_leave;    // before its seat is cleared
    std::function<void(const Error&)> on_join_refused;
};

class MasterProtocol {
   public:
    MasterProtocol(MasterProtocolHost host, LinkId link, bool is_member, std::string tenant);

    // Appends the answer to `out`, if the frame has one. An error ends the connection, after a frame that
    // tells it; half an answer may stand in `out` then.
    Status on_frame(uint64_t now_ms, const FrameHeader& header, Reader body, std::vector<std::byte>& out);
    // The connection is over. Whatever ended it, its member is suspect from now on, unless it has said that
    // it leaves, or has another connection.
    void closed();

    NodeId node() const { return node_; }  // after JOIN; else kNoNode

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
    void write_due(Writer& w) const;
    void write_pace(Writer& w) const;
    void write_beat_answer(uint64_t request_id, std::vector<std::byte>& out) const;
    bool seated() const;

    MasterProtocolHost host_;
    LinkId link_;
    bool is_member_;
    std::string tenant_;
    NodeId node_ = kNoNode;
};

}  // namespace moonpool
