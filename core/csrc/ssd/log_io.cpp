#include "ssd/log_io.hpp"

#include <cstdlib>
#include <cstring>

namespace moonpool::ssd {

std::shared_ptr<std::byte> shared_block(uint64_t bytes) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, round_up_to_block(bytes)));
    std::memset(memory, 0, bytes);
    return {memory, [](std::byte* p) { std::free(p); }};
}

Status LogIo::open_queue() {
    const LogOptions& options = log_.options;
    uint32_t depth = 2 * options.depth + 8;  // reads, writes, and what goes with segments
    if (options.stepping) {
        queue_ = options.stepping->queue();
        return success();
    }
    if (options.io != "threads") {
        Result<std::unique_ptr<io::Queue>> ring = Error{Code::kUnavailable, "this file has no descriptor"};
        if (file_->fd() >= 0) ring = io::ring_queue(depth);
        if (ring) {
            queue_ = std::move(*ring);
        } else if (options.io == "io_uring") {
            return Error{Code::kUnavailable, ring.error().text + "; use io = threads or auto"};
        } else {
            queue_reason_ = ring.error().text;
        }
    }
    if (queue_) return success();
    Result<std::unique_ptr<io::Queue>> threads = io::thread_queue(depth);
    if (!threads) return threads.error();
    queue_ = std::move(*threads);
    return success();
}

void LogIo::reap(int wait_ms) {
    done_.clear();
    queue_->reap(done_, wait_ms);
    for (const io::Done& done : std::exchange(done_, {})) {
        auto it = in_flight_.find(done.tag);
        if (it == in_flight_.end()) continue;
        Ended then = std::move(it->second);
        in_flight_.erase(it);
        writes_in_flight_.erase(done.tag);
        then(done.error);
    }
}

void LogIo::submit(io::Operation::Kind kind, uint64_t offset, std::byte* data, uint64_t bytes, Ended done) {
    uint64_t tag = next_tag_++;
    in_flight_.emplace(tag, std::move(done));
    if (kind == io::Operation::Kind::kWrite) {
        writes_in_flight_.insert(writes_in_flight_.end(), tag);
        last_write_tag_ = tag;
        dirty_ = true;
    }
    queue_->submit(io::Operation{kind, file_.get(), offset, data, static_cast<uint32_t>(bytes), tag});
}

void LogIo::write_block(uint64_t offset, std::shared_ptr<std::byte> memory, uint64_t bytes, Ended done) {
    std::byte* data = memory.get();
    submit(io::Operation::Kind::kWrite, offset, data, bytes,
           [memory, done = std::move(done)](int error) { done(error); });
}

void LogIo::after_writes(std::function<void()> run) {
    barriers_.push_back(Barrier{last_write_tag_, std::move(run)});
}

void LogIo::step_barriers() {
    for (size_t i = 0; i < barriers_.size();) {
        bool passed = writes_in_flight_.empty() || *writes_in_flight_.begin() > barriers_[i].after;
        if (!passed) {
            ++i;
            continue;
        }
        std::function<void()> run = std::move(barriers_[i].run);
        barriers_.erase(barriers_.begin() + static_cast<ptrdiff_t>(i));
        run();
    }
}

void LogIo::sync_file(Ended done) {
    submit(io::Operation::Kind::kSync, 0, nullptr, 0, [this, done = std::move(done)](int error) {
        {
            MutexLock lock(log_.mutex);
            ++log_.counters.syncs;
        }
        if (error != 0) {
            log_.stop_writing("syncing " + log_.options.directory + " failed: " + std::strerror(error));
        }
        done(error);
    });
}

void LogIo::sync_when_due() {
    if (!dirty_ || sync_in_flight_ || time_ms() - synced_ms_ < log_.options.sync_ms) return;
    dirty_ = false;
    sync_in_flight_ = true;
    after_writes([this] {
        sync_file([this](int) {
            sync_in_flight_ = false;
            synced_ms_ = time_ms();
        });
    });
}

}  // namespace moonpool::ssd
