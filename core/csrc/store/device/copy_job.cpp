#include "store/device/copy_job.hpp"

#include <utility>

namespace moonpool {

Chunk::Chunk(std::shared_ptr<CopyJob> job, uint32_t begin, uint32_t end)
    : job_(std::move(job)), begin_(begin), end_(end) {
    MutexLock lock(job_->mutex_);
    ++job_->chunks_;
}

Chunk::~Chunk() {
    if (job_ == nullptr) return;
    {
        MutexLock lock(job_->mutex_);
        if (--job_->chunks_ != 0) return;
        job_->none_left_.notify_all();
    }
    job_->over();
}

void CopyJob::wait_for_all() {
    MutexLock lock(mutex_);
    none_left_.wait(lock, [&]() REQUIRES(mutex_) { return chunks_ == 0; });
}

}  // namespace moonpool
