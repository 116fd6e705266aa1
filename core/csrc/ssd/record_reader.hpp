// RecordReader: reads of records, in pieces of a buffer each, checked on their way. The log's thread owns it.
#pragma once

#include <deque>
#include <memory>

#include "io/buffers.hpp"
#include "ssd/log_io.hpp"
#include "ssd/log_state.hpp"

namespace moonpool::ssd {

class RecordReader {
   public:
    RecordReader(LogState& log, LogIo& io)
        : log_(log), io_(io), buffers_(log.options.depth, log.options.io_bytes) {}

    bool valid() const { return buffers_.valid(); }  // there was memory for its buffers
    void add(ReadJobPtr job) { reads_.push_back(std::move(job)); }
    void start();   // what there are buffers for
    void refuse();  // what waits ends with ECANCELED

   private:
    void submit_piece(const ReadJobPtr& job);
    void consume(const ReadJobPtr& job);
    void finish(const ReadJobPtr& job);

    LogState& log_;
    LogIo& io_;
    io::Buffers buffers_;
    std::deque<ReadJobPtr> reads_;
    uint32_t errors_in_row_ = 0;
};

}  // namespace moonpool::ssd
