#include "relay/examiner.hpp"

#include <pthread.h>

#include <utility>

namespace moonpool::relay {

void Examiner::add(std::shared_ptr<Request> request, bool form, Then then) {
    put({std::move(request), form, std::move(then), {}});
}

void Examiner::free(std::string body) { put({nullptr, false, nullptr, std::move(body)}); }

void Examiner::put(Job job) {
    {
        MutexLock lock(mutex_);
        if (closed_) return;
        jobs_.push_back(std::move(job));
    }
    some_.notify_one();
    if (thread_.joinable()) return;
    thread_ = std::thread([this] { run(); });
    ::pthread_setname_np(thread_.native_handle(), "moonpool-bodies");
}

void Examiner::close() {
    {
        MutexLock lock(mutex_);
        closed_ = true;
        jobs_.clear();
    }
    some_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Examiner::run() {
    for (;;) {
        Job job;
        {
            MutexLock lock(mutex_);
            some_.wait(lock, [this]() REQUIRES(mutex_) { return closed_ || !jobs_.empty(); });
            if (closed_) return;
            job = std::move(jobs_.front());
            jobs_.pop_front();
        }
        if (job.request == nullptr) continue;
        Refusal refusal;
        if (!job.request->gone) refusal = job.request->examine(limits_, job.form);
        job.then(std::move(job.request), std::move(refusal));
    }
}

}  // namespace moonpool::relay
