// One initiator's connection, on the I/O thread of its loop.
//
//   bytes ──► in_ ──► a frame's head ──► the rows of a TRANSFER ──► incoming_: the payload goes past in_,
//                                   └──► any other frame, whole          straight into the regions
//   answers ──► out_, in the order of the questions; while too many wait, nothing more is read
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
#include "transport/tcp/target.hpp"

namespace moonpool::transport::tcp {

class Connection final : public EventHandler, public std::enable_shared_from_this<Connection> {
   public:
    Connection(Target& target, EventLoop& loop, Fd fd, std::string peer);
    ~Connection() override;

    bool on_events(uint32_t events) override;
    bool on_tick(uint64_t now_ms) override;
    int fd() const { return fd_.get(); }

    // From any thread: when it returns, nothing that came over this connection is written any more.
    void fence();

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
    };
    struct ReadRow {
        Region* place;
        uint64_t address;
        uint64_t length;
    };
    struct Answer {
        std::vector<std::byte> head;
        std::vector<ReadRow> rows;
        std::shared_ptr<const Regions> regions;
        size_t head_sent = 0;
        size_t row = 0;
        uint64_t at = 0;
        uint64_t bytes = 0;
    };
    enum class Flow { kMoved, kBlocked, kOver };

    Flow receive();
    Flow receive_payload();
    bool parse();
    bool begin_transfer(const FrameHeader& header, size_t have);
    bool place_rows(const FrameHeader& header);
    void take_payload(const std::byte* bytes, size_t size);
    void advance(uint64_t size);
    bool may_touch(size_t row, uint64_t at, uint64_t bytes, Visit& visit);
    void refuse_row(size_t row, const char* why);
    void finish_transfer();
    bool serve(const FrameHeader& header, Reader body);
    bool on_hello(const FrameHeader& header, Reader body);
    bool on_fence(const FrameHeader& header, Reader body);
    void answer(const FrameHeader& header, const std::vector<std::byte>& body);
    void answer_error(uint64_t request_id, Code code, const std::string& text);
    bool protocol_error(const std::string& text);
    bool flush();
    void watch();
    bool backlogged() const;

    Target& target_;
    EventLoop& loop_;
    Fd fd_;
    ClosedInChildren closed_in_children_{fd_};
    std::string peer_;       // ip:port
    std::string peer_name_;  // as the initiator calls itself
    Target::Name name_;
    bool greeted_ = false;
    bool ended_ = false;  // an ERROR for the whole connection is on its way; what comes is thrown away
    uint64_t progress_ms_;

    std::vector<std::byte> in_;
    size_t in_begin_ = 0, in_end_ = 0;
    bool receiving_ = false;
    bool one_by_one_ = false;  // rows of this payload: one of them is not mapped
    Incoming incoming_;
    std::deque<Answer> out_;
    std::vector<Answer> spare_;
    uint64_t out_bytes_ = 0;
    uint32_t watched_ = 1;  // EPOLLIN

    // The fence: a thread that writes into a region says so first and looks whether it still may.
    std::atomic<bool> writing_{false};
    std::atomic<bool> fenced_{false};
};

}  // namespace moonpool::transport::tcp
