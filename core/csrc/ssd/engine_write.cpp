#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/copy.hpp"
#include "base/crc32c.hpp"
#include "ssd/engine.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint32_t kSmallWritesMax = 4;  // in flight; those of full buffers have no such limit

std::shared_ptr<std::byte> shared_block(uint64_t bytes) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes));
    std::memset(memory, 0, bytes);
    return {memory, [](std::byte* p) { std::free(p); }};
}

}  // namespace

// What the collector copies goes first: it makes the room for the rest.
void Engine::append_writes() {
    bool hopeless;
    {
        std::lock_guard lock(mutex_);
        hopeless = read_only_ || off_;
    }
    auto fail = [this](std::deque<WriteJobPtr>& jobs) {
        for (const WriteJobPtr& job : std::exchange(jobs, {})) {
            job->failed = true;
            finish_write(job);
        }
    };
    if (hopeless) {
        fail(internal_writes_);
        fail(writes_);
    }
    while (!internal_writes_.empty()) {
        WriteJobPtr job = internal_writes_.front();
        if (!append(job, true)) break;
        internal_writes_.pop_front();
    }
    while (!writes_.empty() && internal_writes_.empty() && write_buffers_->available() != 0) {
        WriteJobPtr job = writes_.front();
        if (job->kind == WriteJob::Kind::kSync) {
            if (removals_written_ < job->removals_before || waits_for_header()) break;
            send_batch();
            after_writes([this, job] {
                sync_file([this, job](int error) {
                    job->failed = error != 0;
                    finish_write(job);
                });
            });
        } else if (!append(job, false)) {
            break;
        }
        writes_.pop_front();
    }
    // What is gathered waits for more while some are in flight: few large writes cost less than many.
    bool idle = writes_in_flight_.size() < std::min(options_.depth, kSmallWritesMax);
    if (idle && !waits_for_header()) send_batch();
}

bool Engine::append(const WriteJobPtr& job, bool internal) {
    Record record;
    if (job->kind == WriteJob::Kind::kRemovals) record.kind = RecordKind::kRemovals;
    record.sequence = job->sequence;
    record.size = job->size;
    record.crc = job->crc;
    if (job->identity != nullptr) record.space = *job->identity;
    record.name = job->name;
    record.parent = job->parent;
    if (!make_room(record.bytes(), SummaryWriter::bytes_for(record), internal)) return false;

    record.segment = head_.number;
    job->place = Place{head_.slot, static_cast<uint32_t>(head_.used / kBlockBytes)};
    head_.summary.add(superblock_.id, job->place.block, record, job->removals);
    head_.used += record.bytes();

    std::vector<std::byte> header(record.data_offset());
    encode_record(superblock_.id, record, header.data());
    put(job, header);
    for (std::span<const std::byte> part : job->parts) put(job, part);
    put_zeros(job, record.bytes() - record.data_offset() - record.size);
    job->in_batches = true;
    if (job->ios == 0) finish_write(job);
    return true;
}

bool Engine::fits(uint64_t record_bytes, uint64_t summary_bytes) const {
    uint64_t summary = round_up_to_block(head_.summary.bytes() + summary_bytes);
    return head_.used + record_bytes + summary + kBlockBytes <= superblock_.segment_bytes;
}

// True when the open segment has room, if need be a new one. The last free segments, and what is open once
// they are touched, are the collector's: else callers would fill the room that it needs to make room.
bool Engine::make_room(uint64_t record_bytes, uint64_t summary_bytes, bool internal) {
    if (!internal && free_.size() < kSegmentsForReclaim) return false;
    if (head_.open && !head_.bad && fits(record_bytes, summary_bytes)) return true;
    if (internal && free_.empty() && !free_one_at_once()) return false;
    if (!internal && free_.size() <= kSegmentsForReclaim) return false;
    std::function<void(int)> seal;
    if (head_.open) {
        // A header that is not on the disk yet would leave a gap in the numbers.
        if (sealing_ || !head_.header_durable) return false;
        seal = close_head();
    }
    open_head(std::move(seal));
    return true;
}

// One sync is for the header, and for the data of the segment before.
void Engine::open_head(std::function<void(int)> seal) {
    uint32_t slot = free_.front();
    free_.pop_front();
    free_count_ = free_.size();
    uint64_t lowest = tail();
    head_ = Head{};
    head_.open = true;
    head_.slot = slot;
    head_.number = next_number_++;
    head_.used = kBlockBytes;
    batch_end_ = begin_of(slot) + kBlockBytes;
    states_[slot] = SlotState::kHead;
    numbers_[slot] = head_.number;
    auto block = shared_block(kBlockBytes);
    encode_segment_header(superblock_.id, SegmentHeader{head_.number, std::min(lowest, head_.number)},
                          block.get());
    write_block(begin_of(slot), block, kBlockBytes, [this, slot](int error) {
        if (error == 0) return;
        on_write_error(slot, error);
        on_header(error);
    });
    after_writes([this, seal = std::move(seal), number = head_.number] {
        sync_file([this, seal, number](int error) {
            if (head_.number == number && waits_for_header()) on_header(error);
            if (seal) seal(error);
        });
    });
}

// No record goes to a segment before this. Else a crash could leave records without a header: the number
// would be given once more, and they would count then; or the segment's former header, and with it what lived
// there before, but no longer all the removals.
void Engine::on_header(int error) {
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
std::function<void(int)> Engine::close_head() {
    send_batch();
    uint32_t slot = head_.slot;
    states_[slot] = head_.bad ? SlotState::kBad : SlotState::kClosed;
    head_.open = false;
    if (head_.bad) return {};
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

void Engine::write_summary(uint32_t slot, Footer footer, const std::vector<std::byte>& summary, uint64_t at) {
    uint64_t bytes = round_up_to_block(summary.size());
    auto block = shared_block(kBlockBytes);
    encode_footer(superblock_.id, footer, block.get());
    auto left = std::make_shared<int>(bytes == 0 ? 1 : 2);
    auto done = [this, slot, left](int error) {
        if (error != 0) on_write_error(slot, error);
        if (--*left == 0) sealing_ = false;
    };
    if (bytes != 0) {
        auto memory = shared_block(bytes);
        std::memcpy(memory.get(), summary.data(), summary.size());
        write_block(begin_of(slot) + at, memory, bytes, done);
    }
    write_block(begin_of(slot) + superblock_.segment_bytes - kBlockBytes, block, kBlockBytes, done);
}

// ---- batches

void Engine::join_batch(const WriteJobPtr& job) {
    while (batch_.buffer == nullptr) {
        batch_.buffer = write_buffers_->take();
        if (batch_.buffer != nullptr) break;
        reap(1000);  // all of them are in flight, or held
        step_barriers();
    }
    if (batch_.jobs.empty()) batch_.offset = batch_end_;
    if (batch_.jobs.empty() || batch_.jobs.back() != job) {
        batch_.jobs.push_back(job);
        ++job->ios;
    }
}

void Engine::put(const WriteJobPtr& job, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        join_batch(job);
        size_t n = std::min<size_t>(bytes.size(), write_buffers_->bytes() - batch_.used);
        copy(batch_.buffer + batch_.used, bytes.data(), n);
        batch_.used += n;
        batch_end_ += n;
        bytes = bytes.subspan(n);
        if (batch_.used == write_buffers_->bytes()) send_batch();
    }
}

void Engine::put_zeros(const WriteJobPtr& job, uint64_t bytes) {
    static constexpr std::byte kZeros[kBlockBytes] = {};
    while (bytes != 0) {
        uint64_t n = std::min<uint64_t>(bytes, kBlockBytes);
        put(job, {kZeros, n});
        bytes -= n;
    }
}

void Engine::send_batch() {
    if (batch_.used == 0) return;
    Batch batch = std::exchange(batch_, Batch{});
    if (head_.header_durable) return submit_batch(std::move(batch));
    held_.push_back(std::move(batch));
}

void Engine::submit_batch(Batch batch) {
    auto shared = std::make_shared<Batch>(std::move(batch));
    submit_io(IoOperation::Kind::kWrite, shared->offset, shared->buffer, shared->used,
              [this, shared](int error) {
                  if (error != 0) {
                      on_write_error(shared->jobs.front()->place.slot, error);
                  } else {
                      write_errors_in_row_ = 0;
                  }
                  end_batch(*shared, error != 0);
              });
}

void Engine::end_batch(const Batch& batch, bool failed) {
    write_buffers_->give_back(batch.buffer);
    for (const WriteJobPtr& job : batch.jobs) {
        job->failed |= failed;
        if (--job->ios == 0 && job->in_batches) finish_write(job);
    }
}

// ---- the end of a write

bool Engine::end_writing(const WriteJob& job) {
    auto it = writing_.find(job.hash.low);
    if (it == writing_.end() || it->second != job.sequence) return false;
    writing_.erase(it);
    return true;
}

void Engine::finish_write(const WriteJobPtr& job) {
    Outcome outcome = job->failed ? Outcome::kFailed : Outcome::kDone;
    switch (job->kind) {
        case WriteJob::Kind::kSync: {
            std::lock_guard lock(mutex_);
            --writes_waiting_;
            break;
        }
        case WriteJob::Kind::kRemovals:
            return finish_removals(job);
        case WriteJob::Kind::kObject: {
            std::lock_guard lock(mutex_);
            --writes_waiting_;
            --spaces_[job->space].writes;
            bool wanted = end_writing(*job);
            if (wanted && !job->failed) {
                Entry entry;
                Record shape;
                shape.space = *job->identity;
                shape.name = job->name;
                shape.parent = job->parent;
                shape.size = job->size;
                entry.sequence = job->sequence;
                entry.hash = job->hash;
                entry.size = job->size;
                entry.record_bytes = shape.bytes();
                entry.crc = job->crc;
                entry.data_offset = shape.data_offset();
                entry.space = job->space;
                entry.place = job->place;
                entry.set_text(job->name, job->parent);
                uint32_t old = index_.find(job->hash);
                if (old != kNoEntry) index_.erase(old);
                index_.insert(std::move(entry));
                ++counters_.written;
                counters_.written_bytes += job->size;
            } else {
                // Some of it may stand on the disk.
                push_removal(job->sequence);
                if (outcome == Outcome::kDone) outcome = Outcome::kMiss;
            }
            break;
        }
        case WriteJob::Kind::kCopy: {
            std::lock_guard lock(mutex_);
            uint32_t at = index_.find(job->hash);
            bool wanted = at != kNoEntry && index_.entry(at).sequence == job->sequence &&
                          index_.entry(at).place == job->from;
            if (wanted && !job->failed) {
                index_.move(at, job->place);
                ++counters_.copied;
                counters_.copied_bytes += job->size;
            } else if (!wanted) {
                // Its removal may stand before the copy in the log, and be forgotten before it.
                push_removal(job->sequence);
            }
            break;
        }
    }
    if (job->done) job->done(outcome);
}

// ---- removals, and the tail

// One record at a time: many removals gather while one is on its way.
void Engine::queue_removals() {
    if (removals_in_flight_) return;
    auto job = std::make_shared<WriteJob>();
    job->kind = WriteJob::Kind::kRemovals;
    job->removals.push_back(tail_to_write_);
    {
        std::lock_guard lock(mutex_);
        if (read_only_ || off_ || (removals_.empty() && tail_to_write_ == tail_written_)) return;
        size_t n = std::min<size_t>(removals_.size(), kRemovalsMax - 1);
        auto end = removals_.begin() + static_cast<ptrdiff_t>(n);
        job->removals.insert(job->removals.end(), removals_.begin(), end);
        removals_.erase(removals_.begin(), end);
        job->sequence = options_.sequence->load();
    }
    std::span<const std::byte> data = std::as_bytes(std::span<const uint64_t>(job->removals));
    job->parts.push_back(data);
    job->size = data.size();
    job->crc = crc32c(0, data.data(), data.size());
    removals_in_flight_ = true;
    internal_writes_.push_front(std::move(job));
}

void Engine::finish_removals(const WriteJobPtr& job) {
    removals_in_flight_ = false;
    if (!job->failed) {
        tail_written_ = job->removals.front();
        removals_written_ += job->removals.size() - 1;
        free_drained(tail_written_);
        return;
    }
    std::lock_guard lock(mutex_);
    if (!read_only_) removals_.insert(removals_.begin(), job->removals.begin() + 1, job->removals.end());
}

}  // namespace moonpool::ssd
