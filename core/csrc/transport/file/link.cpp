#include "transport/file/link.hpp"

#include <optional>

namespace moonpool::transport::file {

bool Link::reaches(MemoryKind kind, std::string* why) const {
    if (kind == MemoryKind::kFile) return true;
    if (why != nullptr) *why = "it moves the bytes of files only";
    return false;
}

Status Link::run(Job& job) {
    // The pump ends every job, at its deadline at the latest.
    struct Waiter {
        Mutex mutex;
        CondVar ended;
        std::optional<Status> status GUARDED_BY(mutex);
    };
    auto waiter = std::make_shared<Waiter>();
    pump_->post(std::shared_ptr<Job>(&job, [](Job*) {}), served_,
                [waiter](const std::shared_ptr<Job>&, Status status) {
                    MutexLock lock(waiter->mutex);
                    waiter->status = std::move(status);
                    waiter->ended.notify_all();
                });
    MutexLock lock(waiter->mutex);
    waiter->ended.wait(lock, [&]() REQUIRES(waiter->mutex) { return waiter->status.has_value(); });
    return std::move(*waiter->status);
}

}  // namespace moonpool::transport::file
