// The public face of an engine: each call is checked, counted and handed to the core.
//
// Threads: the caller's, any number at a time. Each function that does more than tell a constant holds a
// Core::Call for as long as it is inside, which fails once the engine is closed or in a child of fork(), and
// which close() waits for. So no function here looks at `closing`, and none runs while the core is taken
// apart.
//
// What a caller gives is judged here before anything is moved: addresses that a CPU cannot reach, more
// slices or segments than the limits, a message that is too long. What only the peer can know (its
// regions) is judged by the transports.
//
// No lock of the core is held while a peer is asked or memory is copied.
#include "engine/engine.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <thread>

#include "engine/core.hpp"
#include "memory/address.hpp"
#include "transport/frames.hpp"

namespace moonpool {

namespace {

constexpr std::string_view kFileScheme = "file://";
constexpr std::string_view kNodePrefix = "node:";
constexpr std::string_view kDaxPrefix = "dax:";

// The NUMA node that a location names, if it names one.
Result<std::optional<uint32_t>> node_of(std::string_view location) {
    if (!location.starts_with(kNodePrefix)) return std::optional<uint32_t>();
    location.remove_prefix(kNodePrefix.size());
    uint32_t node = 0;
    auto [end, error] = std::from_chars(location.begin(), location.end(), node);
    if (error == std::errc() && end == location.end()) return std::optional(node);
    return Error{Code::kInvalidArgument,
                 "\"node:" + std::string(location) + "\" names no NUMA node; \"node:1\" is an example"};
}

// machine: before /sys and /dev; "" but in tests.
Result<std::shared_ptr<transport::Memory>> memory_at(std::string_view location, uint64_t bytes,
                                                     const std::string& machine) {
    if (location.starts_with(kDaxPrefix)) {
        Result<DaxDevice> device = DaxDevice::find(location.substr(kDaxPrefix.size()), machine);
        if (!device) return device.error();
        return transport::Memory::create_on(*device, bytes);
    }
    Result<std::optional<uint32_t>> node = node_of(location);
    if (!node) return node.error();
    return transport::Memory::create(
        bytes, [] { return available_memory(); }, *node);
}

// Before anything is moved.
Status check(const TransferRequest& request) {
    if (request.slices.size() > kEngineSlicesMax) {
        return Error{Code::kTooLarge,
                     "a transfer has at most " + std::to_string(kEngineSlicesMax) + " slices; split it"};
    }
    if (request.segments.size() != 1 && request.segments.size() != request.slices.size()) {
        return Error{Code::kInvalidArgument, "a transfer needs one segment, or one for each slice"};
    }
    if (request.timeout_ms < 0) {
        return Error{Code::kInvalidArgument, "the timeout of a transfer must not be below 0 ms, and is " +
                                                 std::to_string(request.timeout_ms)};
    }
    return request.notify ? engine::check_message(*request.notify) : success();
}

}  // namespace

Result<std::shared_ptr<Engine>> Engine::create(EngineOptions options) {
    auto core = std::make_unique<Core>(std::move(options));
    // The engine is made also when it did not start: closing it is what takes back the half that did.
    Status status = core->start();
    std::shared_ptr<Engine> engine(new Engine(std::move(core)));
    if (!status) {
        (void)engine->close();  // the error is why it did not start
        return status.error();
    }
    return engine;
}

Engine::Engine(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Engine::~Engine() {
    (void)core_->close(0);  // after a close() that timed out it only looks
    // In a child of fork() the threads and locks are the parent's: its memory is left as it is. So it is when
    // transfers have outlived close().
    if (core_->fork.in_child() || core_->in_use) (void)core_.release();
}

Status Engine::close() { return core_->close(core_->close_ms()); }

const std::string& Engine::name() const { return core_->options.name; }
const transport::SegmentId& Engine::segment_id() const { return core_->identity.segment; }
const std::vector<std::string>& Engine::addresses() const { return core_->addresses; }
std::vector<std::pair<std::string, std::string>> Engine::transports() const {
    std::vector<std::pair<std::string, std::string>> rows;
    for (const Core::Entry& entry : core_->transports) rows.emplace_back(entry.name, entry.unavailable);
    return rows;
}
int Engine::event_fd() const { return core_->tickets.event_fd(); }

Result<std::shared_ptr<transport::Memory>> Engine::allocate(uint64_t bytes, const std::string& location) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<transport::Memory>> memory = memory_at(location, bytes, core_->options.machine);
    if (!memory) return memory.error();
    // Of the size that was asked for, though the memory is rounded up to pages: peers see no more.
    auto address = reinterpret_cast<uint64_t>((*memory)->data());
    transport::RegionMemory arena;
    arena.kind = MemoryKind::kHostArena;
    arena.memory = *memory;
    Status added = core_->add_region(address, bytes, location, std::move(arena));
    if (!added) return added.error();
    return *memory;
}

// No caller's word is taken for it: what is registered is touched later, by peers, where a fault would end
// the process.
Result<MemoryRef> Engine::describe(uint64_t address, uint64_t length) const {
    Slice range{0, address, length, {}};
    if (address == 0 || length == 0 || address + length < address) {
        return Error{Code::kInvalidArgument,
                     "a region needs an address and a length: " + transport::range_text(range) + " is none"};
    }
    Result<MemoryRef> found = describe_memory(address, length);
    if (found) return found;
    return Error{Code::kInvalidArgument,
                 "the range " + transport::range_text(range) + " is not registered: " + found.error().text +
                     "; register memory that the CPU may read and write, or memory of a CUDA card"};
}

Status Engine::register_region(uint64_t address, uint64_t length, const std::string& location,
                               std::string* label) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<MemoryRef> found = describe(address, length);
    if (!found) return found.error();
    Result<transport::RegionMemory> memory = core_->memory_of(*found);
    if (!memory) return memory.error();
    std::string shown = !location.empty()                    ? location
                        : found->kind == MemoryKind::kDevice ? "cuda:" + std::to_string(found->device)
                                                             : "cpu:0";
    Status added = core_->add_region(address, length, shown, std::move(*memory));
    if (label != nullptr) *label = std::move(shown);
    return added;
}

Status Engine::deregister_region(uint64_t address) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    return core_->remove_region(address);
}

Status Engine::shut_out(const transport::SegmentId& segment) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    return core_->shut_out_peer(segment);
}

Status Engine::admit(const transport::SegmentId& segment) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    core_->shut_out->remove(segment);
    return success();
}

Result<uint32_t> Engine::open(const std::string& address) {
    Core& core = *core_;
    Core::Call call(core);
    if (!call.ok()) return call.error();
    if (Status room = core.check_room_for_peer(); !room) return room.error();
    if (address.starts_with(kFileScheme)) {
        std::string path = address.substr(kFileScheme.size());
        if (path.starts_with('/')) return open_file(path);
        return Error{Code::kInvalidArgument, address + " names no file of this host; file:///PATH does"};
    }
    // Without a lock: a peer that hangs stops only the call that wants it.
    Result<transport::Contact> contact = core.carrier->call(address);
    if (!contact) return contact.error();
    return core.add_peer(std::move(*contact));
}

Result<uint32_t> Engine::open_file(const std::string& path, const io::OpenOptions& options) {
    Core& core = *core_;
    Core::Call call(core);
    if (!call.ok()) return call.error();
    if (Status room = core.check_room_for_peer(); !room) return room.error();
    Result<std::shared_ptr<io::OpenedFile>> file = core.options.open_file(path, options);
    if (!file) return file.error();
    transport::Contact contact;
    contact.info.name = path;
    contact.info.address = std::string(kFileScheme) + path;
    contact.info.segment = random_incarnation();
    contact.info.host_id = core.identity.host_id;
    contact.info.boot_id = core.identity.boot_id;
    contact.info.file = std::move(*file);
    return core.add_peer(std::move(contact));
}

Status Engine::close_segment(uint32_t segment) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<Peer>> peer = core_->find_peer(segment);
    if (!peer) return peer.error();
    {
        MutexLock lock(core_->peers_mutex);
        core_->peers.erase(segment);
    }
    // Transfers that run hold the peer, and end soon: a segment is closed for those that run, too.
    (*peer)->close();
    return success();
}

Result<SegmentInfo> Engine::segment(uint32_t segment) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<Peer>> found = core_->find_peer(segment);
    if (!found) return found.error();
    Peer& peer = **found;
    SegmentInfo info;
    info.name = peer.info().name;
    info.id = peer.info().segment;
    info.host_id = peer.info().host_id;
    info.address = peer.info().address;
    if (peer.info().file != nullptr) {
        Result<uint64_t> bytes = peer.info().file->look();
        if (!bytes) return bytes.error();
        info.regions.push_back({0, *bytes, MemoryKind::kFile, "", peer.transport_for(MemoryKind::kFile)});
        return info;
    }
    Result<std::vector<std::byte>> answer = peer.control()->ask(
        Kind::kEngineRegions, transport::regions_question(peer.info()), core_->options.timeout_ms);
    auto failed = [&](const Error& error) {
        return Error{error.code, peer.who() + " does not tell its regions: " + error.text};
    };
    if (!answer) return failed(answer.error());
    Reader r(*answer);
    // The generation, of shared memory only.
    (void)r.number<uint64_t>();
    std::optional<std::vector<transport::RegionRow>> rows = transport::decode_regions(r);
    if (!rows) return failed(Error{Code::kProtocol, "the list is unreadable"});
    for (const transport::RegionRow& row : *rows) {
        info.regions.push_back(
            {row.address, row.length, row.kind, row.location, peer.transport_for(row.kind)});
    }
    return info;
}

Result<std::vector<SegmentPath>> Engine::paths(uint32_t segment) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<Peer>> peer = core_->find_peer(segment);
    if (!peer) return peer.error();
    std::vector<SegmentPath> paths;
    std::vector<size_t> with_routes;  // their rows change places among each other
    std::vector<std::string_view> tried = (*peer)->tried();
    for (const Core::Entry& entry : core_->transports) {
        bool has_route = std::ranges::find(tried, entry.name) != tried.end();
        if (has_route) with_routes.push_back(paths.size());
        paths.push_back((*peer)->path_of(has_route ? tried[with_routes.size() - 1] : entry.name));
    }
    return paths;
}

namespace {

// The links end a job, and close() ends a ticket whose job does not.
constexpr auto kForEver = std::chrono::steady_clock::time_point::max();

TicketStatus status_of(Ticket& ticket) {
    TicketStatus status;
    {
        MutexLock lock(ticket.mutex);
        status.state = ticket.state;
        status.failure = ticket.failure;
    }
    status.slices.resize(ticket.slices);
    for (const auto& share : ticket.shares) {
        // While it runs this is a moment's view: slices and bytes are written by the threads that carry
        // it.
        status.bytes_done += share->job->bytes_done;
        for (size_t i = 0; i < share->slices.size(); ++i) {
            status.slices[share->places.empty() ? i : share->places[i]] = share->states[i].load();
        }
    }
    return status;
}

}  // namespace

Result<uint64_t> Engine::transfer(const TransferRequest& request, TicketStatus* status) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    if (Status sound = check(request); !sound) return sound.error();
    // One peer: the caller carries the transfer itself, without a ticket, and a small one allocates
    // nothing.
    bool same = !request.segments.empty() && std::ranges::all_of(request.segments, [&](uint32_t s) {
        return s == request.segments.front();
    });
    if (same) {
        Result<std::shared_ptr<Peer>> peer = core_->find_peer(request.segments.front());
        if (!peer) return peer.error();
        Result<uint64_t> bytes = core_->transfer_alone(request, *peer, status);
        core_->counters.transfers_total.fetch_add(1, std::memory_order_relaxed);
        if (!bytes) core_->counters.transfers_failed_total.fetch_add(1, std::memory_order_relaxed);
        return bytes;
    }
    Result<uint64_t> id = submit(request);
    if (!id) return id.error();
    std::shared_ptr<Ticket> ticket = core_->tickets.find(*id);
    (void)ticket->wait(kForEver);
    core_->tickets.release(*id);
    std::optional<Error> failed;
    {
        MutexLock lock(ticket->mutex);
        if (ticket->state != TicketState::kDone) failed = ticket->failure.error;
    }
    if (failed) {
        if (status != nullptr) *status = status_of(*ticket);
        return *failed;
    }
    uint64_t bytes = 0;
    for (const auto& share : ticket->shares) bytes += share->job->bytes_done;
    return bytes;
}

Result<uint64_t> Engine::submit(const TransferRequest& request) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    if (Status sound = check(request); !sound) return sound.error();
    Result<std::shared_ptr<Ticket>> ticket = core_->make_ticket(request);
    if (!ticket) return ticket.error();
    if (Status status = core_->tickets.add(*ticket); !status) return status.error();
    // A small copy is done within this call; its ticket has ended before the caller has its number.
    core_->launch(*ticket);
    return (*ticket)->id;
}

namespace {

Error no_ticket(uint64_t id) {
    return Error{Code::kInvalidArgument, "there is no ticket " + std::to_string(id) + ", or it was released"};
}

}  // namespace

Result<bool> Engine::wait(uint64_t id, int timeout_ms) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    std::shared_ptr<Ticket> ticket = core_->tickets.find(id);
    if (ticket == nullptr) return no_ticket(id);
    return ticket->wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms));
}

Result<bool> Engine::is_over(uint64_t id) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    std::shared_ptr<Ticket> ticket = core_->tickets.find(id);
    if (ticket == nullptr) return no_ticket(id);
    if (!ticket->wait(std::chrono::steady_clock::now())) return false;
    MutexLock lock(ticket->mutex);
    return ticket->state == TicketState::kDone || !core_->cards.has_abandoned();
}

Result<bool> Engine::end(uint64_t id, int timeout_ms) {
    if (Status asked = cancel(id); !asked) return asked.error();
    Result<bool> ended = wait(id, timeout_ms);
    if (!ended || !*ended) return ended;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (;;) {
        Result<bool> over = is_over(id);
        if (!over || *over || std::chrono::steady_clock::now() >= limit) return over;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

Result<TicketStatus> Engine::status(uint64_t id) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    std::shared_ptr<Ticket> ticket = core_->tickets.find(id);
    if (ticket == nullptr) return no_ticket(id);
    return status_of(*ticket);
}

Status Engine::cancel(uint64_t id) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    std::shared_ptr<Ticket> ticket = core_->tickets.find(id);
    if (ticket == nullptr) return no_ticket(id);
    for (const auto& share : ticket->shares) share->job->cancelled = true;
    return success();
}

// Waits for the end: until then the transfer may write into memory that its owner is about to use.
Status Engine::release(uint64_t id) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    std::shared_ptr<Ticket> ticket = core_->tickets.find(id);
    if (ticket == nullptr) return no_ticket(id);
    for (const auto& share : ticket->shares) share->job->cancelled = true;
    (void)ticket->wait(kForEver);
    core_->tickets.release(id);
    return success();
}

Result<bool> Engine::has_abandoned_copies() {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    return core_->cards.has_abandoned();
}

Result<std::vector<uint64_t>> Engine::poll() {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    return core_->tickets.poll();
}

Status Engine::notify(uint32_t segment, std::string_view message) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<Peer>> peer = core_->find_peer(segment);
    if (!peer) return peer.error();
    return core_->tell(**peer, message, core_->options.timeout_ms);
}

Result<std::vector<std::pair<std::string, std::string>>> Engine::notifications() {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    return core_->inbox.take();
}

bool Engine::check_integrity() const {
    if (core_->fork.in_child()) return true;
    return core_->regions->check_integrity() && core_->inbox.size() <= kEngineInboxMessagesMax &&
           core_->tickets.size() <= kEngineTicketsMax && core_->tickets.slices_open() <= kEngineSlicesOpenMax;
}

Status Engine::in_this_process() const {
    return core_->fork.in_child() ? Status(engine::forked()) : success();
}

std::vector<std::pair<std::string, uint64_t>> Engine::metrics() const {
    const Core& core = *core_;
    if (core.fork.in_child()) return {};
    // Read one by one while transfers go on: sums of them may be off by what moves at that moment.
    const transport::Counters& c = core.counters;
    transport::Metrics rows;
    for (const Core::Entry& entry : core.transports) entry.transport->metrics(std::string(entry.name), rows);
    auto& tickets = core_->tickets;
    uint64_t handshakes_refused = 0;
    if (core.listener != nullptr) {
        const ListenerCounters& door = core.listener->counters();
        handshakes_refused = door.auth_failures_total + door.protocol_errors_total +
                             door.handshake_timeouts_total + door.refused_total;
    }
    rows.insert(rows.end(), {{"transfers_total", c.transfers_total},
                             {"transfers_failed_total", c.transfers_failed_total},
                             {"retries_total", c.retries_total},
                             {"slices_refused_total", c.slices_refused_total},
                             {"protocol_errors_total", c.protocol_errors_total},
                             {"handshakes_refused_total", handshakes_refused},
                             {"notifications_sent_total", c.notifications_sent_total},
                             {"notifications_received_total", c.notifications_received_total},
                             {"notifications_refused_total", c.notifications_refused_total},
                             {"inbox_messages", core_->inbox.size()},
                             {"inbox_messages_max", kEngineInboxMessagesMax},
                             {"regions", core.regions->all()->size()},
                             {"regions_max", transport::kRegionsMax},
                             {"tickets", tickets.size()},
                             {"tickets_max", kEngineTicketsMax},
                             {"slices_open", tickets.slices_open()},
                             {"slices_open_max", kEngineSlicesOpenMax}});
    return rows;
}

}  // namespace moonpool
