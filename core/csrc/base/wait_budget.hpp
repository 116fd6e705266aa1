// WaitBudget: how long one call of a user waits, all in all, for peers that say nothing. A call may ask one
// peer after the other, its own node, the master, the holders of a key: each wait that ends for nothing
// leaves less for the next one. Time in which bytes move is no wait. Of the thread; a call inside of a call
// shares what is left.
#pragma once

#include <algorithm>
#include <chrono>

namespace moonpool {

class WaitBudget {
   public:
    // One peer may take so much of a call's time: what is left is for the others.
    static int of_one_peer(int timeout_ms) { return timeout_ms * 3 / 4; }
    // Of the whole call: it ends before its caller's own clock says that it is late.
    static int of_a_call(int timeout_ms) { return timeout_ms - timeout_ms / 20; }

    explicit WaitBudget(int ms)
        : outer_(current_), begun_(outer_ == nullptr ? ms : std::min(ms, outer_->left_)) {
        left_ = begun_;
        current_ = this;
    }
    ~WaitBudget() {
        current_ = outer_;
        if (outer_ != nullptr) outer_->left_ -= begun_ - left_;
    }
    WaitBudget(const WaitBudget&) = delete;

    // The longest that a wait may take now, 0 or less: none. Outside of any call it is what was asked for.
    static int within(int timeout_ms) {
        return current_ == nullptr ? timeout_ms : std::min(timeout_ms, current_->left_);
    }
    static void spent(int ms) {
        if (current_ != nullptr) current_->left_ -= ms;
    }
    static void spent_since(std::chrono::steady_clock::time_point since) {
        auto took = std::chrono::steady_clock::now() - since;
        spent(static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(took).count()));
    }

   private:
    WaitBudget* outer_;
    int begun_;
    int left_ = 0;
    static inline thread_local WaitBudget* current_ = nullptr;
};

}  // namespace moonpool
