#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "ssd/io_queue.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint32_t kThreadsMax = 16;

class ThreadQueue : public IoQueue {
   public:
    ThreadQueue(File& file, uint32_t depth) : file_(file), depth_(depth) {
        for (uint32_t i = 0; i < std::min(depth, kThreadsMax); ++i) threads_.emplace_back([this] { run(); });
    }

    ~ThreadQueue() override {
        {
            std::lock_guard lock(mutex_);
            closing_ = true;
        }
        work_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    void submit(const IoOperation& operation) override {
        {
            std::lock_guard lock(mutex_);
            waiting_.push_back(operation);
        }
        work_.notify_one();
    }

    void reap(std::vector<IoDone>& done, int wait_ms) override {
        std::unique_lock lock(mutex_);
        if (wait_ms != 0) {
            ended_.wait_for(lock, std::chrono::milliseconds(wait_ms),
                            [&] { return awake_ || !done_.empty(); });
        }
        awake_ = false;
        done.insert(done.end(), done_.begin(), done_.end());
        done_.clear();
    }

    void wake() override {
        {
            std::lock_guard lock(mutex_);
            awake_ = true;
        }
        ended_.notify_one();
    }

    uint32_t depth() const override { return depth_; }
    const char* name() const override { return "threads"; }

   private:
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            work_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            IoOperation operation = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            int error = perform(operation);
            lock.lock();
            done_.push_back(IoDone{operation.tag, error});
            ended_.notify_one();
        }
    }

    int perform(const IoOperation& operation) {
        switch (operation.kind) {
            case IoOperation::Kind::kRead:
                return file_.read(operation.offset, operation.data, operation.bytes);
            case IoOperation::Kind::kWrite:
                return file_.write(operation.offset, operation.data, operation.bytes);
            case IoOperation::Kind::kSync:
                return file_.sync();
        }
        return EINVAL;
    }

    File& file_;
    uint32_t depth_;
    std::mutex mutex_;
    std::condition_variable work_, ended_;
    std::deque<IoOperation> waiting_;
    std::vector<IoDone> done_;
    bool awake_ = false, closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> thread_queue(File& file, uint32_t depth) {
    return std::make_unique<ThreadQueue>(file, depth);
}

}  // namespace moonpool::ssd
