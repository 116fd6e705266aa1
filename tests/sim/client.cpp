// SimClient: its life, and its connections to nodes and masters.
#include "client.hpp"

#include <algorithm>
#include <cstring>

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

std::string bytes_of(uint64_t value) {
    std::string bytes(16, '\0');
    std::memcpy(bytes.data(), &value, sizeof(value));
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
        case Operation::kUnique:
            return put_unique(call, 1);
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

}  // namespace moonpool::sim
