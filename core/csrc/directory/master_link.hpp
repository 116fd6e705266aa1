// MasterLink: the master's side of one connection: the socket around MasterProtocol.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "directory/master_list.hpp"
#include "directory/master_protocol.hpp"
#include "directory/master_server.hpp"
#include "wire/control_socket.hpp"
#include "wire/error_frame.hpp"
#include "wire/frame_pace.hpp"
#include "wire/frame_reader.hpp"

namespace moonpool {

class MasterLink final : public EventHandler {
   public:
    MasterLink(MasterServer& server, AuthenticatedConnection caller, LinkId id, Caller kind, uint64_t now_ms);
    ~MasterLink() override;
    MasterLink(const MasterLink&) = delete;

    static constexpr uint32_t kFirstEvents = EPOLLIN;
    bool begin();  // false: the connection is over
    bool on_events(uint32_t events) override;
    bool on_tick(uint64_t now_ms) override;

    LinkId id() const { return id_; }
    Caller kind() const { return kind_; }
    int fd() const { return socket_.fd.get(); }
    const std::string& peer() const { return peer_; }
    const std::string& tenant() const { return protocol_.tenant(); }
    const Access& access() const { return protocol_.access(); }
    // Sends what waited for the standby's word, as far as it is there.
    bool released();
    bool holds() const { return !held_.empty(); }
    bool refuse_held(const Error& why);  // false: the connection is over
    // Of a standby: a MIRROR frame, which send() sends. False: the connection is over.
    void write_mirror(uint64_t now_ms, uint8_t flags);
    bool send() { return flush(); }
    // A hand-over ended with this master as the owner: answers what waited for it. False: as above.
    bool go_on();
    // To a caller that asked for it, where it is news. False: as above.
    bool tell_masters(const MasterList& list);
    void refuse_hand_over(const Error& why);        // of a standby; send() sends it
    bool fail(Code code, const std::string& text);  // an ERROR frame, then the end

   private:
    // Each returns false when the connection is over.
    bool on_readable(uint64_t now_ms);
    bool check_deadlines(uint64_t now_ms);
    bool is_inside() const;
    bool serve(uint64_t now_ms);
    bool parse_frames(uint64_t now_ms);
    bool handle(const FrameHeader& header, Reader body, uint64_t now_ms);
    MasterProtocolHost host();
    LatencyHistogram* histogram(Kind kind) const;

    bool refuse(uint64_t request_id, Code code, const std::string& text);
    bool flush();
    size_t backlog() const { return out_.size() - out_sent_ + held_bytes_; }
    bool waits_for_hand_over() const;
    bool postpones(const FrameHeader& header, Reader body);
    void hold(uint64_t request_id);
    void want_events();

    MasterServer& server_;
    ControlSocket socket_;
    ClosedInChildren closed_in_children_{socket_.fd};
    std::string peer_;
    LinkId id_;
    Caller kind_;
    MasterProtocol protocol_;
    const uint64_t since_ms_;
    FramePace pace_;
    FrameReader in_;
    std::vector<std::byte> out_;
    size_t out_sent_ = 0;
    // Answers that wait for that word of the standby.
    struct Held {
        std::vector<std::byte> answer;
        uint64_t request_id;
        MasterPair::Word word;
    };
    std::deque<Held> held_;
    size_t held_bytes_ = 0;
    // Questions that a hand-over puts off.
    struct Postponed {
        FrameHeader header;
        std::vector<std::byte> body;
    };
    std::deque<Postponed> postponed_;
    size_t postponed_bytes_ = 0;
    MasterList told_masters_{};  // by tell_masters
    size_t whole_answers_ = 0;   // of out_, before the frame that is being handled
    uint32_t events_ = kFirstEvents;
};

}  // namespace moonpool
