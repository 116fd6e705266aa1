// SimClient: get, put, remove and pin, as Client has them.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/crc32c.hpp"
#include "client.hpp"
#include "frames.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/messages.hpp"

namespace moonpool::sim {

namespace {

constexpr uint32_t kSpace = 0;

uint64_t value_in(std::string_view bytes) {
    uint64_t value = 0;
    if (bytes.size() == 16) std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
}

}  // namespace

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
SimClient::RemovalRef SimClient::begin_removal(const CallRef& call, bool own_too, std::function<void()> then,
                                               bool unique) {
    auto removal = std::make_shared<Removal>();
    removal->call = call;
    removal->then = std::move(then);
    removals_.push_back(removal);
    // The own node's life is known once it has been spoken to.
    later(0, [this, removal, own_too, unique] {
        connect(node_line(host()), [this, removal, own_too, unique](const Status&) {
            std::vector keys{hash_(removal->call->name)};
            removal->steps.emplace(keys, place_.own, own_too, *locations_, *recent_, unique);
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
    call.operation.version = removal.versions().empty() ? kNoVersion : removal.versions()[0];
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
            put->removal = begin_removal(
                put->call, false,
                [this, put] {
                    if (put->unique != 0) return leave_taken(put);
                    const std::vector<Version>& versions = put->removal->steps->versions();
                    put->version = versions.empty() ? kNoVersion : versions[0];
                    if (is_striped(put->call->operation.key))
                        show_own_manifest(*put->call,
                                          planted_.stripes_later ? put->call->shown : put->seen_here);
                    put->steps->removed();
                    go_on(put);
                },
                put->unique != 0);
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
        if (later != kNoVersion && outcome != Operation::kUnknown && is_free(removal.taken(0)))
            return end_overtaken(put, later);
        if (put->unique != 0) {
            put->outcome = put->older ? Operation::kUnknown : outcome;
            return end_unique(put);
        }
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
