// SegmentWriter: records into the open segment, many in one write, and the opening and sealing of segments.
// The log's thread owns it.
//
//   append --> batch --> (held until the segment's header is on the disk) --> write --> finish
//
// No record goes to a segment before its header. Else a crash could leave records without a header: the
// number would be given once more, and they would count then; or the segment's former header, and with it
// what lived there before, but no longer all the removals.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "io/buffers.hpp"
#include "ssd/log_io.hpp"
#include "ssd/log_state.hpp"
#include "ssd/segments.hpp"

namespace moonpool::ssd {

class SegmentWriter {
   public:
    SegmentWriter(LogState& log, LogIo& io, SegmentTable& segments)
        : log_(log), io_(io), segments_(segments), buffers_(log.options.depth, log.options.io_bytes) {}
    bool valid() const { return buffers_.valid(); }  // there was memory for its buffers

    // Asked for when not even the collector's own writes have room: frees a segment, false when it cannot.
    void set_make_room(std::function<bool()> f) { free_one_at_once_ = std::move(f); }

    void add(WriteJobPtr job) { writes_.push_back(std::move(job)); }
    void add_internal(WriteJobPtr job) { internal_writes_.push_back(std::move(job)); }
    // Ends copies that wait for room as failed.
    void fail_copies();
    void refuse();  // callers' writes that wait

    void queue_removals();
    void append_writes();
    bool removals_in_flight() const { return removals_in_flight_; }
    // Nothing is gathered, and no segment is being sealed.
    bool at_rest() const { return !sealing_ && batch_.used == 0; }
    bool has_internal() const { return !internal_writes_.empty(); }
    // Seals the open segment; false: there is none, or it is bad.
    bool seal_open();

   private:
    using Seal = LogIo::Ended;

    struct Head {
        bool open = false;
        bool bad = false;  // a write to it failed
        bool header_durable = false;
        uint64_t opened = 0;  // how many were opened before; a number may come twice
        uint32_t slot = 0;
        uint64_t number = 0;
        uint64_t used = 0;  // bytes
        SummaryWriter summary;
    };

    // Consecutive bytes of the open segment that go to the disk in one write.
    struct Batch {
        std::byte* buffer = nullptr;
        uint64_t offset = 0;
        uint64_t used = 0;
        std::vector<WriteJobPtr> jobs;
    };

    bool append(const WriteJobPtr& job, bool internal);
    bool make_room(uint64_t record_bytes, uint64_t summary_bytes, bool internal);
    bool fits(uint64_t record_bytes, uint64_t summary_bytes) const;
    void open_head(Seal seal);
    Seal close_head();
    void write_summary(uint32_t slot, Footer footer, const std::vector<std::byte>& summary, uint64_t at);
    bool waits_for_header() const { return head_.open && !head_.header_durable; }
    void on_header(int error);
    void on_header_failed(int error);
    void on_write_error(uint32_t slot, int error);

    void put(const WriteJobPtr& job, std::span<const std::byte> bytes);
    void put_zeros(const WriteJobPtr& job, uint64_t bytes);
    void join_batch(const WriteJobPtr& job);
    void send_batch();
    void submit_batch(Batch batch);
    void end_batch(const Batch& batch, bool failed);

    void finish(const WriteJobPtr& job);
    bool publish(const WriteJob& job) EXCLUDES(log_.mutex);
    void end_copy(const WriteJob& job) EXCLUDES(log_.mutex);
    void finish_removals(const WriteJobPtr& job);

    LogState& log_;
    LogIo& io_;
    SegmentTable& segments_;
    std::function<bool()> free_one_at_once_;
    io::Buffers buffers_;
    std::deque<WriteJobPtr> writes_, internal_writes_;  // the collector's copies, and removals
    Head head_;
    uint64_t opened_ = 0;
    Batch batch_;
    std::vector<Batch> held_;  // until the open segment's header is on the disk
    uint64_t batch_end_ = 0;   // in the file: where the next byte of the open segment goes
    bool sealing_ = false;
    bool removals_in_flight_ = false;
    uint64_t removals_written_ = 0;
    uint32_t errors_in_row_ = 0;
};

}  // namespace moonpool::ssd
