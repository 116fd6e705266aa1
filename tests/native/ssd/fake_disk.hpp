// A disk for tests, in memory: it can lose or tear what was not synced, fail, fill up, be slow, stand still,
// and flip bits. The file on it outlives the log that has it open.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "../random.hpp"
#include "ssd/file.hpp"

namespace moonpool::ssd::testing {

class FakeDisk : public std::enable_shared_from_this<FakeDisk> {
   public:
    std::vector<std::byte> image;  // what a read gives; look at it only while no log is open
    uint64_t capacity = UINT64_MAX;
    uint64_t syncs = 0, read_bytes = 0;
    bool last_write = false;     // set by a fault: this one is stored, then the disk is dead
    bool stores_failed = false;  // set by a fault: the write that it fails is stored all the same
    // 0, or the errno of this read or write. Called under a lock.
    using Fault = std::function<int(bool write, uint64_t offset, size_t bytes)>;
    void fail(Fault fault) {
        std::lock_guard lock(mutex_);
        fault_ = std::move(fault);
    }

    OpenFile opener() {
        return [disk = shared_from_this()](const std::string&) -> Result<std::unique_ptr<File>> {
            return std::unique_ptr<File>(new FakeFile(disk));
        };
    }

    // Another disk with the same content, all of it synced; no log may be open.
    std::shared_ptr<FakeDisk> clone() {
        std::lock_guard lock(mutex_);
        auto disk = std::make_shared<FakeDisk>();
        disk->image = disk->durable_ = image;
        return disk;
    }

    bool dead() {
        std::lock_guard lock(mutex_);
        return dead_;
    }

    // At the nth write from now on, which may be on the disk or not.
    void die(uint64_t nth = 1) {
        std::lock_guard lock(mutex_);
        dies_at_write_ = writes_ + nth;
    }

    // From now on, without a last write.
    void kill() {
        {
            std::lock_guard lock(mutex_);
            dead_ = true;
        }
        released_.notify_all();
    }

    // The power is gone and back: of what was not synced only the writes there are that `stays` says.
    void crash(const std::function<bool(uint64_t offset)>& stays) {
        std::lock_guard lock(mutex_);
        for (const Unsynced& write : unsynced_) {
            if (!stays(write.offset)) continue;
            std::copy(write.bytes.begin(), write.bytes.end(),
                      durable_.begin() + static_cast<ptrdiff_t>(write.offset));
        }
        come_back();
    }

    // Each unsynced write is there, or not, or a part of it.
    void crash(moonpool::testing::Random& random) {
        std::lock_guard lock(mutex_);
        for (const Unsynced& write : unsynced_) {
            uint64_t fate = random.below(4);
            if (fate == 0) continue;
            constexpr uint64_t kSector = 512;
            for (uint64_t at = 0; at < write.bytes.size(); at += kSector) {
                if (fate == 1 && random.one_in(2)) continue;
                std::memcpy(durable_.data() + write.offset + at, write.bytes.data() + at, kSector);
            }
        }
        come_back();
    }

    // Some writes and syncs take up to a millisecond, so that others overtake them.
    void slow(uint64_t seed) {
        std::lock_guard lock(mutex_);
        slow_.emplace(seed);
    }

    // Writes, or reads, end only after release(): a disk that stands still.
    void hold(bool reads = false) {
        std::lock_guard lock(mutex_);
        (reads ? reads_held_ : held_) = true;
    }
    // The write at that offset alone.
    void hold_write(uint64_t offset) {
        std::lock_guard lock(mutex_);
        held_offset_ = offset;
    }
    void release() {
        {
            std::lock_guard lock(mutex_);
            held_ = reads_held_ = false;
            held_offset_ = UINT64_MAX;
        }
        released_.notify_all();
    }

    // A sync waits until this says true, asked after each write. Called under a lock.
    void hold_syncs(std::function<bool()> may_sync) {
        std::lock_guard lock(mutex_);
        may_sync_ = std::move(may_sync);
    }

    // The nth sync that is begun on this disk, from 1 on, ends only after release_sync(n).
    void hold_sync(uint64_t n) {
        std::lock_guard lock(mutex_);
        held_syncs_.insert(n);
    }
    void release_sync(uint64_t n) {
        {
            std::lock_guard lock(mutex_);
            held_syncs_.erase(n);
        }
        released_.notify_all();
    }
    uint64_t syncs_begun() {
        std::lock_guard lock(mutex_);
        return syncs_begun_;
    }

    uint64_t waiting() {  // writes that are held
        std::lock_guard lock(mutex_);
        return held_ ? waiting_ : 0;
    }

   private:
    struct Unsynced {
        uint64_t offset;
        std::vector<std::byte> bytes;
    };

    class FakeFile : public File {
       public:
        explicit FakeFile(std::shared_ptr<FakeDisk> disk) : disk_(std::move(disk)) {
            std::lock_guard lock(disk_->mutex_);
            size_ = disk_->image.size();
        }
        ~FakeFile() override {
            std::lock_guard lock(disk_->mutex_);
            if (locked_) disk_->locked_ = false;
        }
        io::ReadResult read(uint64_t offset, std::byte* to, size_t bytes) override {
            std::unique_lock lock(disk_->mutex_);
            disk_->released_.wait(lock, [&] { return !disk_->reads_held_; });
            if (disk_->dead_) return {EIO};
            if (int error = disk_->fault_ ? disk_->fault_(false, offset, bytes) : 0) return {error};
            if (offset + bytes > disk_->image.size()) return {EIO};
            std::memcpy(to, disk_->image.data() + offset, bytes);
            disk_->read_bytes += bytes;
            return {0, bytes};
        }
        int write(uint64_t offset, const std::byte* from, size_t bytes) override {
            std::unique_lock lock(disk_->mutex_);
            disk_->dawdle(lock);
            ++disk_->waiting_;
            disk_->released_.wait(lock, [&] { return !disk_->held_ && offset != disk_->held_offset_; });
            --disk_->waiting_;
            if (disk_->dead_) return EIO;
            int failure = disk_->fault_ ? disk_->fault_(true, offset, bytes) : 0;
            if (failure != 0 && !disk_->stores_failed) return failure;
            if (offset + bytes > disk_->capacity) return ENOSPC;
            if (++disk_->writes_ >= disk_->dies_at_write_ || disk_->last_write) disk_->dead_ = true;
            disk_->grow(offset + bytes);
            std::memcpy(disk_->image.data() + offset, from, bytes);
            disk_->unsynced_.push_back(Unsynced{offset, {from, from + bytes}});
            disk_->released_.notify_all();
            return disk_->dead_ ? EIO : failure;
        }
        int sync() override {
            std::unique_lock lock(disk_->mutex_);
            disk_->dawdle(lock);
            uint64_t n = ++disk_->syncs_begun_;
            disk_->released_.wait(lock, [&] {
                if (disk_->dead_) return true;
                return !disk_->held_syncs_.contains(n) && (!disk_->may_sync_ || disk_->may_sync_());
            });
            if (disk_->dead_) return EIO;
            for (const Unsynced& write : disk_->unsynced_) {
                std::memcpy(disk_->durable_.data() + write.offset, write.bytes.data(), write.bytes.size());
            }
            disk_->unsynced_.clear();
            ++disk_->syncs;
            return 0;
        }
        int reserve(uint64_t bytes) override {
            std::lock_guard lock(disk_->mutex_);
            if (bytes > disk_->capacity) return ENOSPC;
            disk_->grow(bytes);
            return 0;
        }
        int lock() override {
            std::lock_guard lock(disk_->mutex_);
            if (disk_->locked_) return EWOULDBLOCK;
            return locked_ = disk_->locked_ = true, 0;
        }
        uint64_t size() const override { return size_; }

       private:
        std::shared_ptr<FakeDisk> disk_;
        uint64_t size_ = 0;
        bool locked_ = false;
    };

    void come_back() {
        image = durable_;
        unsynced_.clear();
        dead_ = last_write = false;
        dies_at_write_ = UINT64_MAX;
        writes_ = 0;
    }

    void dawdle(std::unique_lock<std::mutex>& lock) {
        if (!slow_ || (*slow_)() % 4 != 0) return;
        released_.wait_for(lock, std::chrono::microseconds((*slow_)() % 1000), [&] { return dead_; });
    }

    void grow(uint64_t bytes) {
        if (image.size() < bytes) image.resize(bytes);
        if (durable_.size() < image.size()) durable_.resize(image.size());
    }

    std::mutex mutex_;
    std::condition_variable released_;
    std::vector<std::byte> durable_;
    std::vector<Unsynced> unsynced_;
    Fault fault_;
    std::function<bool()> may_sync_;
    std::optional<std::mt19937> slow_;
    std::set<uint64_t> held_syncs_;
    uint64_t syncs_begun_ = 0, held_offset_ = UINT64_MAX;
    uint64_t waiting_ = 0, writes_ = 0, dies_at_write_ = UINT64_MAX;
    bool dead_ = false, held_ = false, reads_held_ = false, locked_ = false;
};

inline std::shared_ptr<FakeDisk> fake_disk() { return std::make_shared<FakeDisk>(); }

}  // namespace moonpool::ssd::testing
