#include "device/card_copiers.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace moonpool::device {

Result<std::shared_ptr<CardCopier>> CardCopiers::at(int ordinal) {
    MutexLock lock(mutex_);
    auto known = copiers_.find(ordinal);
    if (known != copiers_.end()) return known->second;
    Result<std::shared_ptr<CardCopier>> opened = CardCopier::open(ordinal);
    if (opened) copiers_.emplace(ordinal, *opened);
    return opened;
}

bool CardCopiers::has_abandoned() {
    std::vector<std::shared_ptr<CardCopier>> all;  // asked without the lock
    {
        MutexLock lock(mutex_);
        for (const auto& [ordinal, copier] : copiers_) all.push_back(copier);
    }
    return std::ranges::any_of(all, [](const auto& copier) { return copier->collect(); });
}

void CardCopiers::clear() {
    std::map<int, std::shared_ptr<CardCopier>> gone;  // ends outside of the lock
    MutexLock lock(mutex_);
    gone = std::move(copiers_);
    copiers_.clear();
}

}  // namespace moonpool::device
