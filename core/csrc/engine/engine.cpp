#include "engine/engine.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <unordered_map>

#include "engine/inbox.hpp"
#include "engine/peer.hpp"
#include "engine/tickets.hpp"
#include "transport/frames.hpp"
#include "transport/loop.hpp"
#include "transport/loopback/link.hpp"
#include "transport/shm/link.hpp"
#include "transport/shm/target.hpp"
#include "transport/tcp/link.hpp"
#include "transport/tcp/target.hpp"
#include "wire/dial.hpp"

namespace moonpool {

using engine::Outcome;
using engine::Peer;
using engine::Share;
using engine::Ticket;
using transport::Job;
using transport::Region;
using transport::RegionKind;
using transport::Regions;
using transport::Slice;
using transport::SliceState;

namespace {

constexpr uint32_t kWorkersMax = 16;
constexpr uint64_t kInlineBytesMax = 256u
                                     << 10;  // of a submitted copy: done at once, as cheap as handing over

// What the doorman calls: it may outlive the engine.
struct Reception {
    std::mutex mutex;
    transport::tcp::Target* target = nullptr;
};

std::string hex(std::span<const uint8_t> bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string text;
    for (uint8_t byte : bytes) {
        text.push_back(digits[byte >> 4]);
        text.push_back(digits[byte & 15]);
    }
    return text;
}

// Whether every page of a range is mapped: what is registered is touched later, by peers, where a fault would
// end the process.
bool is_mapped(uint64_t address, uint64_t length) {
    auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    uint64_t begin = address / page * page;
    uint64_t end = address + length;
    constexpr uint64_t kStep = 64u << 20;
    std::vector<unsigned char> pages(kStep / page);
    for (uint64_t at = begin; at < end; at += kStep) {
        uint64_t n = std::min(kStep, end - at);
        if (::mincore(reinterpret_cast<void*>(at), n, pages.data()) != 0 && errno == ENOMEM) return false;
    }
    return true;
}

// The caller's own transfer: what it needs lives as long as its thread, so that a small one allocates
// nothing.
struct Desk {
    std::unique_ptr<std::atomic<SliceState>[]> states;
    size_t room = 0;
    std::vector<Region*> locals;

    void prepare(size_t n) {
        if (n > room) {
            room = std::max<size_t>(n, 128);
            states = std::make_unique<std::atomic<SliceState>[]>(room);
        }
        locals.resize(n);
    }
};

Status check_message(std::string_view message) {
    if (message.size() <= transport::kNotifyBytesMax) return success();
    return Error{Code::kTooLarge, "a notification has at most " + std::to_string(transport::kNotifyBytesMax) +
                                      " bytes, not " + std::to_string(message.size())};
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
    return request.notify ? check_message(*request.notify) : success();
}

}  // namespace

struct Engine::Core {
    explicit Core(EngineOptions o)
        : options(std::move(o)), inbox(kEngineInboxMessagesMax, kEngineInboxBytesMax), workers(kWorkersMax) {}

    EngineOptions options;
    ForkGuard fork;
    std::atomic<bool> closing{false};
    std::atomic<int> calls{0};  // inside of us
    std::mutex close_mutex;
    bool closed = false;

    transport::Counters counters;
    transport::Identity identity;
    std::shared_ptr<transport::RegionTable> regions = std::make_shared<transport::RegionTable>();
    std::vector<std::pair<std::string, std::string>> transports;
    std::vector<std::string> addresses;
    engine::Inbox inbox;
    engine::Tickets tickets;

    std::shared_ptr<transport::loopback::Target> loopback;
    std::unique_ptr<transport::shm::Target> shm;
    std::unique_ptr<transport::tcp::Target> tcp;
    std::vector<std::unique_ptr<transport::Loop>> loops;
    transport::Workers workers;
    std::shared_ptr<Reception> reception = std::make_shared<Reception>();
    std::unique_ptr<Doorman> doorman;

    std::mutex peers_mutex;
    std::unordered_map<uint32_t, std::shared_ptr<Peer>> peers;
    uint32_t next_peer = 1;

    // ---- life

    Status start();
    Status start_transports();
    Purpose purpose();
    void close();
    Status revoke(const Region* region, int timeout_ms);
    bool allows(const char* transport) const {
        return !options.transports ||
               std::ranges::find(*options.transports, transport) != options.transports->end();
    }
    Status deliver(const std::string& peer, std::span<const std::byte> message) {
        std::string text(reinterpret_cast<const char*>(message.data()), message.size());
        Status status = inbox.put(peer, std::move(text));
        if (!status) {
            counters.notifications_refused_total.fetch_add(1);
            return status;
        }
        counters.notifications_received_total.fetch_add(1);
        tickets.wake();
        return status;
    }

    // ---- calls

    class Call;
    Result<std::shared_ptr<Peer>> find_peer(uint32_t segment);
    Status place_locals(std::span<const Slice> slices, const Regions& known, std::span<Region*> locals);
    void prepare(Job& job, const TransferRequest& request);
    Result<uint64_t> transfer_alone(const TransferRequest& request, const std::shared_ptr<Peer>& peer,
                                    TicketStatus* status);
    Result<std::shared_ptr<Ticket>> make_ticket(const TransferRequest& request);
    void launch(const std::shared_ptr<Ticket>& ticket);
    void end_share(const std::shared_ptr<Ticket>& ticket);
    void end_ticket(const std::shared_ptr<Ticket>& ticket);
    Status tell(Peer& peer, std::string_view message);
    static TransferFailure untold(Peer& peer, const Error& error) {
        return TransferFailure{error, peer.info().address, peer.control().path(), error.text};
    }
};

// Every public call is one: it fails after close(), and close() waits for it.
class Engine::Core::Call {
   public:
    explicit Call(Core& core) : core_(core) {
        if (core.fork.in_child()) {
            error_ =
                Error{Code::kForked, "this engine belongs to the parent process; make a new one after fork"};
            return;
        }
        core.calls.fetch_add(1);
        entered_ = true;
        if (core.closing.load()) error_ = Error{Code::kClosed, "this engine is closed"};
    }
    ~Call() {
        if (entered_) core_.calls.fetch_sub(1);
    }
    Call(const Call&) = delete;

    bool ok() const { return error_.text.empty(); }
    const Error& error() const { return error_; }

   private:
    Core& core_;
    bool entered_ = false;
    Error error_;
};

// ---- life

Status Engine::Core::start() {
    if (options.token.empty()) return Error{Code::kInvalidArgument, "an engine needs a cluster token"};
    if (options.name.size() > transport::kNameBytesMax || options.host_id.size() > 256 ||
        options.tenant.size() > 256) {
        return Error{Code::kInvalidArgument, "names, host ids and tenants of engines have at most 256 bytes"};
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
        Result<std::unique_ptr<transport::Loop>> loop = transport::Loop::start("moonpool-io");
        if (!loop) return loop.error();
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
    std::vector<transport::Loop*> all;
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
    // From here on nobody inside of this process touches a region; now the peers.
    std::vector<std::shared_ptr<Region>> gone;
    std::shared_ptr<const Regions> last = regions->all();
    for (const auto& region : *last) {
        if (Result<std::shared_ptr<Region>> removed = regions->remove(region->address)) {
            gone.push_back(std::move(*removed));
        }
    }
    if (shm != nullptr) shm->close();
    for (const auto& region : gone) (void)revoke(region.get(), options.timeout_ms);
    for (const auto& loop : loops) loop->stop();
    closed = true;
}

// Waits until nobody, here or in a peer, is inside of what was taken out of the table.
Status Engine::Core::revoke(const Region* region, int timeout_ms) {
    uint64_t generation = shm == nullptr ? 0 : shm->revoke();
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    for (int round = 0;; ++round) {
        if (region->drained() && (shm == nullptr || shm->drained(generation))) return success();
        if (std::chrono::steady_clock::now() > end) {
            return Error{
                Code::kTimeout,
                "a peer is still inside of the region after " + std::to_string(timeout_ms) +
                    " ms; nothing new reaches it, but its memory must not be freed before the peer is gone"};
        }
        if (round < 100) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }
}

// ---- transfers

Result<std::shared_ptr<Peer>> Engine::Core::find_peer(uint32_t segment) {
    std::lock_guard lock(peers_mutex);
    auto it = peers.find(segment);
    if (it == peers.end()) {
        return Error{Code::kInvalidArgument,
                     "no segment " + std::to_string(segment) + " is open; open(address) gives its number"};
    }
    return it->second;
}

Status Engine::Core::place_locals(std::span<const Slice> slices, const Regions& known,
                                  std::span<Region*> locals) {
    Region* last = nullptr;
    for (size_t i = 0; i < slices.size(); ++i) {
        const Slice& slice = slices[i];
        locals[i] = last;
        if (slice.length == 0) continue;
        if (last == nullptr || !last->contains(slice.local, slice.length)) {
            const std::shared_ptr<Region>* found = transport::find_region(known, slice.local, slice.length);
            if (found == nullptr) {
                Slice local{0, slice.local, slice.length, slice.direction};
                return Error{Code::kInvalidArgument, "the local range " + transport::range_text(local) +
                                                         " of slice " + std::to_string(i) +
                                                         " lies in no registered region; register it first"};
            }
            last = found->get();
            locals[i] = last;
        }
    }
    return success();
}

void Engine::Core::prepare(Job& job, const TransferRequest& request) {
    job.background = request.background;
    job.timeout_ms = request.timeout_ms > 0 ? request.timeout_ms : options.timeout_ms;
    job.closing = &closing;
    job.progress_ns = transport::now_ns();
    job.waiting = job.slices.size();
    for (size_t i = 0; i < job.slices.size(); ++i) {
        bool empty = job.slices[i].length == 0;
        job.states[i].store(empty ? SliceState::kDone : SliceState::kWaiting, std::memory_order_relaxed);
        if (empty) --job.waiting;
    }
}

// Tells how far a job came that did not go well; its error.
Error report(const Job& job, TransferFailure failure, TicketStatus* status) {
    Error error = failure.error;
    if (status == nullptr) return error;
    status->state = job.stopped() && !job.refused ? TicketState::kCancelled : TicketState::kFailed;
    status->bytes_done = job.bytes_done;
    status->slices.resize(job.slices.size());
    SliceState rest = job.stopped() ? SliceState::kCancelled : SliceState::kFailed;
    for (size_t i = 0; i < job.slices.size(); ++i) {
        status->slices[i] = job.is_waiting(i) ? rest : job.states[i].load(std::memory_order_relaxed);
    }
    status->failure = std::move(failure);
    return error;
}

Result<uint64_t> Engine::Core::transfer_alone(const TransferRequest& request,
                                              const std::shared_ptr<Peer>& peer, TicketStatus* status) {
    static thread_local Desk desk;
    desk.prepare(request.slices.size());
    Job job;
    job.slices = request.slices;
    job.states = {desk.states.get(), request.slices.size()};
    job.locals = desk.locals;
    job.regions = regions->all();
    if (Status placed = place_locals(request.slices, *job.regions, desk.locals); !placed) {
        return placed.error();
    }
    prepare(job, request);
    Outcome outcome;
    if (job.waiting != 0) outcome = peer->run(job);
    if (job.waiting != 0 && closing) return Error{Code::kClosed, "this engine was closed meanwhile"};
    if (job.waiting != 0 || job.refused) return report(job, peer->explain(job, outcome), status);
    if (request.notify) {
        if (Status told = tell(*peer, *request.notify); !told) {
            return report(job, untold(*peer, told.error()), status);
        }
    }
    return job.bytes_done.load();
}

Status Engine::Core::tell(Peer& peer, std::string_view message) {
    if (Status sound = check_message(message); !sound) return sound;
    auto bytes = std::as_bytes(std::span(message.data(), message.size()));
    Result<std::vector<std::byte>> answer = peer.control().ask(
        Kind::kEngineNotify, std::vector<std::byte>(bytes.begin(), bytes.end()), options.timeout_ms);
    if (!answer) {
        return Error{answer.error().code, "the notification for engine \"" + peer.info().name + "\" at " +
                                              peer.info().address + " failed: " + answer.error().text};
    }
    counters.notifications_sent_total.fetch_add(1);
    return success();
}

Result<std::shared_ptr<Ticket>> Engine::Core::make_ticket(const TransferRequest& request) {
    auto ticket = std::make_shared<Ticket>();
    ticket->slices = request.slices.size();
    if (request.notify) ticket->notify = std::string(*request.notify);
    // One share for each peer, in the order of their first slices.
    std::unordered_map<uint32_t, Share*> by_segment;
    auto share_of = [&](uint32_t segment) -> Result<Share*> {
        if (auto it = by_segment.find(segment); it != by_segment.end()) return it->second;
        Result<std::shared_ptr<Peer>> peer = find_peer(segment);
        if (!peer) return peer.error();
        ticket->shares.push_back(std::make_unique<Share>());
        Share* share = ticket->shares.back().get();
        share->peer = std::move(*peer);
        by_segment[segment] = share;
        return share;
    };
    if (request.segments.size() == 1) {
        Result<Share*> share = share_of(request.segments[0]);
        if (!share) return share.error();
        (*share)->slices.assign(request.slices.begin(), request.slices.end());
    } else {
        for (size_t i = 0; i < request.slices.size(); ++i) {
            Result<Share*> share = share_of(request.segments[i]);
            if (!share) return share.error();
            (*share)->slices.push_back(request.slices[i]);
            (*share)->places.push_back(i);
        }
    }
    std::shared_ptr<const Regions> known = regions->all();
    for (const auto& share : ticket->shares) {
        size_t n = share->slices.size();
        share->states = std::make_unique<std::atomic<SliceState>[]>(n);
        share->locals.resize(n);
        if (Status status = place_locals(share->slices, *known, share->locals); !status) {
            return status.error();
        }
        auto job = std::make_shared<Job>();
        job->slices = share->slices;
        job->states = {share->states.get(), n};
        job->locals = share->locals;
        job->regions = known;
        prepare(*job, request);
        share->job = std::move(job);
    }
    return ticket;
}

void Engine::Core::launch(const std::shared_ptr<Ticket>& ticket) {
    ticket->shares_left = ticket->shares.size();
    if (ticket->shares.empty()) {
        ticket->shares_left = 1;
        return end_share(ticket);
    }
    for (const auto& owned : ticket->shares) {
        Share* share = owned.get();
        uint64_t bytes = 0;
        for (const Slice& slice : share->slices) bytes += slice.length;
        if (share->job->waiting == 0) {
            end_share(ticket);
        } else if (share->peer->copies() && bytes <= kInlineBytesMax) {
            share->outcome = share->peer->run(*share->job);
            end_share(ticket);
        } else {
            share->peer->post(share->job, workers, [this, ticket, share](Outcome outcome) {
                share->outcome = std::move(outcome);
                end_share(ticket);
            });
        }
    }
}

void Engine::Core::end_share(const std::shared_ptr<Ticket>& ticket) {
    if (ticket->shares_left.fetch_sub(1) != 1) return;
    bool whole = true;
    for (const auto& share : ticket->shares) {
        whole = whole && share->job->waiting == 0 && !share->job->refused;
    }
    // The message waits for an answer: not on a thread that others wait for.
    if (whole && ticket->notify) return workers.post(false, [this, ticket] { end_ticket(ticket); });
    end_ticket(ticket);
}

void Engine::Core::end_ticket(const std::shared_ptr<Ticket>& ticket) {
    TicketState state = TicketState::kDone;
    TransferFailure failure;
    for (const auto& share : ticket->shares) {
        Job& job = *share->job;
        if (job.waiting == 0 && !job.refused) continue;
        if (job.waiting != 0 && job.stopped() && !job.refused) {
            if (state == TicketState::kDone) {
                state = TicketState::kCancelled;
                job.refused = true;
                job.refusal = closing ? Error{Code::kClosed, "the engine was closed meanwhile"}
                                      : Error{Code::kInvalidArgument, "it was cancelled"};
                failure = share->peer->explain(job, share->outcome);
            }
        } else if (state != TicketState::kFailed) {
            state = TicketState::kFailed;
            failure = share->peer->explain(job, share->outcome);
        }
        SliceState rest = job.stopped() ? SliceState::kCancelled : SliceState::kFailed;
        for (size_t i = 0; i < job.slices.size(); ++i) {
            if (job.is_waiting(i)) job.states[i].store(rest, std::memory_order_relaxed);
        }
    }
    if (state == TicketState::kDone && ticket->notify) {
        for (const auto& share : ticket->shares) {
            Status status = tell(*share->peer, *ticket->notify);
            if (status) continue;
            state = TicketState::kFailed;
            failure = untold(*share->peer, status.error());
        }
    }
    counters.transfers_total.fetch_add(1);
    if (state == TicketState::kFailed) counters.transfers_failed_total.fetch_add(1);
    tickets.end(*ticket, state, std::move(failure));
}

// ---- the public face

Result<std::shared_ptr<Engine>> Engine::create(EngineOptions options) {
    auto core = std::make_unique<Core>(std::move(options));
    Status status = core->start();
    std::shared_ptr<Engine> engine(new Engine(std::move(core)));
    if (!status) {
        engine->close();
        return status.error();
    }
    return engine;
}

Engine::Engine(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Engine::~Engine() {
    close();
    // In a child of fork() the threads and locks are the parent's: its memory is left as it is.
    if (core_->fork.in_child()) (void)core_.release();
}

void Engine::close() { core_->close(); }

const std::string& Engine::name() const { return core_->options.name; }
const transport::SegmentId& Engine::segment_id() const { return core_->identity.segment; }
const std::vector<std::string>& Engine::addresses() const { return core_->addresses; }
std::vector<std::pair<std::string, std::string>> Engine::transports() const { return core_->transports; }
int Engine::event_fd() const { return core_->tickets.event_fd(); }

Result<std::shared_ptr<transport::Memory>> Engine::allocate(uint64_t bytes, const std::string& location) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<transport::Memory>> memory = transport::Memory::create(bytes);
    if (!memory) return memory.error();
    auto address = reinterpret_cast<uint64_t>((*memory)->data());
    Result<std::shared_ptr<Region>> region =
        core_->regions->add(address, bytes, RegionKind::kOwn, location, *memory);
    if (!region) return region.error();
    return *memory;
}

Status Engine::register_region(uint64_t address, uint64_t length, const std::string& location) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    if (address != 0 && length != 0 && address + length > address && !is_mapped(address, length)) {
        return Error{Code::kInvalidArgument, "the range " +
                                                 transport::range_text(Slice{0, address, length, {}}) +
                                                 " is not mapped memory of this process"};
    }
    Result<std::shared_ptr<Region>> region =
        core_->regions->add(address, length, RegionKind::kForeign, location, nullptr);
    if (!region) return region.error();
    return success();
}

Status Engine::deregister_region(uint64_t address) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<Region>> region = core_->regions->remove(address);
    if (!region) return region.error();
    return core_->revoke(region->get(), core_->options.timeout_ms);
}

Result<uint32_t> Engine::open(const std::string& address) {
    Core& core = *core_;
    Core::Call call(core);
    if (!call.ok()) return call.error();
    {
        std::lock_guard lock(core.peers_mutex);
        if (core.peers.size() >= kEngineSegmentsMax) {
            return Error{Code::kTooLarge, "this engine already has " + std::to_string(kEngineSegmentsMax) +
                                              " segments open, the limit; close those that are not used"};
        }
    }
    transport::tcp::PoolOptions pool;
    pool.dial = DialOptions{address,
                            core.options.token,
                            core.options.tenant,
                            std::string(kPurposeEngine),
                            core.options.timeout_ms,
                            core.options.interface};
    pool.dial.given_up = &core.closing;
    core.counters.dials_total.fetch_add(1);
    Result<Dialed> dialed = dial(pool.dial);
    if (!dialed) return dialed.error();
    std::optional<transport::PeerInfo> info = transport::decode_welcome(dialed->welcome);
    if (!info) return Error{Code::kProtocol, address + " sent an unreadable welcome"};
    info->address = address;
    pool.self = core.identity.segment;
    pool.self_name = core.identity.name;
    pool.peer = info->segment;
    pool.connections_max = core.options.connections_per_peer;
    std::vector<transport::Loop*> loops;
    for (const auto& loop : core.loops) loops.push_back(loop.get());
    auto control = std::make_shared<transport::tcp::Link>(pool, loops, core.workers, core.counters);
    if (Status status = control->pool().adopt(std::move(*dialed), core.options.timeout_ms); !status) {
        return status.error();
    }

    std::vector<std::shared_ptr<transport::Link>> links;
    std::string reasons;
    auto consider = [&](const char* name, auto connect) {
        Result<std::shared_ptr<transport::Link>> link =
            core.allows(name) ? connect()
                              : Result<std::shared_ptr<transport::Link>>(Error{
                                    Code::kUnavailable, "it is not among the transports of this engine"});
        if (link) {
            links.push_back(std::move(*link));
        } else {
            reasons += std::string(reasons.empty() ? "" : "; ") + name + ": " + link.error().text;
        }
    };
    consider("loopback",
             [&] { return transport::loopback::Link::connect(*info, core.identity, core.counters); });
    consider("shm", [&] {
        return transport::shm::Link::connect(*info, core.identity, *core.loops.front(), core.counters,
                                             core.options.timeout_ms);
    });
    consider("tcp", [&]() -> Result<std::shared_ptr<transport::Link>> { return {control}; });
    if (links.empty()) {
        return Error{Code::kUnavailable, "no transport reaches " + address + ": " + reasons};
    }
    auto peer = std::make_shared<Peer>(std::move(*info), std::move(control), std::move(links), core.counters);
    std::lock_guard lock(core.peers_mutex);
    uint32_t number = core.next_peer++;
    core.peers[number] = std::move(peer);
    return number;
}

Status Engine::close_segment(uint32_t segment) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<Peer>> peer = core_->find_peer(segment);
    if (!peer) return peer.error();
    {
        std::lock_guard lock(core_->peers_mutex);
        core_->peers.erase(segment);
    }
    (*peer)->close();
    return success();
}

Result<SegmentInfo> Engine::segment(uint32_t segment) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    Result<std::shared_ptr<Peer>> found = core_->find_peer(segment);
    if (!found) return found.error();
    Peer& peer = **found;
    Result<std::vector<std::byte>> answer =
        peer.control().ask(Kind::kEngineRegions, {}, core_->options.timeout_ms);
    auto failed = [&](const Error& error) {
        return Error{error.code, "engine \"" + peer.info().name + "\" at " + peer.info().address +
                                     " does not tell its regions: " + error.text};
    };
    if (!answer) return failed(answer.error());
    Reader r(*answer);
    (void)r.number<uint64_t>();
    std::optional<std::vector<transport::RegionRow>> rows = transport::decode_regions(r);
    if (!rows) return failed(Error{Code::kProtocol, "the list is unreadable"});
    SegmentInfo info;
    info.name = peer.info().name;
    info.id = peer.info().segment;
    info.host_id = peer.info().host_id;
    info.address = peer.info().address;
    for (const transport::RegionRow& row : *rows) {
        info.regions.push_back(
            {row.address, row.length, row.kind, row.location, peer.transport_for(row.kind)});
    }
    return info;
}

namespace {

TicketStatus status_of(Ticket& ticket) {
    TicketStatus status;
    {
        std::lock_guard lock(ticket.mutex);
        status.state = ticket.state;
        status.failure = ticket.failure;
    }
    status.slices.resize(ticket.slices);
    for (const auto& share : ticket.shares) {
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
    {
        std::unique_lock lock(ticket->mutex);
        ticket->ended.wait(lock, [&] { return ticket->state != TicketState::kWaiting; });
    }
    core_->tickets.release(*id);
    if (ticket->state != TicketState::kDone) {
        if (status != nullptr) *status = status_of(*ticket);
        return ticket->failure.error;
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
    std::unique_lock lock(ticket->mutex);
    return ticket->ended.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                  [&] { return ticket->state != TicketState::kWaiting; });
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

Status Engine::release(uint64_t id) {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    std::shared_ptr<Ticket> ticket = core_->tickets.find(id);
    if (ticket == nullptr) return no_ticket(id);
    for (const auto& share : ticket->shares) share->job->cancelled = true;
    {
        std::unique_lock lock(ticket->mutex);
        ticket->ended.wait(lock, [&] { return ticket->state != TicketState::kWaiting; });
    }
    core_->tickets.release(id);
    return success();
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
    return core_->tell(**peer, message);
}

Result<std::vector<std::pair<std::string, std::string>>> Engine::notifications() {
    Core::Call call(*core_);
    if (!call.ok()) return call.error();
    return core_->inbox.take();
}

bool Engine::check_integrity() const {
    return core_->regions->check_integrity() && core_->inbox.size() <= kEngineInboxMessagesMax &&
           core_->tickets.size() <= kEngineTicketsMax && core_->tickets.slices_open() <= kEngineSlicesOpenMax;
}

std::vector<std::pair<std::string, uint64_t>> Engine::metrics() const {
    const Core& core = *core_;
    const transport::Counters& c = core.counters;
    std::vector<std::pair<std::string, uint64_t>> rows;
    auto traffic = [&](const std::string& name, const transport::TransportCounters& t) {
        rows.emplace_back(name + "_read_bytes_total", t.read.bytes);
        rows.emplace_back(name + "_read_slices_total", t.read.slices);
        rows.emplace_back(name + "_write_bytes_total", t.write.bytes);
        rows.emplace_back(name + "_write_slices_total", t.write.slices);
    };
    traffic("loopback", c.loopback);
    traffic("shm", c.shm);
    traffic("tcp", c.tcp);
    traffic("served_tcp", c.served);
    auto& tickets = core_->tickets;
    rows.insert(rows.end(), {{"transfers_total", c.transfers_total},
                             {"transfers_failed_total", c.transfers_failed_total},
                             {"retries_total", c.retries_total},
                             {"slices_refused_total", c.slices_refused_total},
                             {"connections", c.connections},
                             {"connections_max", transport::tcp::kConnectionsMax},
                             {"connections_refused_total", c.connections_refused_total},
                             {"protocol_errors_total", c.protocol_errors_total},
                             {"fenced_total", c.fenced_total},
                             {"dials_total", c.dials_total},
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
