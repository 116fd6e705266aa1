// KnownMasters: the addresses at which a process looks for the masters of one range: those that were
// configured, always, and those that masters have told it since. Pure.
//
// An owner's list with a standby is the whole truth where it is of the latest term: what was learned and it
// does not name is forgotten. A list without a standby only adds: the one that an owner has just lost may be
// the next owner, and an owner that has just taken over has none yet, so that any master of the former list
// may follow it. A list of an earlier term only adds, as the clock of an owner that was started again may be
// behind. What a list has dropped does not come back by the word of a master that refuses, unless no master
// answers.
//
// What a master that was reached at a configured address calls itself is another name of that one, and not
// learned. An address of the own host is believed only of a master that was reached there.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "directory/master_list.hpp"

namespace moonpool {

class KnownMasters {
   public:
    explicit KnownMasters(std::vector<std::string> configured) : configured_(std::move(configured)) {}

    // at: where the master that says it was reached. True: learned() has changed.
    bool hear(const MasterList& list, const std::string& at = "") {
        const std::vector<std::string> before = learned_;
        if (list.own != 0) note_name(at, list.own_address());
        if (list.term < term_ && !list.of_owner) return learned_ != before;
        if (list.of_owner && list.term >= term_) {
            term_ = list.term;
            if (list.addresses.size() > 1)
                std::erase_if(learned_, [&](const std::string& one) { return !has(list.addresses, one); });
        }
        for (const std::string& address : list.addresses) add(address, list.addresses, at);
        return learned_ != before;
    }

    // The master there does not serve, and names the one that does. True: as above.
    bool hear_of(const std::string& owner, const std::string& at, bool none_answers = false) {
        return (term_ == kNoVersion || none_answers) && add(owner, {owner}, at);
    }
    // Whether a process may dial what the master there names.
    static bool is_believed(const std::string& address, const std::string& at) {
        return is_master_address(address) && (at.empty() || !is_loopback(address) || is_loopback(at));
    }
    // As the list has it that was configured, where the master is known under both names.
    std::string as_configured(const std::string& name) const {
        auto place = std::ranges::find(names_, name);
        return place == names_.end() ? name : configured_[static_cast<size_t>(place - names_.begin())];
    }

    bool is_configured(const std::string& address) const { return has(configured_, address); }
    bool knows(const std::string& address) const {
        return has(configured_, address) || has(learned_, address) || has(names_, address);
    }
    const std::vector<std::string>& configured() const { return configured_; }
    const std::vector<std::string>& learned() const { return learned_; }
    size_t size() const { return configured_.size() + learned_.size(); }
    std::vector<std::string> all() const {
        std::vector<std::string> both = configured_;
        both.insert(both.end(), learned_.begin(), learned_.end());
        return both;
    }

   private:
    void note_name(const std::string& at, const std::string& name) {
        auto place = std::ranges::find(configured_, at);
        if (place == configured_.end()) return;
        names_.resize(configured_.size());
        const bool is_listed = has(configured_, name);
        names_[static_cast<size_t>(place - configured_.begin())] = is_listed ? "" : name;
        if (is_listed) return;
        std::erase(learned_, name);
    }
    static bool has(const std::vector<std::string>& list, const std::string& one) {
        return std::ranges::find(list, one) != list.end();
    }
    // In the place of the oldest that is not named now, where there are kMastersMax.
    bool add(const std::string& address, const std::vector<std::string>& named, const std::string& at) {
        if (knows(address) || !is_believed(address, at)) return false;
        if (learned_.size() == kMastersMax) {
            auto oldest = std::ranges::find_if(learned_, [&](const auto& one) { return !has(named, one); });
            if (oldest == learned_.end()) return false;
            learned_.erase(oldest);
        }
        learned_.push_back(address);
        return true;
    }

    std::vector<std::string> configured_;
    std::vector<std::string> names_;    // what the masters at these call themselves; empty: not known
    std::vector<std::string> learned_;  // the latest last
    Version term_ = kNoVersion;         // the latest of an owner's list
};

}  // namespace moonpool
