// TokenizeQueue: first questions about requests whose prompt is text. The threads that tokenise take them,
// and then decide; so the relay's thread, which all sockets wait for, does not wait for the GIL while those
// threads hold it. From any thread.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>

#include "base/mutex.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

class TokenizeQueue {
   public:
    // A larger body takes too long to tokenise, and to copy before that; dispatcher.py has the same bound.
    static constexpr size_t kBodyBytesMax = 4 << 20;

    // waiting_max: of requests; 0: take() refuses all.
    explicit TokenizeQueue(size_t waiting_max) : waiting_max_(waiting_max) {}

    // True: the question is in the queue. False: the caller decides it at once, since it is not the first
    // about its request, its prompt is no text, its body is too large, or the queue is full or closed. now:
    // of the relay's clock, s.
    bool take(const Question& question, double now) {
        if (waiting_max_ == 0 || question.page || question.attempt > 0) return false;
        if (question.request->body.size() > kBodyBytesMax || !question.request->has_text()) return false;
        {
            MutexLock lock(mutex_);
            if (closed_ || waiting_.size() >= waiting_max_) return false;
            waiting_.push_back({question, now});
        }
        some_.notify_one();
        return true;
    }

    // The oldest question; waits for one. nullopt: closed.
    std::optional<Question> next() {
        MutexLock lock(mutex_);
        some_.wait(lock, [&]() REQUIRES(mutex_) { return closed_ || !waiting_.empty(); });
        if (closed_) return std::nullopt;
        return first();
    }

    // The oldest question; nullopt: there is none now.
    std::optional<Question> poll() {
        MutexLock lock(mutex_);
        if (waiting_.empty()) return std::nullopt;
        return first();
    }

    // The oldest question, if it was queued before this time, s of the relay's clock.
    std::optional<Question> overdue(double since) {
        MutexLock lock(mutex_);
        if (waiting_.empty() || waiting_.front().since >= since) return std::nullopt;
        return first();
    }

    void close() {
        {
            MutexLock lock(mutex_);
            closed_ = true;
            waiting_.clear();
        }
        some_.notify_all();
    }

   private:
    struct Waiting {
        Question question;
        double since = 0;
    };

    Question first() REQUIRES(mutex_) {
        Question question = std::move(waiting_.front().question);
        waiting_.pop_front();
        return question;
    }

    const size_t waiting_max_;
    Mutex mutex_;
    CondVar some_;
    std::deque<Waiting> waiting_ GUARDED_BY(mutex_);
    bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace moonpool::relay
