// One initiator's connection, on the I/O thread of its loop.
//
//   bytes ──► in_ ──► a frame's head ──► the rows of a TRANSFER ──► incoming_: the payload goes past in_,
//                                   └──► any other frame, whole          straight into the regions
//   answers ──► out_, in the order of the questions; while too many wait, nothing more is read
//
// Inside TLS the same bytes pass through tls_, which may hold some of either direction (SecureSocket).
//
// Rows that are memory of a card pass through a slot of pinned memory (card_rows.hpp). Another thread waits
// for the card, while this one reads the next frames; the answer keeps its place in out_.
//
// The length of a frame is checked before anything is stored; memory follows the bytes that came.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/event_loop.hpp"
#include "transport/frames.hpp"
#include "transport/tcp/card_rows.hpp"
#include "transport/tcp/secure_io.hpp"
#include "transport/tcp/target.hpp"
#include "wire/frame_pace.hpp"

namespace moonpool::transport::tcp {

class Connection final : public EventHandler, public std::enable_shared_from_this<Connection> {
   public:
    // tls: null: in plain.
    Connection(Target& target, EventLoop& loop, Fd fd, std::unique_ptr<TlsStream> tls, std::string peer);
    ~Connection() override;

    bool on_events(uint32_t events) override;
    bool on_tick(uint64_t now_ms) override;
    int fd() const { return fd_.get(); }
    // On the loop's thread, which has it since: what TLS holds already is no event of the socket.
    // ready: an error refuses the connection with its sentence.
    void begin(const Status& ready);

    // From any thread: when it returns, nothing that came over this connection is written any more, but by
    // cards, and nothing that came is handed to one. copying(): whether they have ended, too.
    void fence();
    const CopiesUnderWay& copying() const { return copying_; }

   private:
    struct Incoming {  // a TRANSFER whose payload has not come in full
        uint64_t request_id = 0;
        std::vector<TransferRow> rows;
        std::vector<Region*> places;  // of each row; null: refused
        std::shared_ptr<const Regions> regions;
        size_t row = 0;   // the next byte to come is that of
        uint64_t at = 0;  // this row, at this place
        uint64_t left = 0;
        uint32_t refused = 0;
        Error refusal;
        std::unique_ptr<CardRows> cards;  // null: no row is memory of a card
    };
    struct ReadRow {
        Region* place;  // null: the bytes are in the answer's slot
        uint64_t address;
        uint64_t length;
    };
    struct Answer {
        bool ready = true;  // false: a card is at work for it, and answers behind it wait
        std::vector<std::byte> head;
        std::vector<ReadRow> rows;
        std::shared_ptr<const Regions> regions;
        std::shared_ptr<void> slot;                // of pinned memory, or what took its bytes over
        std::shared_ptr<device::CardCopier> card;  // whose slot it is
        size_t head_sent = 0;
        size_t row = 0;
        uint64_t at = 0;
        uint64_t bytes = 0;
    };
    // A frame whose bytes cards copy, in the order of the questions.
    struct CardWork {
        Incoming frame;
        Answer* answer;  // in out_
    };
    enum class Flow { kMoved, kBlocked, kOver };
    static constexpr size_t kServedRangesMax = 64;  // in one system call
    struct Parts {
        iovec parts[kServedRangesMax];
        size_t rows[kServedRangesMax];  // of each part
        size_t count = 0;
        bool may_fault = false;  // inside TLS: one of them may
    };

    bool move_on(uint32_t events);

    Flow receive();
    Flow receive_payload();
    bool parse();
    bool begin_transfer(const FrameHeader& header, size_t have);
    bool place_rows(const FrameHeader& header);
    void begin_payload();
    void find_slot();
    void got_slot(const Status& got);
    void go_on();
    void start_card_work();
    void end_card_work(const CardRows::Refused& refused);
    void take_payload(const std::byte* bytes, size_t size);
    void take_secured(const std::byte* bytes, size_t size);
    void place_parts(Parts& to, size_t ranges_max, uint64_t most, Visit& visit);
    ssize_t secured(const Parts& to);
    void advance(uint64_t size);
    bool may_touch(size_t row, uint64_t at, uint64_t bytes, Visit& visit);
    std::byte* destination(size_t row, uint64_t at) const;
    bool may_fault(size_t row) const;
    static void refuse_row(Incoming& in, size_t row, const Error& why);
    void refuse_row(size_t row, const char* why);
    void finish_transfer();
    void write_answer(Incoming& in, Answer& answer);
    bool serve(const FrameHeader& header, Reader body);
    bool on_hello(const FrameHeader& header, Reader body);
    bool on_fence(const FrameHeader& header, Reader body);
    bool on_ask(const FrameHeader& header, Reader body);
    static void free_slot(Answer& answer);
    Status wait_until_drained(const std::vector<CopiesUnderWay>& fenced) const;
    void answer(const FrameHeader& header, const std::vector<std::byte>& body);
    void answer_error(uint64_t request_id, Code code, const std::string& text);
    bool protocol_error(const std::string& text);
    void end();
    void leave();
    bool is_in_time(uint64_t now_ms);
    bool flush();
    bool flush_answers();
    void watch();
    void come_again();
    SecureSocket socket() const { return {fd_.get(), tls_.get(), &target_.staging()}; }
    bool backlogged() const;
    bool is_inside() const {
        return receiving_ || in_begin_ != in_end_ || !out_.empty() || socket().unsent();
    }

    Target& target_;
    EventLoop& loop_;
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
    std::unique_ptr<TlsStream> tls_;
    std::string peer_;       // ip:port
    std::string peer_name_;  // as the initiator calls itself
    Target::Name name_;
    bool greeted_ = false;
    bool ended_ = false;  // an ERROR for the whole connection is on its way; what comes is thrown away
    const uint64_t since_ms_;
    uint64_t ended_ms_ = 0;
    FramePace pace_;

    std::vector<std::byte> in_;
    size_t in_begin_ = 0, in_end_ = 0;
    bool receiving_ = false;
    bool comes_again_ = false;  // the loop has been asked for another turn
    bool broken_ = false;       // a part of a payload has been lost
    bool one_by_one_ = false;   // rows of this payload: one of them is not mapped
    Incoming incoming_;
    std::vector<size_t> unmapped_;  // of one call
    // Cards. One frame after another is at work, on a thread that may wait; no frame gets a slot for its
    // writes while reads before it may want one, so that no two connections wait for each other's slots.
    std::deque<std::shared_ptr<CardWork>> card_work_;
    size_t card_reads_ = 0;      // of card_work_, those with reads
    bool wants_slot_ = false;    // the payload of incoming_ is not read before it has a slot
    bool awaits_slot_ = false;   // a thread waits for it
    bool awaits_fence_ = false;  // a thread waits for other connections or a transport; no question is read
    bool over_ = false;          // the loop does not know this connection any more
    std::deque<Answer> out_;
    std::vector<Answer> spare_;
    uint64_t out_bytes_ = 0;
    uint32_t watched_ = 1;  // EPOLLIN

    // The fence: a thread that writes into a region says so first and looks whether it still may.
    std::atomic<bool> writing_{false};
    std::atomic<bool> fenced_{false};
    // Frames that cards write to a region; it outlives the connection where a card hangs.
    const CopiesUnderWay copying_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace moonpool::transport::tcp
