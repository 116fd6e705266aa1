#include "client.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/crc32c.hpp"
#include "directory/protocol.hpp"
#include "frames.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/messages.hpp"
#include "wire/error_frame.hpp"

namespace moonpool::sim {

namespace {

constexpr Micros kMasterPatience = 500 * kMs, kNodePatience = 1425 * kMs;
constexpr uint64_t kMembersFreshMs = 200;
constexpr uint32_t kSpace = 0;

std::string bytes_of(uint64_t value) {
    std::string bytes(16, '\0');
    std::memcpy(bytes.data(), &value, sizeof(value));
    return bytes;
}
uint64_t value_in(std::string_view bytes) {
    uint64_t value = 0;
    if (bytes.size() == 16) std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
}

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

SimClient::SimClient(World& world, Network& network, std::vector<std::vector<SimMaster*>> masters,
                     std::vector<SimNode*> nodes, uint32_t host, const Planted& planted)
    : Process(world, "client-" + std::to_string(host), host),
      network_(network),
      masters_(std::move(masters)),
      next_master_(masters_.size()),
      nodes_(std::move(nodes)),
      planted_(planted),
      hash_("default", "default", "") {}

void SimClient::on_start() {
    lines_ = std::vector<Line>(nodes_.size() + ranges());
    locations_ = std::make_unique<LocationCache>();
    recent_ = std::make_unique<RecentCopies>();
    members_.clear();
    for (uint32_t range = 0; range < ranges(); ++range)
        members_.push_back(std::make_unique<MembersCache>(kMembersFreshMs));
    views_ = std::make_unique<MemberViews>(ranges());
    newest_.assign(ranges(), kNoVersion);
    place_ = OwnPlace{nodes_[host()]->identity().host_id, {}};
}

void SimClient::let_go_of_removals() {
    for (auto& open : removals_) {
        if (RemovalRef removal = open.lock()) removal->then = {};
    }
    removals_.clear();
}

void SimClient::on_end() {
    let_go_of_removals();
    // Answers refer to what ends here.
    for (Line& line : lines_) line.open.clear();
    lines_.clear();
}

void SimClient::run(Operation operation, std::function<void(const Operation&)> done) {
    operation.begin = world_.now();
    auto call = std::make_shared<Call>(Call{operation, "k" + std::to_string(operation.key), std::move(done)});
    call->bytes = bytes_of(operation.value);
    if (is_striped(operation.key)) return run_striped(call);
    switch (operation.kind) {
        case Operation::kGet:
            return get(call);
        case Operation::kRemove:
            return remove(call);
        case Operation::kPin:
            return pin(call);
        case Operation::kPut:
        case Operation::kReplace:
            return put(call);
        case Operation::kExists:  // of a striped object alone
            return finish(call, Operation::kNothing);
    }
}

void SimClient::finish(const CallRef& call, Operation::Outcome outcome) {
    call->operation.outcome = outcome;
    call->operation.end = world_.now();
    call->done(call->operation);
}

// ---- Connections

// A connection to a node is opened by the call that needs it; after a failure calls fail at once for a while.
// The one to the master is opened in the background, and calls fail at once until it stands.
void SimClient::connect(Line& line, std::function<void(const Status&)> then) {
    if (line.end != nullptr) return then(success());
    if (line.dialing || world_.now() >= line.retry_at) {
        bool waits = !is_master(line) || !line.connected_before;
        if (waits) line.waiting.push_back(then);
        if (!line.dialing) dial(line);
        if (waits) return;
    }
    then(Error{Code::kUnavailable, "there is no connection"});
}

void SimClient::dial(Line& line) {
    size_t index = static_cast<size_t>(&line - lines_.data());
    // The one that served last comes last, as in DirectoryClient.
    const bool to_master = is_master(line);
    SimMaster* master = nullptr;
    if (to_master) master = masters_[index][next_master_[index]++ % masters_[index].size()];
    SimNode* node = to_master ? nullptr : nodes_[index - ranges()];
    Process& to = to_master ? static_cast<Process&>(*master) : *node;
    line.dialing = true;
    uint64_t attempt = ++line.attempts;
    auto accept = [master, node](std::shared_ptr<End> end) {
        if (master != nullptr) return master->accept(std::move(end), moonpool::Caller::kClient);
        return node->accept(std::move(end));
    };
    network_.dial(*this, to, accept, [this, &line, attempt](std::shared_ptr<End> end) {
        if (attempt == line.attempts) {
            dialed(line, std::move(end));
        } else if (end != nullptr) {
            end->close();
        }
    });
    later(to_master ? kMasterPatience : kNodePatience, [this, &line, attempt] {
        if (attempt == line.attempts && line.dialing) dialed(line, nullptr);
    });
}

void SimClient::dialed(Line& line, std::shared_ptr<End> end) {
    size_t index = static_cast<size_t>(&line - lines_.data());
    const bool to_master = is_master(line);
    ++line.attempts;
    line.dialing = false;
    Status status = success();
    if (end == nullptr) {
        Micros least = to_master ? 100 * kMs : 250 * kMs, most = to_master ? 500 * kMs : 2 * kSecond;
        line.backoff = std::clamp(line.backoff * 2, least, most);
        line.retry_at = world_.now() + line.backoff;
        if (to_master && next_master_[index] % masters_[index].size() != 0)
            line.retry_at = 0;  // first the others
        status = Error{Code::kUnavailable, "nothing listens there"};
    } else {
        line.backoff = 0;
        line.connected_before = true;
        line.end = end;
        end->on_frame = [this, &line, raw = end.get()](const Bytes& frame) {
            if (line.end.get() == raw) answered(line, frame);
        };
        end->on_end = [this, &line, raw = end.get()] {
            if (line.end.get() == raw) lost(line, Error{Code::kUnavailable, "the connection has ended"});
        };
        if (to_master) members_[index]->connected();
        if (!to_master) line.life = nodes_[index - ranges()]->identity().incarnation;
        if (index == ranges() + host()) place_.own = line.life;
    }
    for (auto& then : std::exchange(line.waiting, {})) then(status);
}

void SimClient::answered(Line& line, const Bytes& frame) {
    FrameHeader header = header_of(frame);
    auto it = line.open.find(header.request_id);
    if (header.kind == Kind::kError && it == line.open.end()) {
        Reader body = body_of(frame);
        return lost(line, read_error(body));
    }
    if (it == line.open.end()) return;
    Answer answer = std::move(it->second);
    line.open.erase(it);
    if (header.kind != Kind::kError) return answer(frame);
    Reader body = body_of(frame);
    answer(read_error(body));
}

void SimClient::lost(Line& line, const Error& why) {
    line.end->close();
    line.end.reset();
    if (is_master(line)) dial(line);
    for (auto& [request, answer] : std::exchange(line.open, {})) answer(why);
}

void SimClient::ask(Line& line, Kind kind, std::function<void(Writer&)> build, Answer answer) {
    connect(line, [this, &line, kind, build, answer](const Status& status) {
        if (!status) return answer(status.error());
        uint64_t request = next_request_++;
        line.open.emplace(request, answer);
        line.end->send(make_frame(kind, 0, request, build));
        later(is_master(line) ? kMasterPatience : kNodePatience, [this, &line, request] {
            if (line.open.contains(request)) lost(line, Error{Code::kTimeout, "no answer in time"});
        });
    });
}

void SimClient::ask(const At& at, Kind kind, std::function<void(Writer&)> build, Answer answer) {
    Line& line = node_line(at.node);
    // Of a life before: Peers has a connection for each life of a node.
    if (line.end != nullptr && line.life != nodes_[at.node]->identity().incarnation && at.life != line.life)
        lost(line, Error{Code::kUnavailable, "the node was restarted"});
    connect(line, [this, at, &line, kind, build, answer](const Status& status) {
        if (status && at.life && *at.life != line.life)
            return answer(Error{Code::kUnavailable, "the node was restarted"});
        ask(line, kind, build, answer);
    });
}

// By its address, which a restarted node has, too.
SimClient::At SimClient::at(const Member& member) const {
    auto same = [&](const SimNode* node) { return node->identity().address == member.identity.address; };
    return At{static_cast<size_t>(std::ranges::find_if(nodes_, same) - nodes_.begin()),
              member.identity.incarnation};
}

// ---- Questions

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

void SimClient::order(const RemovalSteps& steps, std::function<void(const Result<OrderAnswer>&)> then) {
    const uint32_t range = range_of_hash(steps.keys().front());
    uint16_t width = order_width(members_[range]->current().get(), steps.placing());
    auto build = [keys = steps.keys(), width](Writer& w) {
        LocateHead head{.flags = kLocateSuspects | kLocateOrder, .width = width};
        head.n = static_cast<uint32_t>(keys.size());
        head.write(w);
        for (const Hash128& key : keys) write_hash(w, key);
    };
    ask(lines_[range], Kind::kLocate, build, [this, range, then](const Result<Bytes>& frame) {
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
    ask(node, Kind::kRemove, build, [call, then](const Result<Bytes>& answer) {
        if (!answer) return then(answer.error());
        Reader r = body_of(*answer);
        r.number<uint32_t>();
        auto flag = r.number<uint8_t>();
        if (flag == kRemovedManifest) {
            std::string_view bytes = r.bytes(kManifestBytes);
            std::memcpy(call->shown.emplace_back().bytes.data(), bytes.data(), bytes.size());
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
                                          (call->operation.kind == Operation::kReplace ? kCommitReplace : 0));
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

// ---- Verbs, as Client has them

// The own node's memory is mapped here: no frame is sent, and a node that stands still is read as well.
void SimClient::get(const CallRef& call) {
    connect(node_line(host()), [this, call](const Status& own) {
        if (own) {
            if (auto bytes = nodes_[host()]->read(call->name)) {
                call->operation.value = value_in(*bytes);
                call->bytes = *bytes;
                return finish(call, Operation::kDone);
            }
            if (nodes_[host()]->has_disk()) return get_from_disk(call);
        }
        get_elsewhere(call, own.ok());
    });
}

// What only a disk has the node brings into memory first.
void SimClient::get_from_disk(const CallRef& call) {
    ReadAsk what{.how = kReadByName, .from = 0, .room = 128, .name = call->name};
    read_at({host()}, what, [this, call](const Result<std::string>& bytes) {
        if (!bytes || bytes->empty()) return get_elsewhere(call, bytes.ok());
        call->operation.value = value_in(*bytes);
        call->bytes = *bytes;
        finish(call, Operation::kDone);
    });
}

void SimClient::get_elsewhere(const CallRef& call, bool own_answered) {
    call->bytes.clear();
    auto search = std::make_shared<Search>();
    search->call = call;
    search->own_answered = own_answered;
    search->steps.emplace(std::vector{hash_(call->name)}, place_, *locations_, search->sizes);
    members([this, search](const Result<std::shared_ptr<const Members>>& answer) {
        search->steps->members(answer);
        this->search(search);
    });
}

void SimClient::search(const std::shared_ptr<Search>& search) {
    switch (search->steps->wants()) {
        case SearchSteps::Wants::kMembers:
            return;
        case SearchSteps::Wants::kLocate:
            return locate(search->steps->question(), {}, [this, search](const Result<LocateAnswer>& answer) {
                search->steps->located(answer);
                this->search(search);
            });
        case SearchSteps::Wants::kRead: {
            const NodeItems& node = search->steps->nodes().front();  // one key: one node at a time
            ReadAsk what{.how = kReadByName, .from = 0, .room = 128, .name = search->call->name};
            return read_at(at(node.member), what, [this, search](const Result<std::string>& bytes) {
                Result<std::vector<int64_t>> sizes = std::vector<int64_t>{kMiss};
                if (!bytes) {
                    sizes = bytes.error();
                } else if (!bytes->empty()) {
                    search->call->operation.value = value_in(*bytes);
                    search->call->bytes = *bytes;
                    search->call->operation.from = at(search->steps->nodes().front().member).node;
                    sizes = std::vector<int64_t>{static_cast<int64_t>(bytes->size())};
                }
                search->steps->answered(search->steps->nodes().front(), sizes);
                search->steps->all_answered();
                this->search(search);
            });
        }
        case SearchSteps::Wants::kDone:
            // With the own node away, a miss everywhere else is not known to be a miss.
            bool known = search->sizes[0] >= 0 || search->own_answered;
            return finish(search->call, known ? Operation::kDone : Operation::kUnknown);
    }
}

void SimClient::remove(const CallRef& call) {
    auto removal = std::make_shared<RemovalRef>();
    *removal = begin_removal(call, true, [this, call, removal] {
        end_removal(*removal, [this, call, removal] {
            Operation::Outcome outcome = outcome_of(*call, *(*removal)->steps);
            RemovalRef(std::move(*removal)).reset();
            finish(call, outcome);
        });
    });
}

// then: all nodes that have a copy are told.
SimClient::RemovalRef SimClient::begin_removal(const CallRef& call, bool own_too,
                                               std::function<void()> then) {
    auto removal = std::make_shared<Removal>();
    removal->call = call;
    removal->then = std::move(then);
    removals_.push_back(removal);
    // The own node's life is known once it has been spoken to.
    later(0, [this, removal, own_too] {
        connect(node_line(host()), [this, removal, own_too](const Status&) {
            std::vector keys{hash_(removal->call->name)};
            removal->steps.emplace(keys, place_.own, own_too, *locations_, *recent_);
            go_on(removal);
        });
    });
    return removal;
}

void SimClient::end_removal(const RemovalRef& removal, std::function<void()> then) {
    if (removal->steps->wants() != RemovalSteps::Wants::kEnd) return then();
    OrderDone done = removal->steps->done();
    if (planted_.all_told) {
        for (const Member& member : list()->rows) done.told[0].push_back(member.id);
    }
    auto last = std::make_shared<Result<std::vector<Version>>>(std::vector<Version>{});
    removal->waits_for = 2;
    auto one = [removal, last, then] {
        if (--removal->waits_for != 0) return;
        removal->steps->ended(*last);
        then();
    };
    tell_witnesses(removal, one);
    ordered(done, [last, one](const Result<std::vector<Version>>& answer) {
        *last = answer;
        one();
    });
}

void SimClient::tell_witnesses(const RemovalRef& removal, std::function<void()> then) {
    std::vector<NodeItems> witnesses;
    if (!planted_.one_told) witnesses = removal->steps->witnesses();
    if (witnesses.empty()) return then();
    auto left = std::make_shared<size_t>(witnesses.size());
    for (const NodeItems& node : witnesses) {
        remove_at(at(node.member), removal->call, removal->steps->versions(),
                  [this, removal, node, left, then](const Result<std::vector<uint8_t>>& flags) {
                      removal->steps->witnessed(node, flags);
                      if (--*left == 0) tell_witnesses(removal, then);
                  });
    }
}

void SimClient::go_on(const RemovalRef& removal) {
    RemovalSteps& steps = *removal->steps;
    switch (steps.wants()) {
        case RemovalSteps::Wants::kOrder:
            return order(steps, [this, removal](const Result<OrderAnswer>& answer) {
                removal->steps->ordered(now_ms(), answer);
                go_on(removal);
            });
        case RemovalSteps::Wants::kMembers:
            return members([this, removal](const Result<std::shared_ptr<const Members>>& answer) {
                removal->steps->members(now_ms(), answer);
                go_on(removal);
            });
        case RemovalSteps::Wants::kTell:
            removal->waits_for = steps.nodes().size() + 1;
            if (steps.tells_own()) {
                ++removal->waits_for;
                remove_at({host()}, removal->call, steps.versions(),
                          [this, removal](const Result<std::vector<uint8_t>>& flags) {
                              removal->steps->own_told(flags);
                              one_told(removal);
                          });
            }
            for (size_t i = 0; i < steps.nodes().size(); ++i) {
                auto told = [this, removal, i](const Result<std::vector<uint8_t>>& flags) {
                    removal->steps->told(now_ms(), removal->steps->nodes()[i], flags);
                    one_told(removal);
                };
                remove_at(at(steps.nodes()[i].member), removal->call, steps.versions(), told);
            }
            return one_told(removal);
        case RemovalSteps::Wants::kEnd:
        case RemovalSteps::Wants::kDone:
            return std::exchange(removal->then, {})();
    }
}

void SimClient::one_told(const RemovalRef& removal) {
    if (--removal->waits_for != 0) return;
    removal->steps->all_told();
    go_on(removal);
}

void SimClient::put(const CallRef& call) {
    auto put = std::make_shared<Put>();
    put->call = call;
    put->known = known(hash_(call->name));
    put->steps.emplace(1, PutSteps::Plan{.replace = call->operation.kind == Operation::kReplace});
    go_on(put);
}

// Without the master's word nothing is promised.
Operation::Outcome SimClient::outcome_of(Call& call, const RemovalSteps& removal) {
    call.operation.alone = removal.know(0) < 2 && !planted_.one_told;
    if (removal.unsure(0).empty()) return Operation::kDone;
    return removal.acknowledged() ? Operation::kPartly : Operation::kUnknown;
}

// What a node said of the one item: what is left.
std::vector<size_t> SimClient::note(Put& put, const Result<PutOutcome>& outcome) {
    put.unanswered |= !outcome;
    if (!outcome || *outcome == PutOutcome::kRefused) return {0};
    put.older = *outcome == PutOutcome::kOlder;
    put.outcome = Operation::kDone;
    put.call->is_stored = *outcome == PutOutcome::kStored;
    if (*outcome == PutOutcome::kExists)
        put.outcome = put.unanswered ? Operation::kUnknown : Operation::kNothing;
    return {};
}

void SimClient::go_on(const std::shared_ptr<Put>& put) {
    switch (put->steps->wants()) {
        case PutSteps::Wants::kPutWanted:  // of puts that name nodes
        case PutSteps::Wants::kDone:
            return end(put);
        case PutSteps::Wants::kRemove:
            // As Client::put_some: what is here by now is older, what comes later need not be.
            if (is_striped(put->call->operation.key)) show_own_manifest(*put->call, put->call->shown);
            put->removal = begin_removal(put->call, false, [this, put] {
                const std::vector<Version>& versions = put->removal->steps->versions();
                put->version = versions.empty() ? kNoVersion : versions[0];
                if (is_striped(put->call->operation.key))
                    show_own_manifest(*put->call, planted_.stripes_later ? put->call->shown : put->seen_here);
                put->steps->removed();
                go_on(put);
            });
            return;
        case PutSteps::Wants::kSpill:  // the own node's arena is never full
            put->steps->put(put->steps->left());
            return go_on(put);
        case PutSteps::Wants::kPutHere:
            return put_at({host()}, put->call, put->version, put->known, true,
                          [this, put](const Result<PutOutcome>& own) {
                              std::vector<size_t> left = note(*put, own);
                              put->own_unanswered = !own;
                              if (!own && put->removal != nullptr) put->removal->steps->not_answered_here(0);
                              if (left.empty() && put->removal != nullptr && !put->older)
                                  put->removal->steps->placed_here(0);
                              if (own && *own == PutOutcome::kStored)
                                  std::ranges::copy(put->seen_here, std::back_inserter(put->call->shown));
                              put->seen_here.clear();
                              put->steps->put(left);
                              go_on(put);
                          });
        case PutSteps::Wants::kPutElsewhere:
            return members([this, put](const Result<std::shared_ptr<const Members>>& known) {
                if (!known) return end(put);
                put->place.emplace(std::vector<size_t>{0}, place_.own, *known, true);
                place(put);
            });
    }
}

// As Client::end_replacement.
void SimClient::end(const std::shared_ptr<Put>& put) {
    put->call->is_unanswered = put->own_unanswered && !put->steps->left().empty();
    if (put->removal == nullptr) return finish(put->call, put->outcome);
    RemovalSteps& steps = *put->removal->steps;
    std::vector<size_t> left = steps.left_here();
    if (left.empty() || steps.versions().empty()) return end_order(put);
    remove_at({host()}, put->call, steps.versions(),
              [this, put, left](const Result<std::vector<uint8_t>>& flags) {
                  put->removal->steps->own_removed(left, flags);
                  end_order(put);
              });
}

void SimClient::end_order(const std::shared_ptr<Put>& put) {
    end_removal(put->removal, [this, put] {
        const RemovalSteps& removal = *put->removal->steps;
        Operation::Outcome outcome = put->outcome;
        if (outcome == Operation::kDone) outcome = outcome_of(*put->call, removal);
        Version later = removal.later()[0];
        if (later != kNoVersion && outcome != Operation::kUnknown) return end_overtaken(put, later);
        if (!put->older) return finish(put->call, outcome);
        // The master had taken it for given up.
        if (put->unanswered || ++put->attempts == kAttemptsMax) return finish(put->call, Operation::kUnknown);
        put->older = false;
        put->outcome = Operation::kUnknown;
        put->removal.reset();
        put->steps.emplace(1, PutSteps::Plan{.replace = true});
        go_on(put);
    });
}

// As Client::remove_overtaken.
void SimClient::end_overtaken(const std::shared_ptr<Put>& put, Version later) {
    // Its stripes go, also where no node took it.
    put->call->is_stored = true;
    if (put->call->bytes.size() == kManifestBytes && !planted_.stripes_overtaken)
        std::memcpy(put->call->shown.emplace_back().bytes.data(), put->call->bytes.data(), kManifestBytes);
    const size_t only[] = {0};
    std::vector<NodeItems> others = put->removal->steps->overtaken_at(only);
    auto left = std::make_shared<size_t>(1 + others.size());
    auto one = [this, put, left] {
        if (--*left != 0) return;
        finish(put->call, put->outcome == Operation::kDone ? outcome_of(*put->call, *put->removal->steps)
                                                           : put->outcome);
    };
    for (const NodeItems& node : others) {
        remove_at(at(node.member), put->call, {later},
                  [put, node, one](const Result<std::vector<uint8_t>>& flags) {
                      put->removal->steps->overtaken_told(node, flags);
                      one();
                  });
    }
    remove_at({host()}, put->call, {later}, [one](const auto&) { one(); });
}

void SimClient::place(const std::shared_ptr<Put>& put) {
    switch (put->place->wants()) {
        case PlaceSteps::Wants::kPlace:
            return ask_place(put->place->where(), [this, put](const Result<std::vector<NodeId>>& nodes) {
                put->place->placed(nodes);
                place(put);
            });
        case PlaceSteps::Wants::kMembers:
            return ask_all_members(0, true, [this, put](const Status& status) {
                Result<std::shared_ptr<const Members>> fresh = list();
                if (!status) fresh = status.error();
                put->place->members(fresh);
                place(put);
            });
        case PlaceSteps::Wants::kPut: {
            Member to = put->place->node();
            auto done = [this, put, to](const Result<PutOutcome>& outcome) {
                std::vector<size_t> left = note(*put, outcome);
                if (left.empty() && !put->older) {
                    locations_->put(hash_(put->call->name), to.identity.incarnation);
                    recent_->add(now_ms(), hash_(put->call->name), to.id);
                    if (put->removal != nullptr) put->removal->steps->placed(0, to.id);
                }
                put->place->put(left);
                place(put);
            };
            if (planted_.put_anew) put->known = known(hash_(put->call->name));
            return put_at(at(to), put->call, put->version, put->known, !put->unanswered || planted_.put_anew,
                          done);
        }
        case PlaceSteps::Wants::kDone:
            put->steps->put(put->place->left());
            return go_on(put);
    }
}

// Pins what a node has under the key, waits a while, reads what was pinned: it has to be there.
void SimClient::pin(const CallRef& call) {
    size_t node = call->operation.value % nodes_.size();
    Line& line = node_line(node);
    auto build = [call](Writer& w) {
        LookupHead{kSpace, kLookupPin, 1, 1}.write(w);
        w.text16(call->name);
    };
    ask(line, Kind::kLookup, build, [this, call, node, &line](const Result<Bytes>& answer) {
        if (!answer) return finish(call, Operation::kUnknown);
        Reader r = body_of(*answer);
        LookupFound found = LookupFound::read(r);
        auto what = r.number<Descriptor>();
        if (found.pin_id == 0) return finish(call, Operation::kNothing);
        later(world_.random.between(1, 300) * kMs, [this, call, node, &line, found, what, held = line.end] {
            if (line.end == nullptr || line.end != held) return finish(call, Operation::kUnknown);
            ReadAsk pinned{.how = kReadPinned,
                           .from = 0,
                           .room = 64,
                           .name = {},
                           .generation = what.generation,
                           .slot = what.slot};
            read_at({node}, pinned, [this, call, &line, found, what, held](const Result<std::string>& bytes) {
                if (!bytes || line.end != held) return finish(call, Operation::kUnknown);
                if (bytes->size() != what.size || crc32c(0, bytes->data(), bytes->size()) != what.crc) {
                    findings_.push_back({Finding::kPinLost, call->name + ": what was pinned is not there",
                                         call->operation.key});
                }
                held->send(
                    make_frame(Kind::kRelease, kFlagOneWay, 0, [&](Writer& w) { w.number(found.pin_id); }));
                finish(call, Operation::kDone);
            });
        });
    });
}

}  // namespace moonpool::sim
