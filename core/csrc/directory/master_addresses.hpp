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

    // Of the master that was dialed last, for a process that has the same list and has not dialed: with the
    // names of those that were configured, without those that are not to be believed of a master there.
    MasterList as_configured(const MasterList& list) const {
        MasterList named{.term = list.term, .of_owner = list.of_owner};
        MutexLock lock(mutex_);
        for (const std::string& one : list.addresses) {
            if (KnownMasters::is_believed(one, at_)) named.add(known_.as_configured(one));
        }
        return named;
    }

    // The first that takes the connection, tried one after the other, each once; with `to` but for the
    // address. One that refuses and names the owner is followed by that one, where it is known; else the
    // owner comes last, and kMastersMax of such at most. The one that served last comes last: this is called
    // when its connection is lost. The error is that of a configured one.
    Result<Dialed> dial(DialOptions to) {
        std::optional<Error> why;
        std::vector<std::string> tried, named;
        std::string owner;
        to.instead = &owner;
        const size_t most = size() + kMastersMax;
        for (std::optional<std::string> next = after(tried, named, ""); next && tried.size() < most;) {
            if (to.given_up != nullptr && to.given_up->load()) break;
            to.address = *next;
            tried.push_back(*next);
            owner.clear();
            Result<Dialed> dialed = dial_range(to, range_);
            if (dialed) {
                MutexLock lock(mutex_);
                at_ = to.address;
                if (std::optional<MasterList> list = masters_of(dialed->welcome)) known_.hear(*list, at_);
                begin_behind(at_);
                return dialed;
            }
            if (!why || is_configured(*next)) why = dialed.error();
            if (KnownMasters::is_believed(owner, *next)) named.push_back(owner);
            next = after(tried, named, *next);
        }
        return why.value_or(Error{Code::kInvalidArgument, "no address of a master is given"});
    }

   private:
    bool is_configured(const std::string& address) const {
        MutexLock lock(mutex_);
        return known_.is_configured(address);
    }

    // The next call tries the others first, also where this one was dialed out of turn.
    void begin_behind(const std::string& address) REQUIRES(mutex_) {
        const std::vector<std::string> all = known_.all();
        auto place = std::ranges::find(all, address);
        if (place != all.end()) next_ = static_cast<size_t>(place - all.begin()) + 1;
    }

    // The owner that was named last, by the one at that address, where it is known; else the next one in turn
    // that was not tried, and at the end those that were named.
    std::optional<std::string> after(const std::vector<std::string>& tried,
                                     const std::vector<std::string>& named, const std::string& at) {
        auto is_new = [&](const std::string& one) { return std::ranges::find(tried, one) == tried.end(); };
        MutexLock lock(mutex_);
        if (!named.empty()) known_.hear_of(named.back(), at);
        const std::vector<std::string> all = known_.all();
        if (!named.empty() && std::ranges::find(all, named.back()) != all.end() && is_new(named.back()))
            return named.back();
        for (size_t i = 0; i < all.size(); ++i) {
            const std::string& one = all[next_++ % all.size()];
            if (is_new(one)) return one;
        }
        auto place = std::ranges::find_if(named, is_new);
        return place == named.end() ? std::nullopt : std::optional(*place);
    }

    const Range range_;
    mutable Mutex mutex_;
    KnownMasters known_ GUARDED_BY(mutex_);
    std::string at_ GUARDED_BY(mutex_);  // the last that took a connection
    size_t next_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool
