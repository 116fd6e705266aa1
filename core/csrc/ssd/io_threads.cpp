#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

#include "base/mutex.hpp"
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
            MutexLock lock(mutex_);
            closing_ = true;
        }
        work_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    void submit(const IoOperation& operation) override {
        {
            MutexLock lock(mutex_);
            waiting_.push_back(operation);
        }
        work_.notify_one();
    }

    void reap(std::vector<IoDone>& done, int wait_ms) override {
        MutexLock lock(mutex_);
        if (wait_ms != 0) {
            ended_.wait_for(lock, std::chrono::milliseconds(wait_ms),
                            [&]() REQUIRES(mutex_) { return awake_ || !done_.empty(); });
        }
        awake_ = false;
        done.insert(done.end(), done_.begin(), done_.end());
        done_.clear();
    }

    void wake() override {
        {
            MutexLock lock(mutex_);
            awake_ = true;
        }
        ended_.notify_one();
    }

    uint32_t depth() const override { return depth_; }
    const char* name() const override { return "threads"; }

   private:
    void run() {
        MutexLock lock(mutex_);
        for (;;) {
            work_.wait(lock, [&]() REQUIRES(mutex_) { return closing_ || !waiting_.empty(); });
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
    Mutex mutex_;
    CondVar work_, ended_;
    std::deque<IoOperation> waiting_ GUARDED_BY(mutex_);
    std::vector<IoDone> done_ GUARDED_BY(mutex_);
    bool awake_ GUARDED_BY(mutex_) = false;
    bool closing_ GUARDED_BY(mutex_) = false;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> thread_queue(File& file, uint32_t depth) {
    return std::make_unique<ThreadQueue>(file, depth);
}

}  // namespace moonpool::ssd
