#include "transport/file/transport.hpp"

#include "transport/file/link.hpp"

namespace moonpool::transport::file {

namespace {

constexpr uint32_t kDepth = 256;
constexpr uint32_t kRingPerFileMax = 64;
constexpr uint32_t kThreadsPerFileMax = 12;  // of the 16 threads of a queue
constexpr std::chrono::seconds kStop{1};

}  // namespace

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>&, int) {
    Result<std::shared_ptr<Pump>> pump = this->pump();
    if (!pump) return pump.error();
    return std::shared_ptr<transport::Link>(std::make_shared<Link>(std::move(*pump), peer.file, counters_));
}

Result<std::shared_ptr<Pump>> Transport::pump() {
    MutexLock lock(mutex_);
    if (pump_ != nullptr) return pump_;
    Result<std::unique_ptr<io::Queue>> queue = Error{Code::kUnavailable, "io_uring was not asked for"};
    uint32_t per_file_max = kRingPerFileMax;
    if (io_ != "threads") queue = io::ring_queue(kDepth);
    if (!queue && io_ != "io_uring") {
        queue = io::thread_queue(kDepth);
        per_file_max = kThreadsPerFileMax;
    }
    if (!queue) return queue.error();
    Result<std::shared_ptr<Pump>> started = Pump::start(std::move(*queue), per_file_max);
    if (!started) return started.error();
    pump_ = std::move(*started);
    return pump_;
}

void Transport::close() {
    std::shared_ptr<Pump> pump;
    {
        MutexLock lock(mutex_);
        pump = pump_;
    }
    if (pump != nullptr) pump->stop(std::chrono::steady_clock::now() + kStop);
}

}  // namespace moonpool::transport::file
