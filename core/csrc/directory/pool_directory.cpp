#include "directory/pool_directory.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace moonpool {

namespace {

std::vector<std::unique_ptr<DirectoryClient>> clients_of(const DirectoryClientOptions& options) {
    std::vector<std::string> masters = split_ranges(options.master);
    if (masters.size() <= 1) masters = {options.master};
    if (masters.size() > kRangesMax) masters.resize(kRangesMax);  // a node refuses such a list
    std::vector<std::unique_ptr<DirectoryClient>> clients;
    for (uint32_t index = 0; index < masters.size(); ++index) {
        DirectoryClientOptions to = options;
        to.master = masters[index];
        to.range = Range{index, static_cast<uint32_t>(masters.size())};
        clients.push_back(std::make_unique<DirectoryClient>(std::move(to)));
    }
    return clients;
}

std::vector<Hash128> some_of(std::span<const Hash128> hashes, std::span<const size_t> which) {
    std::vector<Hash128> some;
    some.reserve(which.size());
    for (size_t i : which) some.push_back(hashes[i]);
    return some;
}

}  // namespace

PoolDirectory::PoolDirectory(const DirectoryClientOptions& options)
    : master_(options.master), clients_(clients_of(options)), views_(ranges()) {}

// Whether a call goes to the first client as it is: there is one range, or a forked process, which is told
// so. Else all masters are dialed by the first call, so that one that does not answer costs one wait.
bool PoolDirectory::is_one() {
    if (ranges() == 1 || fork_.in_child()) return true;
    std::call_once(dialing_, [this] {
        for (auto& client : clients_) client->begin_to_dial();
    });
    return false;
}

std::vector<std::vector<size_t>> PoolDirectory::by_range(std::span<const Hash128> hashes) const {
    std::vector<std::vector<size_t>> groups(ranges());
    for (size_t i = 0; i < hashes.size(); ++i) groups[range_of(hashes[i], ranges())].push_back(i);
    if (ranges() > 1) std::erase_if(groups, [](const auto& group) { return group.empty(); });
    return groups;
}

void PoolDirectory::hear(uint32_t range, const std::shared_ptr<const Members>& list) {
    MutexLock lock(mutex_);
    views_.hear(range, list, of(range).connected());
}

// Holders as the list of their range's answer numbers them.
void PoolDirectory::translate(std::span<const Holder> holders, const Members& list, Located& out) {
    MutexLock lock(mutex_);
    for (const Holder& holder : holders) {
        const Member* member = list.find(holder.node);
        if (member == nullptr) continue;
        if (auto number = views_.number(member->identity.incarnation)) out.append({*number, holder.tier});
    }
}

// Asks the masters of those ranges, in their order: each while the answers of those before are on their way.
// So a call waits as long as for one of them, and holds the connections of all from its question until its
// answer. All calls take them in the same order.
void PoolDirectory::ask_at_once(size_t n, const std::function<void(size_t, const Meanwhile&)>& ask,
                                size_t i) {
    if (i == n) return;
    bool others = false;
    ask(i, [&] {
        others = true;
        ask_at_once(n, ask, i + 1);
    });
    if (!others) ask_at_once(n, ask, i + 1);  // it could not be asked
}

Result<LocateAnswer> PoolDirectory::locate(std::span<const Hash128> hashes, const LocateOptions& options) {
    if (is_one()) return of(0).locate(hashes, options);
    LocateAnswer answer;
    answer.ranges = ranges();
    LocateOptions question = options;
    question.width = 1;  // the cut to whole blocks is made below
    std::vector<std::optional<LocateAnswer>> parts(ranges());
    size_t end = hashes.size();  // with prefix: the first key without a holder, of any range
    const std::vector<std::vector<size_t>> groups = by_range(hashes);
    ask_at_once(groups.size(), [&](size_t i, const Meanwhile& meanwhile) {
        const std::vector<size_t>& which = groups[i];
        const uint32_t range = range_of(hashes[which.front()], ranges());
        Result<LocateAnswer> part = of(range).locate(some_of(hashes, which), question, meanwhile);
        size_t known = which.size();
        if (!part) {
            answer.unreached.emplace(range, part.error());
            hear(range, nullptr);
            known = 0;
        } else {
            hear(range, part->members);
            known = part->keys.size();
            parts[range] = std::move(*part);
        }
        if (options.prefix && known < which.size()) end = std::min(end, which[known]);
    });
    bool none = std::ranges::none_of(parts, [](const auto& part) { return part.has_value(); });
    if (none && !answer.unreached.empty()) return answer.unreached.begin()->second;
    if (options.prefix) {
        // What stands behind the end is unknown to no answer.
        for (const std::vector<size_t>& which : groups) {
            if (which.front() > end) answer.unreached.erase(range_of(hashes[which.front()], ranges()));
        }
    }
    std::vector<size_t> next(ranges(), 0);
    for (size_t i = 0; i < end; ++i) {
        const uint32_t range = range_of(hashes[i], ranges());
        const std::optional<LocateAnswer>& part = parts[range];
        if (part) translate(part->keys[next[range]++], *part->members, answer.keys);
        answer.keys.end_key();
    }
    if (options.prefix) {
        size_t width = std::max<size_t>(options.width, 1);
        answer.keys.cut(answer.keys.size() / width * width);
    }
    MutexLock lock(mutex_);
    answer.members = views_.all();
    if (answer.members == nullptr) answer.members = std::make_shared<const Members>();  // of no key at all
    return answer;
}

Result<std::shared_ptr<const Members>> PoolDirectory::members(bool fresh) {
    if (is_one()) return of(0).members(fresh);
    std::optional<Error> why_not;
    bool any = false;
    for (uint32_t range = 0; range < ranges(); ++range) {
        Result<std::shared_ptr<const Members>> list = of(range).members(fresh);
        hear(range, list ? *list : nullptr);
        any |= list.ok();
        if (!list && !why_not) why_not = list.error();
    }
    if (!any) return *why_not;
    MutexLock lock(mutex_);
    return views_.all();
}

Result<std::vector<NodeId>> PoolDirectory::place_at(uint32_t range, uint64_t bytes, uint16_t n,
                                                    const PlaceOptions& options) {
    PlaceOptions where = options;
    where.avoid_nodes.clear();
    {
        MutexLock lock(mutex_);
        for (NodeId node : options.avoid_nodes) {
            if (auto number = views_.number_at(range, node)) where.avoid_nodes.push_back(*number);
        }
    }
    Result<std::vector<NodeId>> chosen = of(range).place(bytes, n, where);
    if (!chosen) return chosen;
    std::vector<NodeId> nodes;
    for (bool fresh : {false, true}) {  // one of them may have joined a moment ago
        Result<std::shared_ptr<const Members>> list = of(range).members(fresh);
        if (!list) return list.error();
        hear(range, *list);
        nodes.clear();
        MutexLock lock(mutex_);
        for (NodeId node : *chosen) {
            const Member* member = (*list)->find(node);
            auto number = member == nullptr ? std::nullopt : views_.number(member->identity.incarnation);
            if (number) nodes.push_back(*number);
        }
        if (nodes.size() == chosen->size()) break;
    }
    return nodes;
}

Result<std::vector<NodeId>> PoolDirectory::place(uint64_t bytes, uint16_t n, const PlaceOptions& options) {
    if (is_one()) return of(0).place(bytes, n, options);
    const uint32_t first = places_at_;
    std::optional<Error> why_not;
    for (uint32_t i = 0; i < ranges(); ++i) {
        const uint32_t range = (first + i) % ranges();
        Result<std::vector<NodeId>> nodes = place_at(range, bytes, n, options);
        if (nodes) {
            places_at_ = range;
            return nodes;
        }
        if (!why_not) why_not = nodes.error();
    }
    return *why_not;
}

Result<uint32_t> PoolDirectory::forget(std::span<const Hash128> hashes, std::span<const NodeId> unreached) {
    if (is_one()) return of(0).forget(hashes, unreached);
    uint32_t rows = 0;
    std::optional<Error> failed;
    const std::vector<std::vector<size_t>> groups = by_range(hashes);
    ask_at_once(groups.size(), [&](size_t i, const Meanwhile& meanwhile) {
        const uint32_t range = range_of(hashes[groups[i].front()], ranges());
        std::vector<NodeId> nodes;
        {
            MutexLock lock(mutex_);
            for (NodeId node : unreached) {
                if (auto number = views_.number_at(range, node)) nodes.push_back(*number);
            }
        }
        Result<uint32_t> some = of(range).forget(some_of(hashes, groups[i]), nodes, meanwhile);
        if (some) {
            rows += *some;
        } else {
            failed = some.error();
        }
    });
    if (failed) return *failed;
    return rows;
}

Result<OrderAnswer> PoolDirectory::order(std::span<const Hash128> hashes, const Incarnation* placing,
                                         bool unique) {
    if (is_one() || hashes.empty()) return of(0).order(hashes, placing, unique);
    const uint32_t range = range_of(hashes.front(), ranges());
    Result<OrderAnswer> answer = of(range).order(hashes, placing, unique);
    hear(range, answer ? answer->at.members : nullptr);
    if (!answer) return answer;
    Located holders;
    for (size_t i = 0; i < answer->at.keys.size(); ++i) {
        translate(answer->at.keys[i], *answer->at.members, holders);
        holders.end_key();
    }
    answer->at.keys = std::move(holders);
    MutexLock lock(mutex_);
    answer->at.members = views_.of(range);
    return answer;
}

Result<std::vector<Version>> PoolDirectory::ordered(const OrderDone& done,
                                                    const std::function<void()>& meanwhile) {
    if (is_one() || done.keys.empty()) return of(0).ordered(done, meanwhile);
    const uint32_t range = range_of(done.keys.front(), ranges());
    OrderDone there = done;
    {
        // A node that the range's master does not list counts as not told: it drops its copies when it joins.
        MutexLock lock(mutex_);
        for (auto* rows : {&there.told, &there.placed}) {
            for (std::vector<NodeId>& nodes : *rows) {
                std::vector<NodeId> numbers;
                for (NodeId node : nodes) {
                    if (auto number = views_.number_at(range, node)) numbers.push_back(*number);
                }
                nodes = std::move(numbers);
            }
        }
    }
    return of(range).ordered(there, meanwhile);
}

RangeVersions PoolDirectory::newest() const {
    RangeVersions newest(ranges());
    for (uint32_t range = 0; range < ranges(); ++range) newest.raise(range, clients_[range]->newest());
    return newest;
}

bool PoolDirectory::connected() const {
    return std::ranges::any_of(clients_, [](const auto& client) { return client->connected(); });
}

void PoolDirectory::close() {
    for (auto& client : clients_) client->close();
}

}  // namespace moonpool
