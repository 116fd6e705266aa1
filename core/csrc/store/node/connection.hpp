// Connection: the node's side of one client. Frames in, answers out, and the books of what the client holds.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/fd.hpp"
#include "store/node/out_queue.hpp"
#include "store/node/put_sink.hpp"
#include "store/node/relay.hpp"
#include "store/node/server.hpp"
#include "wire/error_frame.hpp"
#include "wire/frame.hpp"
#include "wire/frame_pace.hpp"
#include "wire/frame_reader.hpp"

namespace moonpool {

class Connection final : public EventHandler {
   public:
    Connection(Server& server, Fd fd, uint64_t now_ms);
    // Over TCP: the listener has done the handshake. tls: null: plain.
    Connection(Server& server, Fd fd, std::unique_ptr<TlsStream> tls, uint64_t now_ms, Pool& pool,
               const Access& access);
    // One that another process has served until now; pool: null: it has not proved itself.
    Connection(Server& server, Fd fd, uint64_t now_ms, const HandedConnection& handed, Pool* pool);
    ~Connection() override;
    Connection(const Connection&) = delete;

    static constexpr uint32_t kFirstEvents = EPOLLIN;
    bool on_events(uint32_t events) override;
    bool on_tick(uint64_t now_ms) override;
    // Of many bytes on their way, in or out, some gather while the loop sleeps.
    bool expects_more() const override { return put_ == nullptr && !unsent(); }

    // Each returns false when the connection is over.
    bool greet();
    bool resume(uint64_t now_ms);  // what its parked frame waited for is here
    bool check_key();              // that its tenant's key still stands

    // Nothing is half done: another process can go on with it.
    bool is_quiet() const { return put_ == nullptr && parked_ == nullptr && !unsent() && !relayed_; }
    // False: TLS, or an object, is half way through it.
    bool can_be_given() const {
        return tls_ == nullptr && put_ == nullptr && parked_ == nullptr && !relayed_ &&
               queue_.pieces().empty();
    }
    HandedConnection give() const;  // only where it can be given
    // Ends what a client of another host has under way, with the reason. It is read out here, as long as this
    // process lives, and is not given. False: it is over; so where a READ is half out, behind whose bytes no
    // frame can follow.
    bool end_unfinished(const std::string& why);
    bool ends_here() const { return ends_here_; }
    bool listen_again();  // after Server::mute(), or adopted; false: the connection is over
    int fd() const { return fd_.get(); }
    bool proved() const { return pool_ != nullptr; }
    // Set when the connection is over here because the relay has it from now on.
    bool is_relayed() const { return relayed_.has_value(); }
    std::optional<RelayCaller> take_relayed() {
        relayed_->fd = std::move(fd_);
        return std::exchange(relayed_, std::nullopt);
    }
    bool remote() const { return remote_; }
    bool cut_off() const { return cut_off_; }
    uint64_t since_ms() const { return since_ms_; }
    uint64_t leased_bytes() const { return leased_bytes_; }
    size_t pins() const { return pins_.size(); }

   private:
    struct Pinned {
        uint32_t slot;
        uint64_t generation;
    };

    // A frame that waits for objects to come from the SSD. Those behind it wait too: answers keep their
    // order.
    struct Parked {
        Connection* owner = nullptr;  // nullptr: it has ended
        FrameHeader header;
        std::vector<std::byte> body;
        uint32_t waits_for = 0;
        std::vector<Pinned> pinned;  // what is here already, so that it is here still
    };

    bool on_readable(uint64_t now_ms);
    bool check_deadlines(uint64_t now_ms);
    void note_moved(uint64_t bytes, uint64_t now_ms);
    bool is_inside() const { return put_ != nullptr || !in_.waiting().empty() || unsent(); }
    bool flush();
    bool serve();
    bool parse_frames();
    bool handle(const FrameHeader& header, Reader body);
    bool on_auth(const FrameHeader& header, Reader body);
    bool on_auth_for_master(const FrameHeader& header, std::string_view tenant, const Range& range,
                            const Mac& proof, const Access& access);
    std::optional<Error> forbidden(Kind kind) const;
    bool on_open_space(const FrameHeader& header, Reader body);
    bool on_lease(const FrameHeader& header, Reader body);
    bool on_return(Reader body);
    bool on_commit(const FrameHeader& header, Reader body);
    bool on_lookup(const FrameHeader& header, Reader body);
    bool on_release(Reader body);
    bool on_touch(Reader body);
    bool on_remove(const FrameHeader& header, Reader body);
    bool on_list(const FrameHeader& header, Reader body);
    bool on_stat(const FrameHeader& header);
    bool on_describe(const FrameHeader& header, Reader body);

    // connection_tcp.cpp: what only callers without the mapping need.
    enum class Begun { kYes, kNotYet, kEnded };
    Begun begin_put(const FrameHeader& header);
    bool make_room(PutSink& put);
    void note_refusal(Code code, const std::string& text);
    bool receive_put(uint64_t most, uint64_t& received);
    bool finish_put();
    PutOutcome store(const PutSink& put, const PutRow& row);
    bool on_read(const FrameHeader& header, Reader body);
    void close_put();

    // connection_ssd.cpp
    bool only_on_ssd(uint32_t space, std::string_view name) const;
    bool park(const FrameHeader& header, Reader body, uint32_t space,
              std::span<const std::string_view> wanted, std::span<const uint32_t> here);
    void unpark();
    bool hung_up() const;

    PutOutcome existing(uint8_t commit_flags, uint32_t space, std::string_view name) const;
    // Whether it has opened that space: another's number may be another space's tomorrow.
    bool has_space(uint32_t space) const { return space == last_space_ || spaces_.contains(space); }
    bool leased(Extent extent) const;
    uint64_t fair_lease_bytes() const;
    std::string over_rate_text() const;
    void unpin(const std::vector<Pinned>& pinned);
    void release(const std::vector<Pinned>& pinned);  // of pins_
    uint32_t keep_within_shares(bool prefix, uint32_t width);

    bool refuse(uint64_t request_id, Code code,
                const std::string& text);  // an ERROR frame; the connection goes on
    // An ERROR frame, then the end. noted: what the operator reads, where that is not the text.
    bool fail(Code code, const std::string& text, const std::string& noted = {});
    bool malformed(const char* what);
    bool discard();
    uint64_t backlog() const { return queue_.backlog(); }
    size_t held_by_tls() const { return tls_ == nullptr ? 0 : tls_->unsent_bytes(); }
    bool unsent() const { return backlog() != 0 || held_by_tls() != 0; }
    void want_events();

    Server& server_;
    Fd fd_;
    std::unique_ptr<TlsStream> tls_;  // null: plain
    ClosedInChildren closed_in_children_{fd_};
    Pool* pool_ = nullptr;
    Access access_;
    Nonce nonce_;
    uint64_t since_ms_;
    uint64_t progress_ms_;
    bool sent_some_ = false;  // since the last check of the deadlines
    FramePace pace_;
    FrameReader in_;
    OutQueue queue_;
    std::vector<std::byte>& out_ = queue_.frames();
    std::vector<OutPiece> sent_pieces_;
    size_t whole_answers_ = 0;      // of out_, before the frame that is being handled
    const bool remote_ = false;     // over TCP: no memory is shared
    std::unique_ptr<PutSink> put_;  // the PUT frame whose bytes are arriving
    uint32_t events_ = kFirstEvents;
    bool cut_off_ = false;                // by the node, not ended by its client
    bool ended_ = false;                  // refused; kept for what its client holds
    bool ends_here_ = false;              // by end_unfinished()
    std::optional<RelayCaller> relayed_;  // its client asks the master
    std::map<uint64_t, Extent> leases_;   // its own, by offset
    uint64_t leased_bytes_ = 0;
    std::unordered_set<uint32_t> spaces_;
    uint32_t last_space_ = UINT32_MAX;  // of them: mostly there is one
    std::unordered_map<uint64_t, std::vector<Pinned>> pins_;
    uint64_t pinned_objects_ = 0;                            // in all of them
    std::vector<uint32_t> found_;                            // scratch of on_lookup
    std::unordered_map<uint32_t, ssd::Found> found_on_ssd_;  // by place in found_
    std::shared_ptr<Parked> parked_;
    bool resumed_ = false;  // the frame at hand was parked: what is not here now is a miss
};

}  // namespace moonpool
