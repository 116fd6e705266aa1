#include "base/journal.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace moonpool {

namespace {

constexpr size_t kTextBytesMax = 1024;  // a peer's words may be part of it

}  // namespace

Journal::Journal() : wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void Journal::note(Level level, const char* kind, std::string peer, std::string text) {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    double now_s = std::chrono::duration<double>(now).count();
    if (text.size() > kTextBytesMax) text.resize(kTextBytesMax);
    MutexLock lock(mutex_);
    Budget& budget = budgets_[kind];
    budget.tokens = std::min<double>(kBurst, budget.tokens + (now_s - budget.filled_s));
    budget.filled_s = now_s;
    if (budget.tokens < 1 || notes_.size() >= kNotesMax) {
        ++budget.left_out;
        ++left_out_total_;
        return;
    }
    budget.tokens -= 1;
    notes_.push_back(Note{level, kind, std::move(peer), std::move(text), std::exchange(budget.left_out, 0)});
    uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
}

std::vector<Note> Journal::take() {
    uint64_t value;
    (void)!::read(wake_.get(), &value, sizeof(value));
    MutexLock lock(mutex_);
    return std::exchange(notes_, {});
}

uint64_t Journal::left_out_total() const {
    MutexLock lock(mutex_);
    return left_out_total_;
}

}  // namespace moonpool
