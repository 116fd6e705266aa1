// Cost of a record: one copy of its bytes into a page-aligned buffer, and its part of a write of up to
// io_bytes; the checksum came with it. Cost of a segment: one write of its header, two of summary and footer,
// and one sync, which is for the header and for the data of the segment before.
//
// Order on the disk, which recovery relies on: header of n+1 and data of n, then a sync, then the records of
// n+1 and the summary and footer of n.
//
// The open segment (head_) has these states, in this order; the log's thread alone changes them:
//
//   opened     header on its way; batches are held, since no record may reach the disk before it
//   durable    header and the former segment's data are synced; batches go out at once
//   closed     data complete; sealing_ until summary and footer have ended: no other may be closed before
//   bad        a write to it failed: nothing is added any more, and it is closed without a summary
//
// A job (WriteJob) is finished when all batches that hold a part of it have ended, and all of it is in
// batches; the first alone does not do, because an early batch may end while a later one is still filled.
#include "ssd/segment_writer.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/copy.hpp"
#include "base/crc32c.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint32_t kWriteErrorsInRowMax = 8;  // failed writes; then the log is read-only
constexpr uint32_t kSlotsUsableMin = 4;
constexpr uint32_t kSmallWritesMax = 4;  // in flight; those of full buffers have no such limit

}  // namespace

// What the collector copies goes first: it makes the room for the rest.
void SegmentWriter::append_writes() {
    bool hopeless;
    {
        MutexLock lock(log_.mutex);
        hopeless = !log_.is_writable();
    }
    auto fail = [this](std::deque<WriteJobPtr>& jobs) {
        for (const WriteJobPtr& job : std::exchange(jobs, {})) {
            job->failed = true;
            finish(job);
        }
    };
    // Nothing will be written any more: all that waits fails now, or the reclaimer would wait for its
    // copies.
    if (hopeless) {
        fail(internal_writes_);
        fail(writes_);
    }
    while (!internal_writes_.empty()) {
        WriteJobPtr job = internal_writes_.front();
        if (!append(job, true)) break;
        internal_writes_.pop_front();
    }
    while (!writes_.empty() && internal_writes_.empty() && buffers_.available() != 0) {
        WriteJobPtr job = writes_.front();
        if (job->kind == WriteJob::Kind::kSync) {
            // A sync vouches for what was submitted before it. It stays at the front until the removals
            // that were pushed before have been written, and lets no later write pass.
            if (removals_written_ < job->removals_before || waits_for_header()) break;
            send_batch();
            io_.after_writes([this, job] {
                io_.sync_file([this, job](int error) {
                    job->failed = error != 0;
                    finish(job);
                });
            });
        } else if (!append(job, false)) {
            break;
        }
        writes_.pop_front();
    }
    // What is gathered waits for more while some are in flight: few large writes cost less than many.
    bool idle = io_.writes_in_flight() < std::min(log_.options.depth, kSmallWritesMax);
    if (idle && !waits_for_header()) send_batch();
}

bool SegmentWriter::append(const WriteJobPtr& job, bool internal) {
    Record record;
    if (job->kind == WriteJob::Kind::kRemovals) record.kind = RecordKind::kRemovals;
    record.sequence = job->sequence;
    record.size = job->size;
    record.crc = job->crc;
    record.version = job->version;
    if (job->identity != nullptr) record.space = *job->identity;
    record.name = job->name;
    record.parent = job->parent;
    if (!make_room(record.bytes(), SummaryWriter::bytes_for(record), internal)) return false;

    // make_room() may have opened another segment, so number and place are taken only here.
    record.segment = head_.number;
    job->place = Place{head_.slot, static_cast<uint32_t>(head_.used / kBlockBytes)};
    head_.summary.add(log_.superblock.id, job->place.block, record, job->removals);
    head_.used += record.bytes();

    std::vector<std::byte> header(record.data_offset());
    encode_record(log_.superblock.id, record, header.data());
    put(job, header);
    for (std::span<const std::byte> part : job->parts) put(job, part);
    put_zeros(job, record.bytes() - record.data_offset() - record.size);
    job->in_batches = true;
    if (job->ios == 0) finish(job);
    return true;
}

bool SegmentWriter::fits(uint64_t record_bytes, uint64_t summary_bytes) const {
    // The room for summary and footer is kept free from the first record on: sealing cannot fail for lack
    // of room.
    uint64_t summary = round_up_to_block(head_.summary.bytes() + summary_bytes);
    return head_.used + record_bytes + summary + kBlockBytes <= log_.superblock.segment_bytes;
}

// True when the open segment has room, if need be a new one. The last free segments, and what is open once
// they are touched, are the collector's: else callers would fill the room that it needs to make room.
bool SegmentWriter::make_room(uint64_t record_bytes, uint64_t summary_bytes, bool internal) {
    if (!internal && segments_.free() < kSegmentsForReclaim) return false;
    if (head_.open && !head_.bad && fits(record_bytes, summary_bytes)) return true;
    // The collector's own writes may use the last free segments. When those are gone as well, the reclaimer
    // frees one without copies: progress is worth more than what is lost.
    if (internal && segments_.free() == 0 && !free_one_at_once_()) return false;
    if (!internal && segments_.free() <= kSegmentsForReclaim) return false;
    Seal seal;
    if (head_.open) {
        // A header that is not on the disk yet would leave a gap in the numbers.
        if (sealing_ || !head_.header_durable) return false;
        seal = close_head();
    }
    open_head(std::move(seal));
    return true;
}

// One sync is for the header, and for the data of the segment before.
void SegmentWriter::open_head(Seal seal) {
    uint32_t slot = segments_.open_next();
    head_ = Head{};
    head_.open = true;
    head_.opened = opened_++;
    head_.slot = slot;
    head_.number = segments_.number(slot);
    head_.used = kBlockBytes;
    batch_end_ = log_.begin_of(slot) + kBlockBytes;
    auto block = shared_block(kBlockBytes);
    encode_segment_header(log_.superblock.id, SegmentHeader{head_.number, segments_.tail()}, block.get());
    io_.write_block(log_.begin_of(slot), block, kBlockBytes, [this, slot](int error) {
        if (error == 0) return;
        on_write_error(slot, error);
        on_header_failed(error);
    });
    io_.after_writes([this, seal = std::move(seal), opened = head_.opened] {
        io_.sync_file([this, seal, opened](int error) {
            if (head_.opened == opened && waits_for_header()) on_header(error);
            if (seal) seal(error);
        });
    });
}

// A gap in the numbers would say at the next start that a segment with removals was lost. No record has gone
// to this one, so its number goes to the next, whether this header is on the disk or not.
void SegmentWriter::on_header_failed(int error) {
    on_header(error);
    segments_.take_back_number();
}

// The header is on the disk, or never will be: what was held for it goes, or fails.
void SegmentWriter::on_header(int error) {
    send_batch();
    head_.header_durable = true;  // or as far as it ever will be
    for (Batch& batch : std::exchange(held_, {})) {
        if (error == 0) {
            submit_batch(std::move(batch));
        } else {
            end_batch(batch, true);
        }
    }
}

// -> what to call when the data is safe; then comes what vouches for it.
SegmentWriter::Seal SegmentWriter::close_head() {
    send_batch();
    uint32_t slot = head_.slot;
    head_.open = false;
    if (head_.bad) {
        segments_.retire(slot);
        return {};
    }
    segments_.move(slot, SegmentState::kClosed);
    const std::vector<std::byte>& summary = head_.summary.data();
    Footer footer{head_.number, static_cast<uint32_t>(head_.used / kBlockBytes),
                  static_cast<uint32_t>(summary.size()), crc32c(0, summary.data(), summary.size()),
                  head_.summary.count()};
    sealing_ = true;
    return [this, slot, footer, summary, at = head_.used](int error) {
        if (error != 0) {
            sealing_ = false;
            return;
        }
        write_summary(slot, footer, summary, at);
    };
}

void SegmentWriter::write_summary(uint32_t slot, Footer footer, const std::vector<std::byte>& summary,
                                  uint64_t at) {
    uint64_t bytes = round_up_to_block(summary.size());
    auto block = shared_block(kBlockBytes);
    encode_footer(log_.superblock.id, footer, block.get());
    // Summary and footer go out together: a footer without its summary is recognised by the summary's
    // checksum.
    auto left = std::make_shared<int>(bytes == 0 ? 1 : 2);
    auto done = [this, slot, left](int error) {
        if (error != 0) on_write_error(slot, error);
        if (--*left == 0) sealing_ = false;
    };
    if (bytes != 0) {
        auto memory = shared_block(bytes);
        std::memcpy(memory.get(), summary.data(), summary.size());
        io_.write_block(log_.begin_of(slot) + at, memory, bytes, done);
    }
    io_.write_block(log_.begin_of(slot) + log_.superblock.segment_bytes - kBlockBytes, block, kBlockBytes,
                    done);
}

// ---- batches

void SegmentWriter::join_batch(const WriteJobPtr& job) {
    // Waits for the disk, on the log's thread: reads wait meanwhile too. It ends, because held batches are
    // released by the header's sync, which reap() sees.
    while (batch_.buffer == nullptr) {
        batch_.buffer = buffers_.take();
        if (batch_.buffer != nullptr) break;
        io_.reap(1000);  // all of them are in flight, or held
        io_.step_barriers();
    }
    // Several small records share a batch, and a large one spans several; `ios` counts for each job the
    // batches that it is part of.
    if (batch_.jobs.empty()) batch_.offset = batch_end_;
    if (batch_.jobs.empty() || batch_.jobs.back() != job) {
        batch_.jobs.push_back(job);
        ++job->ios;
    }
}

void SegmentWriter::put(const WriteJobPtr& job, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        join_batch(job);
        size_t n = std::min<size_t>(bytes.size(), buffers_.bytes() - batch_.used);
        copy(batch_.buffer + batch_.used, bytes.data(), n);
        batch_.used += n;
        batch_end_ += n;
        bytes = bytes.subspan(n);
        if (batch_.used == buffers_.bytes()) send_batch();
    }
}

void SegmentWriter::put_zeros(const WriteJobPtr& job, uint64_t bytes) {
    static constexpr std::byte kZeros[kBlockBytes] = {};
    while (bytes != 0) {
        uint64_t n = std::min<uint64_t>(bytes, kBlockBytes);
        put(job, {kZeros, n});
        bytes -= n;
    }
}

void SegmentWriter::send_batch() {
    if (batch_.used == 0) return;
    Batch batch = std::exchange(batch_, Batch{});
    if (head_.header_durable) return submit_batch(std::move(batch));
    held_.push_back(std::move(batch));
}

void SegmentWriter::submit_batch(Batch batch) {
    auto shared = std::make_shared<Batch>(std::move(batch));
    io_.submit(io::Operation::Kind::kWrite, shared->offset, shared->buffer, shared->used,
               [this, shared](int error) {
                   if (error != 0) {
                       on_write_error(shared->jobs.front()->place.slot, error);
                   } else {
                       errors_in_row_ = 0;
                   }
                   end_batch(*shared, error != 0);
               });
}

void SegmentWriter::end_batch(const Batch& batch, bool failed) {
    buffers_.give_back(batch.buffer);
    for (const WriteJobPtr& job : batch.jobs) {
        job->failed |= failed;
        if (--job->ios == 0 && job->in_batches) finish(job);
    }
}

// ---- the end of a write

void SegmentWriter::finish(const WriteJobPtr& job) {
    Outcome outcome = job->failed ? Outcome::kFailed : Outcome::kDone;
    switch (job->kind) {
        case WriteJob::Kind::kSync: {
            MutexLock lock(log_.mutex);
            --log_.writes_waiting;
            break;
        }
        case WriteJob::Kind::kRemovals:
            return finish_removals(job);
        case WriteJob::Kind::kObject:
            if (!publish(*job) && outcome == Outcome::kDone) outcome = Outcome::kMiss;
            break;
        case WriteJob::Kind::kCopy:
            end_copy(*job);
            break;
    }
    if (job->done) job->done(outcome);
}

// A record is in the index only from here on: until its bytes are on the disk, a find of its key is a miss.
// Into the index, unless it failed, or was replaced or removed meanwhile; then false.
bool SegmentWriter::publish(const WriteJob& job) {
    MutexLock lock(log_.mutex);
    --log_.writes_waiting;
    --log_.spaces[job.space].writes;
    bool wanted = log_.end_writing(job);
    if (!wanted || job.failed) {
        log_.push_removal(job.sequence);  // some of it may stand on the disk
        return false;
    }
    Record shape;
    shape.space = *job.identity;
    shape.name = job.name;
    shape.parent = job.parent;
    shape.size = job.size;
    Entry entry;
    entry.sequence = job.sequence;
    entry.version = job.version;
    entry.hash = job.hash;
    entry.size = job.size;
    entry.record_bytes = shape.bytes();
    entry.crc = job.crc;
    entry.data_offset = shape.data_offset();
    entry.space = job.space;
    entry.place = job.place;
    entry.set_text(job.name, job.parent);
    uint32_t old = log_.index.find(job.hash);
    if (old != kNoEntry) log_.index.erase(old);
    log_.index.insert(std::move(entry));
    ++log_.counters.written;
    log_.counters.written_bytes += job.size;
    return true;
}

// The entry moves to the copy only while it still is what was copied: `from` tells a copy of a copy from
// the one it was made of. A copy that failed leaves the entry where it was; its segment is forgotten later.
void SegmentWriter::end_copy(const WriteJob& job) {
    MutexLock lock(log_.mutex);
    uint32_t at = log_.index.find(job.hash);
    bool wanted = at != kNoEntry && log_.index.entry(at).sequence == job.sequence &&
                  log_.index.entry(at).place == job.from;
    if (wanted && !job.failed) {
        log_.index.move(at, job.place);
        ++log_.counters.copied;
        log_.counters.copied_bytes += job.size;
    } else if (!wanted) {
        // Its removal may stand before the copy in the log, and be forgotten before it.
        log_.push_removal(job.sequence);
    }
}

// A write may fail long after its segment was closed (summary, footer). Then the segment is retired at
// once; an open one is retired when it is closed, since appends still refer to it. Errors that no retry
// cures end writing for good, as do many in a row.
void SegmentWriter::on_write_error(uint32_t slot, int error) {
    {
        MutexLock lock(log_.mutex);
        ++log_.counters.write_errors;
    }
    if (head_.open && head_.slot == slot) head_.bad = true;
    if (segments_.state(slot) != SegmentState::kOpen) segments_.retire(slot);
    bool for_good = error == ENOSPC || error == EROFS || error == EDQUOT;
    if (for_good || ++errors_in_row_ >= kWriteErrorsInRowMax || segments_.usable() < kSlotsUsableMin) {
        log_.stop_writing("writing to " + log_.options.directory + " failed: " + std::strerror(error));
    }
}

void SegmentWriter::refuse() {
    for (const WriteJobPtr& job : std::exchange(writes_, {})) {
        {
            MutexLock lock(log_.mutex);
            --log_.writes_waiting;
            log_.end_writing(*job);
        }
        if (job->done) job->done(Outcome::kRefused);
    }
}

void SegmentWriter::fail_copies() {
    for (auto it = internal_writes_.begin(); it != internal_writes_.end();) {
        WriteJobPtr job = *it;
        if (job->kind != WriteJob::Kind::kCopy) {
            ++it;
            continue;
        }
        it = internal_writes_.erase(it);
        job->failed = true;
        finish(job);
    }
}

bool SegmentWriter::seal_open() {
    if (!head_.open || head_.bad) return false;
    if (Seal seal = close_head()) {
        io_.after_writes([this, seal] { io_.sync_file(seal); });
        io_.step_barriers();
    }
    return true;
}

// ---- removals, and the tail

// One record at a time: many removals gather while one is on its way.
void SegmentWriter::queue_removals() {
    if (removals_in_flight_) return;
    auto job = std::make_shared<WriteJob>();
    job->kind = WriteJob::Kind::kRemovals;
    // The first number of a removal record is the tail: segments below it count no more once the record is
    // on the disk.
    job->removals.push_back(segments_.tail_to_write());
    {
        MutexLock lock(log_.mutex);
        bool tail_is_due = segments_.tail_to_write() != segments_.tail_written();
        if (!log_.is_writable() || (log_.removals.empty() && !tail_is_due)) return;
        size_t n = std::min<size_t>(log_.removals.size(), kRemovalsMax - 1);
        auto end = log_.removals.begin() + static_cast<ptrdiff_t>(n);
        job->removals.insert(job->removals.end(), log_.removals.begin(), end);
        log_.removals.erase(log_.removals.begin(), end);
        job->sequence = log_.options.sequence->load();
    }
    std::span<const std::byte> data = std::as_bytes(std::span<const uint64_t>(job->removals));
    job->parts.push_back(data);
    job->size = data.size();
    job->crc = crc32c(0, data.data(), data.size());
    removals_in_flight_ = true;
    internal_writes_.push_front(std::move(job));
}

void SegmentWriter::finish_removals(const WriteJobPtr& job) {
    removals_in_flight_ = false;
    if (!job->failed) {
        // Only now may drained segments below that tail be used again: recovery knows from here on to pass
        // over their old records.
        segments_.tail_is_written(job->removals.front());
        removals_written_ += job->removals.size() - 1;
        segments_.free_drained(segments_.tail_written());
        return;
    }
    MutexLock lock(log_.mutex);
    // In front: their order is that of their pushing, by which a sync knows what it has to wait for.
    if (!log_.read_only)
        log_.removals.insert(log_.removals.begin(), job->removals.begin() + 1, job->removals.end());
}

}  // namespace moonpool::ssd
