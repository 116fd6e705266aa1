// SimClient: what it asks of nodes and masters.
#include <algorithm>
#include <cstring>

#include "base/crc32c.hpp"
#include "client.hpp"
#include "frames.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/messages.hpp"
#include "stripe_books.hpp"

namespace moonpool::sim {

namespace {

constexpr uint32_t kSpace = 0;

Error misfit() { return Error{Code::kProtocol, "an answer that does not fit the question"}; }

// The one object in an answer to READ; empty: a miss.
Result<std::string> read_object(const Bytes& frame) {
    Reader r = body_of(frame);
    r.number<uint32_t>();
    auto row = r.number<ReadRow>();
    if (row.size == kReadMiss) return std::string();
    std::string bytes(r.bytes(row.bytes));
    if (!r.done() || crc32c(0, bytes.data(), bytes.size()) != row.crc) return misfit();
    return bytes;
}

}  // namespace

void SimClient::ask_members(uint32_t range, std::function<void(const Status&)> then) {
    ask(
        lines_[range], Kind::kMembers, [this, range](Writer& w) { members_[range]->write_question(w); },
        [this, range, then](const Result<Bytes>& answer) {
            if (!answer) {
                hear_list(range);
                return then(answer.error());
            }
            Reader r = body_of(*answer);
            bool read = members_[range]->read(now_ms(), r);
            hear(range, r.number<Version>());
            hear_list(range);
            then(read ? success() : Status(misfit()));
        });
}

// The status is that of the last that failed.
void SimClient::ask_all_members(uint32_t range, bool all, std::function<void(const Status&)> then) {
    bool last = range + 1 == ranges();
    auto next = [this, range, all, last, then](const Status& status) {
        if (last) return then(status);
        ask_all_members(range + 1, all,
                        [status, then](const Status& others) { then(status ? others : status); });
    };
    if (!all && members_[range]->current() != nullptr && !members_[range]->due(now_ms()))
        return next(success());
    ask_members(range, next);
}

// As PoolDirectory has it.
std::shared_ptr<const Members> SimClient::list() {
    return ranges() == 1 ? members_[0]->current() : views_->all();
}

void SimClient::hear_list(uint32_t range) {
    if (ranges() > 1) views_->hear(range, members_[range]->current(), lines_[range].end != nullptr);
}

Located SimClient::translated(uint32_t range, const Located& holders) {
    if (ranges() == 1) return holders;
    Located out;
    for (size_t i = 0; i < holders.size(); ++i) {
        for (const Holder& holder : holders[i]) {
            const Member* member = members_[range]->current()->find(holder.node);
            auto number = member == nullptr ? std::nullopt : views_->number(member->identity.incarnation);
            if (number) out.append({*number, holder.tier});
        }
        out.end_key();
    }
    return out;
}

// While the masters are away the last list serves on.
void SimClient::members(std::function<void(const Result<std::shared_ptr<const Members>>&)> then) {
    ask_all_members(0, false, [this, then](const Status& status) {
        if (!status && list() == nullptr) return then(status.error());
        then(list());
    });
}

uint32_t SimClient::range_of_hash(const Hash128& hash) const {
    uint32_t range = range_of(hash, ranges());
    return planted_.two_ranges && host() % 2 == 1 ? (range + 1) % ranges() : range;
}

uint32_t SimClient::range_of_key(uint32_t key) const {
    return range_of(hash_("k" + std::to_string(key)), ranges());
}

void SimClient::locate(const std::vector<Hash128>& keys, const LocateOptions& options,
                       std::function<void(const Result<LocateAnswer>&)> then) {
    auto build = [keys, options](Writer& w) {
        LocateHead head{.n = static_cast<uint32_t>(keys.size())};
        if (options.suspects) head.flags = kLocateSuspects;
        head.write(w);
        for (const Hash128& key : keys) write_hash(w, key);
    };
    const uint32_t range = range_of_hash(keys.front());  // one key
    ask(lines_[range], Kind::kLocate, build, [this, range, then](const Result<Bytes>& frame) {
        if (!frame) return then(frame.error());
        Reader r = body_of(*frame);
        auto answer = std::make_shared<LocateAnswer>();
        auto epoch = r.number<uint64_t>();
        auto n = r.number<uint32_t>();
        for (uint32_t i = 0; i < n; ++i) read_holders(r, &answer->keys);
        hear(range, r.number<Version>());
        if (!r.done()) return then(misfit());
        auto named = [this, range, then, answer](const Status& status) {
            if (!status) return then(status.error());
            hear_list(range);
            answer->keys = translated(range, answer->keys);
            answer->members = list();
            then(*answer);
        };
        if (members_[range]->fits(now_ms(), epoch)) return named(success());
        ask_members(range, named);
    });
}

void SimClient::hear(uint32_t range, Version newest) { newest_[range] = std::max(newest_[range], newest); }

// Which removals a put that begins now comes after.
Version SimClient::known(const Hash128& hash) const {
    auto of = [this](uint32_t range) { return std::max(newest_[range], nodes_[host()]->applied(range)); };
    Version known = of(range_of(hash, ranges()));
    for (uint32_t range = 0; planted_.versions_mixed && range < ranges(); ++range)
        known = std::max(known, of(range));
    return known;
}

void SimClient::order(const RemovalSteps& steps, std::function<void(const Result<OrderAnswer>&)> then,
                      bool fresh) {
    const uint32_t range = range_of_hash(steps.keys().front());
    uint16_t width = order_width(members_[range]->current().get(), steps.placing());
    const bool unique = steps.unique();
    if (unique && width == 0 && fresh) {  // else no other client would hear that the key is being put
        return ask_members(range, [this, &steps, then](const Status& status) {
            if (!status) return then(status.error());
            order(steps, then, false);
        });
    }
    if (unique && width == 0) return then(Error{Code::kUnavailable, "its node has not joined yet"});
    auto build = [keys = steps.keys(), width, unique](Writer& w) {
        const auto flags =
            static_cast<uint8_t>(kLocateSuspects | kLocateOrder | (unique ? kLocateUnique : 0));
        LocateHead head{.flags = flags, .width = width};
        head.n = static_cast<uint32_t>(keys.size());
        head.write(w);
        for (const Hash128& key : keys) write_hash(w, key);
    };
    ask(lines_[range], Kind::kLocate, build, [this, range, unique, then](const Result<Bytes>& frame) {
        if (!frame) return then(frame.error());
        Reader r = body_of(*frame);
        auto answer = std::make_shared<OrderAnswer>();
        answer->epoch = r.number<uint64_t>();
        auto n = r.number<uint32_t>();
        for (uint32_t i = 0; i < n; ++i) read_holders(r, &answer->at.keys);
        hear(range, r.number<Version>());
        auto first = r.number<Version>();
        for (uint32_t i = 0; i < n; ++i) answer->versions.push_back(first + i);
        answer->filling = r.number<uint8_t>() != 0;
        for (uint32_t i = 0; unique && r.left() != 0 && i < n; ++i)
            answer->taken.push_back(static_cast<Taken>(r.number<uint8_t>()));
        if (!r.done()) return then(misfit());
        auto named = [this, range, then, answer](const Status& status) {
            if (!status) return then(status.error());
            hear_list(range);
            answer->at.keys = translated(range, answer->at.keys);
            answer->at.members = ranges() == 1 ? members_[0]->current() : views_->of(range);
            then(*answer);
        };
        if (members_[range]->fits(now_ms(), answer->epoch)) return named(success());
        ask_members(range, named);
    });
}

void SimClient::ordered(OrderDone done, std::function<void(const Result<std::vector<Version>>&)> then) {
    const uint32_t range = range_of_hash(done.keys.front());
    for (auto* rows : {&done.told, &done.placed}) {
        for (std::vector<NodeId>& nodes : *rows) {
            std::vector<NodeId> numbers;
            for (NodeId node : nodes) {
                auto number = ranges() == 1 ? node : views_->number_at(range, node);
                if (number) numbers.push_back(*number);
            }
            nodes = std::move(numbers);
        }
    }
    auto build = [done](Writer& w) { OrderedFrame(done, 0, done.keys.size()).write(w); };
    ask(lines_[range], Kind::kOrdered, build, [then](const Result<Bytes>& frame) {
        if (!frame) return then(frame.error());
        Reader r = body_of(*frame);
        std::vector<Version> last(r.number<uint32_t>());
        for (Version& version : last) version = r.number<Version>();
        then(r.done() ? Result<std::vector<Version>>(last) : misfit());
    });
}

void SimClient::remove_at(const At& node, const CallRef& call, const std::vector<Version>& versions,
                          std::function<void(const Result<std::vector<uint8_t>>&)> then) {
    auto build = [call, versions](Writer& w) {
        w.number(kSpace);
        w.number(versions.empty() ? uint32_t{1} : uint32_t{1} | kRemoveVersions);
        w.text16(call->name);
        for (Version version : versions) w.number(version);
    };
    ask(node, Kind::kRemove, build, [this, call, then](const Result<Bytes>& answer) {
        if (!answer) return then(answer.error());
        Reader r = body_of(*answer);
        r.number<uint32_t>();
        auto flag = r.number<uint8_t>();
        if (flag == kRemovedManifest) {
            std::string_view bytes = r.bytes(kManifestBytes);
            std::memcpy(call->shown.emplace_back().bytes.data(), bytes.data(), bytes.size());
            auto manifest = decode_manifest(std::as_bytes(std::span(bytes)), cluster_secrets(), call->name);
            if (manifest) shown_manifests_.insert(manifest->group_name());
        }
        std::vector<uint8_t> flags{flag != kNotRemoved};
        then(r.done() ? Result<std::vector<uint8_t>>(flags) : misfit());
    });
}

void SimClient::read_at(const At& node, const ReadAsk& what,
                        std::function<void(const Result<std::string>&)> then) {
    auto build = [what, name = std::string(what.name)](Writer& w) {
        w.number(kSpace);
        w.number(uint32_t{1});
        ReadAsk row = what;
        row.name = name;
        row.write(w);
    };
    ask(node, Kind::kRead, build, [then](const Result<Bytes>& answer) {
        if (!answer) return then(answer.error());
        then(read_object(*answer));
    });
}

// As NodeClient: a put without a place of its own that is older than what the node knows begins anew.
void SimClient::put_at(const At& node, const CallRef& call, Version replaces, Version known, bool anew,
                       std::function<void(const Result<PutOutcome>&)> then) {
    auto build = [call, replaces, known](Writer& w) {
        const std::string& bytes = call->bytes;
        NewKey key{.name = call->name, .parent = {}, .version = replaces != kNoVersion ? replaces : known};
        auto flags = static_cast<uint8_t>(kCommitVersions |
                                          (call->operation.kind != Operation::kPut ? kCommitReplace : 0));
        PutHead{{kSpace, flags, 1}, static_cast<uint32_t>(PutObject::bytes(key, flags))}.write(w);
        PutObject{bytes.size(), crc32c(0, bytes.data(), bytes.size()), key}.write(w, flags);
        w.bytes(bytes.data(), bytes.size());
    };
    ask(node, Kind::kPut, build, [this, node, call, replaces, anew, then](const Result<Bytes>& answer) {
        if (!answer) return then(answer.error());
        Reader r = body_of(*answer);
        auto outcome = PutOutcome::kRefused;
        Version newest = kNoVersion;
        bool fits = read_outcomes(r, 1, [&](size_t, PutOutcome o, Version v) {
            outcome = o;
            newest = v;
        });
        if (!fits) return then(misfit());
        if (outcome == PutOutcome::kOlder && replaces == kNoVersion) {
            if (anew) return put_at(node, call, kNoVersion, newest, true, then);
            return then(PutOutcome::kRefused);
        }
        then(outcome);
    });
}

void SimClient::ask_place(const PlaceOptions& where,
                          std::function<void(const Result<std::vector<NodeId>>&)> then) {
    const uint32_t range = host() % ranges();
    std::vector<NodeId> avoid;
    for (NodeId node : where.avoid_nodes) {
        auto number = ranges() == 1 ? node : views_->number_at(range, node);
        if (number) avoid.push_back(*number);
    }
    auto build = [where, avoid](Writer& w) {
        w.number(uint64_t{16});
        w.number(uint16_t{1});
        w.number(where.evict ? kPlaceEvict : uint8_t{0});
        w.number(uint8_t{0});
        w.number(static_cast<uint16_t>(avoid.size()));
        w.number(uint16_t{0});
        for (NodeId node : avoid) w.number(node);
    };
    ask(lines_[range], Kind::kPlace, build, [this, range, then](const Result<Bytes>& answer) {
        if (!answer) return then(answer.error());
        Reader r = body_of(*answer);
        std::vector<NodeId> nodes(r.number<uint16_t>());
        for (NodeId& node : nodes) node = r.number<NodeId>();
        hear(range, r.number<Version>());
        if (ranges() == 1) return then(nodes);
        std::vector<NodeId> numbers;
        for (NodeId node : nodes) {
            const Members* heard = members_[range]->current().get();
            const Member* member = heard == nullptr ? nullptr : heard->find(node);
            auto number = member == nullptr ? std::nullopt : views_->number(member->identity.incarnation);
            if (number) numbers.push_back(*number);
        }
        then(numbers);
    });
}

}  // namespace moonpool::sim
