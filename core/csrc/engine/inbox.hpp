// Inbox: notifications that came and were not fetched, in their order. Bounded: a full one refuses, and the
// sender is told.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"

namespace moonpool::engine {

class Inbox {
   public:
    Inbox(size_t messages_max, size_t bytes_max) : messages_max_(messages_max), bytes_max_(bytes_max) {}

    Status put(const std::string& peer, std::string message) {
        MutexLock lock(mutex_);
        if (messages_.size() >= messages_max_ || bytes_ + message.size() > bytes_max_) {
            return Error{Code::kTooLarge, "the peer's inbox is full (" + std::to_string(messages_.size()) +
                                              " messages, " + std::to_string(bytes_) +
                                              " bytes); it has to fetch its notifications"};
        }
        bytes_ += message.size();
        messages_.emplace_back(peer, std::move(message));
        return success();
    }
    std::vector<std::pair<std::string, std::string>> take() {
        MutexLock lock(mutex_);
        std::vector<std::pair<std::string, std::string>> all(std::make_move_iterator(messages_.begin()),
                                                             std::make_move_iterator(messages_.end()));
        messages_.clear();
        bytes_ = 0;
        return all;
    }
    size_t size() {
        MutexLock lock(mutex_);
        return messages_.size();
    }

   private:
    Mutex mutex_;
    std::deque<std::pair<std::string, std::string>> messages_ GUARDED_BY(mutex_);
    size_t bytes_ GUARDED_BY(mutex_) = 0;
    size_t messages_max_, bytes_max_;
};

}  // namespace moonpool::engine
