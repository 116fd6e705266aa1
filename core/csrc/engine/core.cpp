#include "engine/core.hpp"

#include <chrono>
#include <thread>

#include "base/utf8.hpp"
#include "transport/frames.hpp"

namespace moonpool {

namespace {

std::string hex(std::span<const uint8_t> bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string text;
    for (uint8_t byte : bytes) {
        text.push_back(digits[byte >> 4]);
        text.push_back(digits[byte & 15]);
    }
    return text;
}

}  // namespace

Status Engine::Core::start() {
    if (options.token.empty()) return Error{Code::kInvalidArgument, "an engine needs a cluster token"};
    if (options.name.size() > transport::kNameBytesMax || options.host_id.size() > 256 ||
        options.tenant.size() > 256) {
        return Error{Code::kInvalidArgument, "names, host ids and tenants of engines have at most 256 bytes"};
    }
    for (const auto& [what, text] : {std::pair{"the name", &options.name},
                                     {"the host id", &options.host_id},
                                     {"the tenant", &options.tenant}}) {
        // Peers take no other text: none could open this engine.
        if (is_utf8(*text)) continue;
        return Error{Code::kInvalidArgument, std::string(what) + " of an engine must be UTF-8"};
    }
    if (options.timeout_ms <= 0) {
        return Error{Code::kInvalidArgument, "the timeout of an engine must be above 0 ms, not " +
                                                 std::to_string(options.timeout_ms)};
    }
    if (options.io_threads == 0 || options.io_threads > 64) {
        return Error{Code::kInvalidArgument, "an engine has 1 to 64 I/O threads"};
    }
    if (options.connections_per_peer == 0 || options.connections_per_peer > 64) {
        return Error{Code::kInvalidArgument, "an engine has 1 to 64 connections to a peer"};
    }
    for (const std::string& name : options.transports.value_or(std::vector<std::string>{})) {
        if (name != "loopback" && name != "shm" && name != "tcp") {
            return Error{Code::kInvalidArgument,
                         "there is no transport \"" + name + "\"; there are loopback, shm and tcp"};
        }
    }
    if (options.transports && options.transports->empty()) {
        return Error{Code::kInvalidArgument, "an engine needs at least one of loopback, shm and tcp"};
    }
    identity.name = options.name;
    identity.tenant = options.tenant;
    identity.segment = random_incarnation();
    identity.host_id = options.host_id;
    identity.boot_id = transport::read_boot_id();
    identity.shm_cookie = random_nonce();

    for (uint32_t i = 0; i < options.io_threads; ++i) {
        EventLoopOptions loop_options;
        loop_options.name = "moonpool-io";
        loop_options.spin_us = 50;
        loop_options.spins_beside_sender = false;
        Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(loop_options));
        if (!loop) return loop.error();
        if (Status status = (*loop)->start(); !status) return status;
        loops.push_back(std::move(*loop));
    }
    if (Status status = start_transports(); !status) return status;

    Doorman* door = options.doorman;
    if (door == nullptr) {
        DoormanOptions own;
        own.addresses = options.listen;
        own.token = options.token;
        own.incarnation = random_incarnation();
        Result<std::unique_ptr<Doorman>> made = Doorman::create(std::move(own));
        if (!made) return made.error();
        doorman = std::move(*made);
        door = doorman.get();
    }
    door->offer(std::string(kPurposeEngine), purpose());
    addresses = door->addresses();
    return doorman == nullptr ? success() : doorman->start();
}

Status Engine::Core::start_transports() {
    auto served = [this] {
        return transport::Served{identity, *regions, counters,
                                 [this](const std::string& peer, std::span<const std::byte> message) {
                                     return deliver(peer, message);
                                 }};
    };
    const std::string off = "it is not among the transports that this engine was given";
    transports.emplace_back("loopback", allows("loopback") ? "" : off);
    transports.emplace_back("shm", allows("shm") ? "" : off);
    transports.emplace_back("tcp", allows("tcp") ? "" : off);

    loopback = std::make_shared<transport::loopback::Target>();
    loopback->identity = identity;
    loopback->regions = regions;
    if (allows("loopback")) transport::loopback::enlist(loopback);

    if (allows("shm") && identity.boot_id.empty()) {
        transports[1].second =
            "the kernel does not tell its boot id, so no two processes can prove their host";
    } else if (allows("shm")) {
        identity.shm_socket = "moonpool-engine-" + hex(identity.segment);
        shm = std::make_unique<transport::shm::Target>(served(), *loops.front());
        if (Status status = shm->start(); !status) {
            transports[1].second = status.error().text;
            identity.shm_socket.clear();
            shm.reset();
        }
    }
    std::vector<EventLoop*> all;
    for (const auto& loop : loops) all.push_back(loop.get());
    tcp = std::make_unique<transport::tcp::Target>(served(), all);
    reception->target = tcp.get();
    return success();
}

Purpose Engine::Core::purpose() {
    transport::PeerInfo self;
    self.name = identity.name;
    self.segment = identity.segment;
    self.host_id = identity.host_id;
    self.boot_id = identity.boot_id;
    self.shm_socket = identity.shm_socket;
    self.shm_cookie = identity.shm_cookie;
    Purpose purpose;
    purpose.welcome = [tenant = options.tenant, reception = reception,
                       self](std::string_view asked) -> Result<std::vector<std::byte>> {
        if (asked != tenant) {
            return Error{Code::kAuth, "this engine does not serve the tenant \"" + std::string(asked) + "\""};
        }
        std::lock_guard lock(reception->mutex);
        if (reception->target == nullptr) return Error{Code::kUnavailable, "this engine is closed"};
        return transport::encode_welcome(self);
    };
    purpose.serve = [reception = reception](Caller caller) {
        std::lock_guard lock(reception->mutex);
        if (reception->target != nullptr) reception->target->adopt(std::move(caller));
    };
    return purpose;
}

void Engine::Core::close() {
    if (fork.in_child()) return;
    std::lock_guard lock(close_mutex);
    if (closed) return;
    closing = true;
    transport::loopback::strike_off(identity.segment);
    if (loopback != nullptr) loopback->closed = true;
    {
        std::lock_guard inner(reception->mutex);
        reception->target = nullptr;
    }
    if (doorman != nullptr) doorman->stop();
    // Callers see that we close at their next step; those inside a system call within its short deadline.
    std::vector<std::shared_ptr<Peer>> all;
    {
        std::lock_guard inner(peers_mutex);
        for (auto& [number, peer] : peers) all.push_back(peer);
        peers.clear();
    }
    for (const auto& peer : all) peer->close();
    while (calls.load() != 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    for (const auto& ticket : tickets.running()) {
        std::unique_lock waiting(ticket->mutex);
        ticket->ended.wait(waiting, [&] { return ticket->state != TicketState::kWaiting; });
    }
    workers.stop();
    waiters.stop();
    // From here on no call or transfer of this process touches a region; now the peers.
    std::vector<std::shared_ptr<Region>> gone;
    std::shared_ptr<const Regions> last = regions->all();
    for (const auto& region : *last) {
        if (Result<std::shared_ptr<Region>> removed = regions->remove(region->address)) {
            gone.push_back(std::move(*removed));
        }
    }
    if (shm != nullptr) shm->close();
    // One deadline for all of them.
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(options.timeout_ms);
    for (const auto& region : gone) (void)revoke(region.get(), end);
    for (const auto& loop : loops) loop->stop();
    closed = true;
}

// Waits until no thread, here or in a peer, is inside of what was taken out of the table.
Status Engine::Core::revoke(const Region* region, std::chrono::steady_clock::time_point end) {
    uint64_t generation = shm == nullptr ? 0 : shm->revoke();
    for (int round = 0;; ++round) {
        if (region->drained() && (shm == nullptr || shm->drained(generation))) return success();
        if (std::chrono::steady_clock::now() > end) {
            return Error{
                Code::kTimeout,
                "a peer is still inside of the region after " + std::to_string(options.timeout_ms) +
                    " ms; nothing new reaches it, but its memory must not be freed before the peer is gone"};
        }
        if (round < 100) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }
}

}  // namespace moonpool
