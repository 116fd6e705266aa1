#include "ssd/record_reader.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/crc32c.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint32_t kReadErrorsInRowMax = 64;

}  // namespace

// Pieces of one read after the other, as long as there are buffers; a large object takes several.
void RecordReader::start() {
    while (!reads_.empty()) {
        ReadJobPtr job = reads_.front();
        if (job->to.empty()) {
            reads_.pop_front();
            finish(job);
            continue;
        }
        if (job->submitted == 0) {
            job->submitted = job->offset / kBlockBytes * kBlockBytes;
            job->consumed = job->offset;
        }
        uint64_t end = round_up_to_block(job->offset + job->to.size());
        while (job->error == 0 && job->submitted < end && buffers_.available() != 0) submit_piece(job);
        if (job->error == 0 && job->submitted < end) return;
        reads_.pop_front();
        if (job->error != 0 && job->ios == 0) finish(job);
    }
}

void RecordReader::submit_piece(const ReadJobPtr& job) {
    uint64_t end = round_up_to_block(job->offset + job->to.size());
    auto bytes = static_cast<uint32_t>(std::min<uint64_t>(end - job->submitted, buffers_.bytes()));
    std::byte* buffer = buffers_.take();
    uint64_t from = job->submitted;
    job->submitted += bytes;
    ++job->ios;
    io_.submit(io::Operation::Kind::kRead, from, buffer, bytes, [this, job, from, buffer, bytes](int error) {
        --job->ios;
        if (error != 0 && job->error == 0) job->error = error;
        if (job->error != 0) {
            buffers_.give_back(buffer);
        } else {
            job->ready.emplace(from, std::pair(buffer, bytes));
        }
        consume(job);
    });
}

void RecordReader::refuse() {
    for (const ReadJobPtr& job : std::exchange(reads_, {})) {
        job->error = ECANCELED;
        if (job->ios == 0) finish(job);
    }
}

// In the order of the object's bytes, because that is the order of its checksum.
void RecordReader::consume(const ReadJobPtr& job) {
    uint64_t end = job->offset + job->to.size();
    while (job->error == 0 && job->consumed < end) {
        uint64_t first = job->offset / kBlockBytes * kBlockBytes;
        uint64_t piece = job->consumed == job->offset ? first : job->consumed;
        auto it = job->ready.find(piece);
        if (it == job->ready.end()) return;
        auto [buffer, bytes] = it->second;
        uint64_t skip = job->consumed - piece;
        uint64_t n = std::min<uint64_t>(end - job->consumed, bytes - skip);
        job->crc_so_far =
            copy_crc32c(job->crc_so_far, job->to.data() + (job->consumed - job->offset), buffer + skip, n);
        job->consumed += n;
        buffers_.give_back(buffer);
        job->ready.erase(it);
    }
    if (job->error != 0) {
        for (auto& [from, piece] : job->ready) buffers_.give_back(piece.first);
        job->ready.clear();
        if (job->ios != 0) return;
        // One that still has pieces to submit stands in the queue, and ends there.
        if (!reads_.empty() && reads_.front() == job) return;
    }
    if (job->ios == 0) finish(job);
}

void RecordReader::finish(const ReadJobPtr& job) {
    Outcome outcome = Outcome::kDone;
    {
        MutexLock lock(log_.mutex);
        --log_.readers[job->place.slot];
        --log_.reads_waiting;
        if (job->error == ECANCELED) {
            outcome = Outcome::kRefused;
        } else if (job->error != 0) {
            outcome = Outcome::kFailed;
            ++log_.counters.read_errors;
            log_.gone.push_back(job->hash);
            log_.drop(job->hash, job->sequence);
            if (++errors_in_row_ >= kReadErrorsInRowMax && !log_.off) {
                log_.off = log_.read_only = true;
                log_.removals.clear();
                log_.trouble = "reading from " + log_.options.directory + " failed " +
                               std::to_string(kReadErrorsInRowMax) + " times: " + std::strerror(job->error) +
                               "; it is not used any more";
            }
        } else if (job->crc_so_far != job->crc) {
            outcome = Outcome::kMiss;
            ++log_.counters.corrupt;
            log_.gone.push_back(job->hash);
            log_.drop(job->hash, job->sequence);
        } else {
            errors_in_row_ = 0;
            ++log_.counters.read;
            log_.counters.read_bytes += job->to.size();
        }
    }
    job->done(outcome);
}

}  // namespace moonpool::ssd
