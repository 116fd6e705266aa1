// Reclaimer: the log is a ring; when room runs short, the segment that was written longest ago is emptied:
// what is worth it is copied, the rest is forgotten. The log's thread owns it.
//
// While the live objects fill at most half of the log, all of them are copied; above that only those that
// were used since they were written, and of a segment at most half. So a segment costs at most one segment of
// copies, and what no caller asked for goes in the order it came.
#pragma once

#include <deque>
#include <utility>

#include "ssd/log_io.hpp"
#include "ssd/log_state.hpp"
#include "ssd/record_reader.hpp"
#include "ssd/segment_writer.hpp"
#include "ssd/segments.hpp"

namespace moonpool::ssd {

class Reclaimer {
   public:
    Reclaimer(LogState& log, LogIo& io, SegmentTable& segments, RecordReader& reader, SegmentWriter& writer)
        : log_(log), io_(io), segments_(segments), reader_(reader), writer_(writer) {}

    void step();
    // There is no room even for what makes room: gives a segment back without copies. False: none now.
    bool free_one_at_once();
    // Forgets all of the oldest segment. False: there is none.
    bool forget_oldest();
    void stop_copying() { copies_.clear(); }

   private:
    void start();
    void copy_next();
    void end_copy(uint64_t bytes);
    void drain();
    void forget_segment(uint32_t slot) REQUIRES(log_.mutex);

    LogState& log_;
    LogIo& io_;
    SegmentTable& segments_;
    RecordReader& reader_;
    SegmentWriter& writer_;

    // The segment that is being reclaimed; kNoSegment: none.
    uint32_t slot_ = SegmentTable::kNoSegment;
    std::deque<std::pair<Hash128, uint64_t>> copies_;  // yet to be made: hash, sequence
    uint32_t in_flight_ = 0;
    uint64_t bytes_in_flight_ = 0;
};

}  // namespace moonpool::ssd
