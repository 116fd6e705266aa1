// MasterAddresses: where the masters of a range are reached, of which one serves at a time: a standby refuses
// the connection until it has taken over. One thread dials; any may tell what a master said of the addresses.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "directory/known_masters.hpp"
#include "directory/range_handshake.hpp"
#include "directory/ranges.hpp"
#include "wire/address.hpp"
#include "wire/dial.hpp"

namespace moonpool {

class MasterAddresses {
   public:
    // "host:port", or several with commas between; all of them masters of that range
    explicit MasterAddresses(const std::string& list, const Range& range = {})
        : range_(range), known_(split_addresses(list)) {}

    size_t size() const {
        MutexLock lock(mutex_);
        return known_.size();
    }
    std::vector<std::string> learned() const {
        MutexLock lock(mutex_);
        return known_.learned();
    }
    // Of the master that was dialed last, which has proved the secret.
    void hear(const MasterList& list) {
        MutexLock lock(mutex_);
        known_.hear(list, at_);
    }
    // Passed on by another process with the secret.
    void hear_by_node(const MasterList& list) {
        MutexLock lock(mutex_);
        known_.hear(list);
    }

    // The first that takes the connection, tried one after the other, each once; with `to` but for the
    // address. One that refuses and names the owner is followed by that one. The one that served last comes
    // last: this is called when its connection is lost.
    Result<Dialed> dial(DialOptions to) {
        Error why{Code::kInvalidArgument, "no address of a master is given"};
        std::vector<std::string> tried;
        std::string owner;
        to.instead = &owner;
        for (std::optional<std::string> next = after({}); next;) {
            if (to.given_up != nullptr && to.given_up->load()) break;
            to.address = *next;
            tried.push_back(*next);
            owner.clear();
            Result<Dialed> dialed = dial_range(to, range_);
            if (dialed) {
                MutexLock lock(mutex_);
                at_ = to.address;
                if (std::optional<MasterList> list = masters_of(dialed->welcome)) known_.hear(*list, at_);
                return dialed;
            }
            why = dialed.error();
            next = after(tried, owner);
        }
        return why;
    }

   private:
    // The owner that was named, else the next one in turn that was not tried.
    std::optional<std::string> after(const std::vector<std::string>& tried, const std::string& owner = "") {
        auto is_new = [&](const std::string& one) { return std::ranges::find(tried, one) == tried.end(); };
        MutexLock lock(mutex_);
        if (!owner.empty()) known_.hear_of(owner);
        const std::vector<std::string> all = known_.all();
        if (std::ranges::find(all, owner) != all.end() && is_new(owner)) return owner;
        for (size_t i = 0; i < all.size(); ++i) {
            const std::string& one = all[next_++ % all.size()];
            if (is_new(one)) return one;
        }
        return std::nullopt;
    }

    const Range range_;
    mutable Mutex mutex_;
    KnownMasters known_ GUARDED_BY(mutex_);
    std::string at_ GUARDED_BY(mutex_);  // the last that took a connection
    size_t next_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool
