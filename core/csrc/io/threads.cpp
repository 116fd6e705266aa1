#include <algorithm>
#include <chrono>
#include <deque>
#include <system_error>
#include <thread>

#include "base/mutex.hpp"
#include "io/queue.hpp"

namespace moonpool::io {

namespace {

constexpr uint32_t kThreadsMax = 16;

class Threads : public Queue {
   public:
    explicit Threads(uint32_t depth) : depth_(depth) {}

    // As many as the system has, at least one.
    Status start() {
        for (uint32_t i = 0; i < std::min(depth_, kThreadsMax); ++i) {
            try {
                threads_.emplace_back([this] { run(); });
            } catch (const std::system_error& error) {
                if (threads_.empty()) return os_error("starting a thread for I/O", error.code().value());
                break;
            }
        }
        return success();
    }

    ~Threads() override {
        {
            MutexLock lock(mutex_);
            closing_ = true;
        }
        work_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    void submit(const Operation& operation) override {
        {
            MutexLock lock(mutex_);
            waiting_.push_back(operation);
        }
        work_.notify_one();
    }

    void reap(std::vector<Done>& done, int wait_ms) override {
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
            Operation operation = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            Done done = perform(operation);
            lock.lock();
            done_.push_back(done);
            ended_.notify_one();
        }
    }

    static Done perform(const Operation& operation) {
        File& file = *operation.file;
        switch (operation.kind) {
            case Operation::Kind::kRead: {
                ReadResult read = file.read(operation.offset, operation.data, operation.bytes);
                return {operation.tag, read.error, static_cast<uint32_t>(read.bytes)};
            }
            case Operation::Kind::kWrite:
                return {operation.tag, file.write(operation.offset, operation.data, operation.bytes), 0};
            case Operation::Kind::kSync:
                return {operation.tag, file.sync(), 0};
        }
        return {operation.tag, EINVAL, 0};
    }

    uint32_t depth_;
    Mutex mutex_;
    CondVar work_, ended_;
    std::deque<Operation> waiting_ GUARDED_BY(mutex_);
    std::vector<Done> done_ GUARDED_BY(mutex_);
    bool awake_ GUARDED_BY(mutex_) = false;
    bool closing_ GUARDED_BY(mutex_) = false;
    std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<Queue>> thread_queue(uint32_t depth) {
    auto threads = std::make_unique<Threads>(depth);
    if (Status started = threads->start(); !started) return started.error();
    return std::unique_ptr<Queue>(std::move(threads));
}

}  // namespace moonpool::io
