// An engine's life: how it is put together, what is registered with it, and how it ends.
//
// Threads: start() on the thread that creates the engine, before any other knows it; the other functions
// on any. close() and remove_region() wait, each with one deadline.
//
// What holds between two calls: transports, loops, carrier, identity and addresses are made by start() and
// only read afterwards. `calls` counts the callers that are inside. A region is in the table, or in
// `undrained`, or gone; only in the last case may its memory be freed. Once `closing` is set no call
// begins, every job that runs sees it, and no link begins another slice.
//
// Locks: close_mutex before all others; of peers_mutex, undrained_mutex and Reception::mutex none is held
// while another is taken, nor while anything waits for a peer.
#include "engine/core.hpp"

#include <chrono>
#include <thread>

#include "base/utf8.hpp"
#include "transport/frames.hpp"
#include "transport/outside/transport.hpp"

namespace moonpool {

namespace {

// close() waits that long also when timeout_ms is less: a transfer sees within a second that it is to end.
constexpr int kCloseMsMin = 3000;
constexpr std::chrono::milliseconds kLeave{200};

// Whether it is so by then. The condition may need a mutex that the caller holds.
template <class Condition>
bool wait_until(std::chrono::steady_clock::time_point end, Condition condition) NO_THREAD_SAFETY_ANALYSIS {
    for (int round = 0;; ++round) {
        if (condition()) return true;
        if (std::chrono::steady_clock::now() > end) return false;
        // A visit ends within microseconds; what takes longer is a peer's, which may take its whole
        // timeout.
        if (round < 100) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }
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
    if (options.file_io != "auto" && options.file_io != "io_uring" && options.file_io != "threads") {
        return Error{
            Code::kInvalidArgument,
            "files are read and written by auto, io_uring or threads, not by \"" + options.file_io + "\""};
    }
    if (options.io_threads == 0 || options.io_threads > 64) {
        return Error{Code::kInvalidArgument, "an engine has 1 to 64 I/O threads"};
    }
    if (options.connections_per_peer == 0 || options.connections_per_peer > 64) {
        return Error{Code::kInvalidArgument, "an engine has 1 to 64 connections to a peer"};
    }
    if (Status opened = open_outside(); !opened) return opened;
    if (Status sound = check_transports(); !sound) return sound;
    identity.name = options.name;
    identity.tenant = options.tenant;
    identity.segment = random_incarnation();
    identity.host_id = options.host_id;
    identity.boot_id = transport::read_boot_id();

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
    // Before the port is offered: the first caller may come at once.
    if (Status status = start_transports(); !status) return status;

    Listener* door = options.listener;
    if (door == nullptr) {
        ListenerOptions own;
        own.addresses = options.listen;
        own.token = options.token;
        own.incarnation = random_incarnation();
        own.tls = options.tls_server;
        own.journal = options.journal;
        Result<std::unique_ptr<Listener>> made = Listener::create(std::move(own));
        if (!made) return made.error();
        listener = std::move(*made);
        door = listener.get();
    }
    door->offer(std::string(kServiceEngine), service());
    addresses = door->addresses();
    return listener == nullptr ? success() : listener->start();
}

Status Engine::Core::open_outside() {
    if (options.outside_transports.size() > kEngineOutsideTransportsMax) {
        return Error{Code::kTooLarge, "an engine has at most " + std::to_string(kEngineOutsideTransportsMax) +
                                          " outside transports"};
    }
    for (const std::string& path : options.outside_transports) {
        Result<std::shared_ptr<const transport::outside::Library>> opened =
            transport::outside::Library::open(path);
        if (!opened) return opened.error();
        const std::string& name = (*opened)->name;
        bool built_in =
            std::ranges::find(options.registry, name, &transport::Factory::name) != options.registry.end();
        auto same = [&](const auto& library) { return library->name == name; };
        if (built_in || std::ranges::any_of(outside, same)) {
            return Error{
                Code::kInvalidArgument,
                "the outside transport " + path + " is not used: its name \"" + name + "\" is " +
                    (built_in ? "that of a transport of Moonpool's" : "that of another one of this engine")};
        }
        outside.push_back(std::move(*opened));
    }
    return success();
}

Status Engine::Core::check_transports() const {
    if (!options.transports) return success();
    std::vector<std::string> names;
    for (const transport::Factory& row : options.registry) names.emplace_back(row.name);
    for (const auto& library : outside) names.push_back(library->name);
    for (const std::string& name : *options.transports) {
        if (std::ranges::find(names, name) != names.end()) continue;
        return Error{Code::kInvalidArgument,
                     "there is no transport \"" + name + "\"; there are " + transport::names_text(names)};
    }
    if (!options.transports->empty()) return success();
    return Error{Code::kInvalidArgument, "an engine needs at least one of " + transport::names_text(names)};
}

Status Engine::Core::start_transports() {
    std::vector<EventLoop*> all;
    for (const auto& loop : loops) all.push_back(loop.get());
    transport::Context context{
        .identity = identity,
        .regions = regions,
        .shut_out = shut_out,
        .counters = counters,
        .deliver = [this](const std::string& peer,
                          std::span<const std::byte> message) { return deliver(peer, message); },
        .card = [this](int ordinal) { return cards.at(ordinal); },
        .ask = [this](std::string_view transport, const transport::SegmentId& peer,
                      Reader question) { return ask(transport, peer, question); },
        .left =
            [this](const transport::SegmentId& peer) {
                for (const Entry& entry : transports) entry.transport->peer_left(peer);
            },
        .loops = std::move(all),
        .waiters = waiters,
        .card_waiters = card_waiters,
        .closing = closing,
        .options = {.token = options.token,
                    .tls = options.tls_client,
                    .journal = options.journal,
                    .interface = options.interface,
                    .connections_per_peer = options.connections_per_peer,
                    .frame_bytes = options.frame_bytes,
                    .file_io = options.file_io,
                    .timeout_ms = options.timeout_ms,
                    .limits = options.limits,
                    .rdma = options.rdma,
                    .fabric = options.fabric,
                    .machine = options.machine}};
    for (const transport::Factory& row : options.registry) {
        std::unique_ptr<transport::Transport> made = row.make(context);
        // Before the one that reaches every peer, and that engines find each other by.
        if (carrier == nullptr && made->control() != nullptr) {
            for (const auto& library : outside) {
                auto adapter = std::make_unique<transport::outside::Transport>(context, library);
                if (Status added = add_transport({library->name, std::move(adapter), allows(library->name),
                                                  false, library->viable(), ""});
                    !added) {
                    return added;
                }
            }
        }
        // A transport that is not allowed is made all the same: it may be the one by which engines find
        // each other.
        if (Status added = add_transport(
                {row.name, std::move(made), allows(row.name), row.of_files, row.viable(context), ""});
            !added) {
            return added;
        }
    }
    if (carrier == nullptr) {
        return Error{Code::kInvalidArgument, "an engine needs a transport that carries its control channel"};
    }
    MutexLock lock(reception->mutex);
    reception->carrier = carrier;
    return success();
}

Status Engine::Core::add_transport(Entry entry) {
    if (!entry.allowed) {
        entry.unavailable = "it is not among the transports that this engine was given";
    } else if (!entry.not_viable.empty()) {
        entry.unavailable = entry.not_viable;
    } else if (Status status = entry.transport->start(); !status) {
        // Of options that cannot be: this host has not what they name.
        if (status.error().code == Code::kInvalidArgument) return status;
        entry.unavailable = status.error().text;
    }
    // Named devices are wanted: an engine that left them out for another reason than their ports would keep
    // silent about it.
    auto is_named = [&](std::string_view transport, const std::vector<std::string>& devices) {
        return entry.name == transport && !devices.empty() && (!entry.allowed || !entry.not_viable.empty());
    };
    if (is_named("rdma", options.rdma.devices) || is_named("efa", options.fabric.devices)) {
        const bool rdma = entry.name == "rdma";
        const std::string& device = (rdma ? options.rdma.devices : options.fabric.devices).front();
        return Error{Code::kInvalidArgument, std::string("an engine was given the ") +
                                                 (rdma ? "RDMA" : "EFA") + " device " + device +
                                                 ", and cannot use it: " + entry.unavailable};
    }
    if (carrier == nullptr) carrier = entry.transport->control();
    transports.push_back(std::move(entry));
    return success();
}

Service Engine::Core::service() {
    transport::PeerInfo self;
    self.name = identity.name;
    self.segment = identity.segment;
    self.host_id = identity.host_id;
    self.boot_id = identity.boot_id;
    Service service;
    // Both hold the Reception and not this engine: the listener may be shared, and calls them until its
    // own end. close() takes the carrier out of it: while that is there, so are this engine and its
    // transports.
    service.welcome = [this, tenant = options.tenant, reception = reception,
                       self](std::string_view asked) -> Result<std::vector<std::byte>> {
        if (asked != tenant) {
            return Error{Code::kAuth, "this engine does not serve the tenant \"" + std::string(asked) + "\""};
        }
        MutexLock lock(reception->mutex);
        if (reception->carrier == nullptr) return Error{Code::kUnavailable, "this engine is closed"};
        transport::PeerInfo now = self;
        for (const Entry& entry : transports) {  // each time: a NIC may have more ports than before
            if (entry.unavailable.empty()) entry.transport->offer(now);
        }
        return transport::encode_welcome(now);
    };
    service.serve = [reception = reception](AuthenticatedConnection caller) {
        MutexLock lock(reception->mutex);
        if (reception->carrier != nullptr) reception->carrier->adopt(std::move(caller));
    };
    return service;
}

int Engine::Core::close_ms() const { return std::max(options.timeout_ms, kCloseMsMin); }

Result<std::vector<std::byte>> Engine::Core::ask(std::string_view name, const transport::SegmentId& peer,
                                                 Reader question) {
    for (const Entry& entry : transports) {
        if (entry.name == name && entry.unavailable.empty()) return entry.transport->answer(peer, question);
    }
    return Error{Code::kUnavailable,
                 "this engine does not serve the transport \"" + std::string(name) + "\""};
}

// One deadline for all of it. Each step is done also when the one before ran out of time: nothing new begins,
// and what has not ended keeps what it uses. A repeated call waits for that.
Status Engine::Core::close(int again_ms) {
    if (fork.in_child()) return success();
    MutexLock lock(close_mutex);
    if (closed) return success();
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(close_begun ? again_ms : close_ms());
    if (!close_begun) begin_close();
    close_begun = true;
    in_use = !end_calls(end);
    // From here on no call or transfer of this process begins anything with a region; now the peers.
    if (!regions_taken) take_regions();
    regions_taken = true;
    bool drained = wait_until(end, [this] {
        MutexLock inner(undrained_mutex);
        std::erase_if(undrained, [this](const Leaving& leaving) { return has_left(leaving); });
        return undrained.empty();
    });
    if (in_use) {  // the loops stay, too: a late completion finds them
        return Error{Code::kTimeout,
                     "the engine is closed, but some of its transfers have not ended; the memory that they "
                     "use must not be freed before they have: close it again to wait for that"};
    }
    if (!drained) {  // the loops stay: they hear of the end of a peer
        return Error{Code::kTimeout,
                     "the engine is closed, but a peer or a device is still inside of its memory, which must "
                     "not be freed before it has left: close the engine again to wait for that"};
    }
    for (const auto& loop : loops) loop->stop();
    cards.clear();
    closed = true;
    return success();
}

// From the outside to the inside: first no peer finds this engine, then callers leave, then transfers end,
// then peers lose the regions, and the threads go last.
void Engine::Core::begin_close() {
    closing = true;
    for (const Entry& entry : transports) entry.transport->withdraw();
    {
        MutexLock inner(reception->mutex);
        reception->carrier = nullptr;
    }
    if (listener != nullptr) listener->stop();
    // Callers see that we close at their next step; those inside a system call within its short deadline.
    std::vector<std::shared_ptr<Peer>> all;
    {
        MutexLock inner(peers_mutex);
        for (auto& [number, peer] : peers) all.push_back(peer);
        peers.clear();
    }
    // Without the lock: it wakes callers, which may want it.
    for (const auto& peer : all) peer->close();
}

void Engine::Core::take_regions() {
    for (const auto& region : regions->all()->list()) {
        Result<std::shared_ptr<Region>> removed = regions->remove(region->address);
        if (!removed) continue;
        Leaving leaving = begin_revoke(std::move(*removed));
        MutexLock inner(undrained_mutex);
        undrained.push_back(std::move(leaving));
    }
    for (const Entry& entry : transports) entry.transport->close();
}

// Until no call, ticket or working thread of this engine is left. False: it is not so at `end`.
bool Engine::Core::end_calls(std::chrono::steady_clock::time_point end) {
    // In this order: callers may wait for tickets, tickets for the functions of the working threads.
    bool quiet = end_tickets(end);
    // A caller that waited for a ticket has its answer now, and needs a moment to leave.
    auto leave = std::max(end, std::chrono::steady_clock::now() + kLeave);
    // Looked at once in each round: calls that only hear that the engine is closed come and go.
    quiet = wait_until(leave, [this] { return calls.load() == 0; }) && quiet;
    quiet = end_tickets(end) && quiet;  // of calls that were inside
    quiet = workers.stop(end) && quiet;
    quiet = waiters.stop(end) && quiet;
    return card_waiters.stop(end) && quiet;
}

// A ticket that runs at `end` is over for its callers. Its job is not: it keeps the regions that it holds.
bool Engine::Core::end_tickets(std::chrono::steady_clock::time_point end) {
    for (const auto& ticket : tickets.running()) {
        if (ticket->wait(end)) continue;
        unended.push_back(ticket);
        TransferFailure failure;
        failure.error = Error{Code::kClosed, "the engine was closed before the transfer ended"};
        failure.settled = false;
        tickets.end(*ticket, TicketState::kCancelled, std::move(failure));
    }
    return wait_until(end, [this]() REQUIRES(close_mutex) {
        std::erase_if(unended, [](const auto& ticket) { return ticket->over.load(); });
        return unended.empty();
    });
}

// Looked at before the dialling, for the message; several threads that open at once may go beyond it by their
// number.
Status Engine::Core::check_room_for_peer() {
    MutexLock lock(peers_mutex);
    if (peers.size() < kEngineSegmentsMax) return success();
    return Error{Code::kTooLarge, "this engine already has " + std::to_string(kEngineSegmentsMax) +
                                      " segments open, the limit; close those that are not used"};
}

// By every transport that reaches it.
Result<uint32_t> Engine::Core::add_peer(transport::Contact contact) {
    std::vector<engine::Route> routes;
    std::vector<engine::NoRoute> no_routes;
    for (const Entry& entry : transports) {
        if (entry.of_files != (contact.info.file != nullptr)) {
            no_routes.push_back({entry.name, entry.of_files ? "it moves files only" : "it moves no files"});
            continue;
        }
        Result<std::shared_ptr<transport::Link>> link = connect(entry, contact);
        if (link) {
            // In the order of the registry, in which a transfer tries them until it knows what they cost.
            routes.push_back({entry.name, std::move(*link)});
        } else {
            no_routes.push_back({entry.name, link.error().text});
        }
    }
    if (std::ranges::all_of(routes, [](const auto& route) { return route.link->is_for_cards(); })) {
        std::string reasons;
        for (const engine::NoRoute& none : no_routes) {
            reasons += (reasons.empty() ? "" : "; ") + std::string(none.transport) + ": " + none.why;
        }
        return Error{Code::kUnavailable, "no transport reaches " + contact.info.address + ": " + reasons};
    }
    auto peer = std::make_shared<Peer>(std::move(contact), std::move(routes), std::move(no_routes), counters,
                                       workers, waiters, options.link_clock_ns);
    MutexLock lock(peers_mutex);
    uint32_t number = next_peer++;
    peers[number] = std::move(peer);
    return number;
}

Result<transport::RegionMemory> Engine::Core::memory_of(const MemoryRef& memory) {
    transport::RegionMemory region;
    region.pinned = memory.kind == MemoryKind::kPinned;
    if (memory.kind != MemoryKind::kDevice) return region;
    Result<std::shared_ptr<device::CardCopier>> opened = cards.at(memory.device);
    if (!opened) {
        return Error{opened.error().code, "memory of CUDA card " + std::to_string(memory.device) +
                                              " is not registered: " + opened.error().text};
    }
    region.kind = MemoryKind::kDevice;
    region.card = std::move(*opened);
    return region;
}

Status Engine::Core::add_region(uint64_t address, uint64_t length, const std::string& location,
                                transport::RegionMemory memory) {
    Result<std::shared_ptr<Region>> region = regions->add(address, length, location, std::move(memory));
    if (!region) return region.error();
    for (const Entry& entry : transports) {
        if (!entry.allowed) continue;
        if (Status added = entry.transport->add_region(**region); !added) {
            // The transports before this one know it already.
            (void)remove_region(address);
            return added;
        }
    }
    return success();
}

Status Engine::Core::remove_region(uint64_t address) {
    Result<std::shared_ptr<Region>> region = regions->remove(address);
    Leaving leaving;
    if (region) {
        leaving = begin_revoke(std::move(*region));
    } else {
        MutexLock lock(undrained_mutex);
        // A deregistration that timed out is asked for again by the same address.
        auto it = std::ranges::find(undrained, address, [](const Leaving& l) { return l.region->address; });
        if (it == undrained.end()) return region.error();
        leaving = std::move(*it);
        undrained.erase(it);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(options.timeout_ms);
    if (wait_until(end, [&] { return has_left(leaving); })) return success();
    MutexLock lock(undrained_mutex);
    if (undrained.size() < transport::kRegionsMax) undrained.push_back(std::move(leaving));
    return Error{Code::kTimeout,
                 "a peer is still inside of the region after " + std::to_string(options.timeout_ms) +
                     " ms; nothing new reaches it, but its memory must not be freed before the peer is gone"};
}

Engine::Core::Leaving Engine::Core::begin_revoke(std::shared_ptr<Region> region) {
    Leaving leaving{std::move(region), {}};
    for (const Entry& entry : transports) {
        leaving.revocations.push_back(entry.transport->revoke(*leaving.region));
    }
    return leaving;
}

// Whether no thread, here or in a peer, is inside of it, and no operation on it is in flight.
bool Engine::Core::has_left(const Leaving& leaving) {
    if (!leaving.region->drained()) return false;
    for (size_t i = 0; i < transports.size(); ++i) {
        if (!transports[i].transport->drained(leaving.revocations[i])) return false;
    }
    return true;
}

Status Engine::Core::shut_out_peer(const transport::SegmentId& segment) {
    if (segment == identity.segment) {
        return Error{Code::kInvalidArgument, "an engine does not shut out itself; close it"};
    }
    if (Status added = shut_out->add(segment); !added) return added;
    for (const Entry& entry : transports) entry.transport->shut_out(segment);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(options.timeout_ms);
    bool out = wait_until(end, [&] {
        return std::ranges::all_of(transports,
                                   [&](const Entry& entry) { return entry.transport->is_out(segment); });
    });
    if (out) return success();
    return Error{Code::kTimeout,
                 "the peer begins nothing any more, but is still inside of this engine's "
                 "memory after " +
                     std::to_string(options.timeout_ms) +
                     " ms, as when it was stopped or a card hangs; shut it out again to wait "
                     "for that"};
}

}  // namespace moonpool
