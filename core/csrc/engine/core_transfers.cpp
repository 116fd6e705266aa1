// The half of an engine's core that moves bytes: checks a request, cuts it into one job for each peer, and
// follows them to their end.
//
// Threads: transfer_alone() runs the job on its caller's thread. Of a ticket each share runs where its
// links carry it, on I/O threads or working threads; the thread that ends the last share ends the ticket,
// in end_ticket().
//
// What holds between two calls: every slice of a job lies whole in the region of job.locals, which
// job.regions keeps alive (the record; the memory is entered piece by piece). A slice is waiting, done,
// failed or cancelled, and only the thread that carries the job changes that. shares_left counts the
// shares that have not ended, so end_ticket() runs once.
#include <algorithm>
#include <chrono>

#include "engine/core.hpp"
#include "transport/frames.hpp"

namespace moonpool {

namespace {

constexpr int kSettleMs = 300;  // a peer that is reached answers in less; twice, when a connection was dead
constexpr uint64_t kInlineBytesMax = 256u
                                     << 10;  // of a submitted copy: done at once, as cheap as handing over

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

std::vector<std::byte> bytes_of(std::string_view message) {
    auto bytes = std::as_bytes(std::span(message.data(), message.size()));
    return {bytes.begin(), bytes.end()};
}

}  // namespace

Status engine::check_message(std::string_view message) {
    if (message.size() <= transport::kNotifyBytesMax) return success();
    return Error{Code::kTooLarge, "a notification has at most " + std::to_string(transport::kNotifyBytesMax) +
                                      " bytes, not " + std::to_string(message.size())};
}

Error engine::takes_no_message(const Peer& peer) {
    return Error{Code::kInvalidArgument, peer.who() + " takes no message"};
}

Result<std::shared_ptr<Peer>> Engine::Core::find_peer(uint32_t segment) {
    MutexLock lock(peers_mutex);
    auto it = peers.find(segment);
    if (it == peers.end()) {
        return Error{Code::kInvalidArgument,
                     "no segment " + std::to_string(segment) + " is open; open(address) gives its number"};
    }
    return it->second;
}

// By one transport, to a peer whose engine has answered the handshake.
Result<std::shared_ptr<transport::Link>> Engine::Core::connect(const Entry& entry,
                                                               const transport::Contact& contact) {
    if (!entry.allowed) return Error{Code::kUnavailable, "it is not among the transports of this engine"};
    if (!entry.not_viable.empty()) return Error{Code::kUnavailable, entry.not_viable};
    return entry.transport->connect(contact.info, contact.control, options.timeout_ms);
}

// Each slice is checked here once as a whole. One that would reach from one region into the next is
// refused: the two could be deregistered apart.
Status Engine::Core::place_locals(std::span<const Slice> slices, const Regions& known,
                                  std::span<Region*> locals) {
    Region* last = nullptr;
    for (size_t i = 0; i < slices.size(); ++i) {
        const Slice& slice = slices[i];
        locals[i] = last;
        if (slice.length == 0) continue;
        // Slices of one call mostly lie in one region.
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
    // The time without progress begins now, not with the first byte.
    job.progress_ns = now_ns();
    job.waiting = job.slices.size();
    for (size_t i = 0; i < job.slices.size(); ++i) {
        // Nothing has to reach a peer for it, not even its address.
        bool empty = job.slices[i].length == 0;
        job.on_card = job.on_card || (!empty && job.locals[i]->on_card());
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
    // Safe because a job that is run on the caller's thread ends before the call does, and no link begins
    // another transfer meanwhile.
    static thread_local Desk desk;
    if (request.notify && peer->control() == nullptr) return engine::takes_no_message(*peer);
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
    // Slices may be left because a link has seen close(): then its reason says nothing about the peer.
    if (job.waiting != 0 && closing) return Error{Code::kClosed, "this engine was closed meanwhile"};
    if (job.waiting != 0 || job.refused) {
        TransferFailure failure = peer->explain(job, outcome);
        failure.settled = settle(*peer, job);
        return report(job, std::move(failure), status);
    }
    // Behind the bytes: the peer that reads the message finds them there.
    if (request.notify) {
        if (Status told = tell(*peer, *request.notify, job.timeout_ms); !told) {
            return report(job, untold(*peer, told.error()), status);
        }
    }
    return job.bytes_done.load();
}

// Whether bytes of a job that has ended badly may still land somewhere. Never waits.
bool Engine::Core::may_be_unsettled(const Peer& peer, const Job& job) {
    if (cards.has_abandoned()) return true;
    for (size_t i = 0; i < job.slices.size(); ++i) {
        bool done = job.states[i].load(std::memory_order_relaxed) == SliceState::kDone;
        if (!done && job.slices[i].direction == transport::Direction::kWrite) return !peer.settled();
    }
    return false;
}

// Whether none of them does, after the peer was asked for it.
bool Engine::Core::settle(Peer& peer, const Job& job) {
    if (!may_be_unsettled(peer, job)) return true;
    return peer.settle(kSettleMs) && !cards.has_abandoned();
}

Status Engine::Core::tell(Peer& peer, std::string_view message, int timeout_ms) {
    if (Status sound = engine::check_message(message); !sound) return sound;
    if (closing) return Error{Code::kClosed, "this engine was closed meanwhile"};
    if (peer.control() == nullptr) return engine::takes_no_message(peer);
    return check_told(peer, peer.control()->ask(Kind::kEngineNotify, bytes_of(message), timeout_ms));
}

Status Engine::Core::check_told(Peer& peer, const Result<std::vector<std::byte>>& answer) {
    if (!answer) {
        return Error{answer.error().code,
                     "the notification for " + peer.who() + " failed: " + answer.error().text};
    }
    counters.notifications_sent_total.fetch_add(1);
    return success();
}

Result<std::shared_ptr<Ticket>> Engine::Core::make_ticket(const TransferRequest& request) {
    auto ticket = std::make_shared<Ticket>();
    ticket->slices = request.slices.size();
    ticket->timeout_ms = request.timeout_ms > 0 ? request.timeout_ms : options.timeout_ms;
    if (request.notify) ticket->notify = std::string(*request.notify);
    // One share for each peer, in the order of their first slices.
    std::unordered_map<uint32_t, Share*> by_segment;
    auto share_of = [&](uint32_t segment) -> Result<Share*> {
        if (auto it = by_segment.find(segment); it != by_segment.end()) return it->second;
        Result<std::shared_ptr<Peer>> peer = find_peer(segment);
        if (!peer) return peer.error();
        if (request.notify && (*peer)->control() == nullptr) return engine::takes_no_message(**peer);
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
    // One list for all shares: a region that is registered meanwhile is for the next request.
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
    // Set before the first share is launched: it may end before the second one begins.
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
            // A copy of this size costs about as much as waking a thread for it.
        } else if (share->peer->runs_on_caller(*share->job) && !share->job->on_card &&
                   bytes <= kInlineBytesMax) {
            share->outcome = share->peer->run(*share->job);
            end_share(ticket);
        } else {
            share->peer->post(share->job, [this, ticket, share](Outcome outcome) {
                share->outcome = std::move(outcome);
                end_share(ticket);
            });
        }
    }
}

void Engine::Core::end_share(const std::shared_ptr<Ticket>& ticket) {
    if (ticket->shares_left.fetch_sub(1) != 1) return;
    // The other shares' threads have counted down before this one: what they wrote is visible here.
    bool whole = true;
    for (const auto& share : ticket->shares) {
        whole = whole && share->job->waiting == 0 && !share->job->refused;
    }
    // Messages and fences wait for answers, of each peer by itself.
    std::vector<Share*> waits;
    for (const auto& share : ticket->shares) {
        bool asks = whole ? ticket->notify.has_value() : may_be_unsettled(*share->peer, *share->job);
        if (!asks) continue;
        if (!closing) waits.push_back(share.get());
        // Until it is known, and when it is not asked any more.
        share->settled = whole;
        if (whole) share->told = Error{Code::kClosed, "this engine was closed meanwhile"};
    }
    if (waits.empty()) return end_ticket(ticket);
    conclude(ticket, waits, whole);
}

// Tells peers, or asks them to let nothing more in, all at the same time; the last answer ends the ticket.
void Engine::Core::conclude(const std::shared_ptr<Ticket>& ticket, const std::vector<Share*>& shares,
                            bool whole) {
    ticket->unconcluded = shares.size();
    std::vector<std::byte> message = whole ? bytes_of(*ticket->notify) : std::vector<std::byte>();
    for (Share* share : shares) {
        auto concluded = [this, ticket] {
            if (ticket->unconcluded.fetch_sub(1) == 1) end_ticket(ticket);
        };
        if (whole) {
            auto answered = [this, share, concluded](const Result<std::vector<std::byte>>& answer) {
                share->told = check_told(*share->peer, answer);
                concluded();
            };
            share->peer->control()->post(Kind::kEngineNotify, message, ticket->timeout_ms, answered);
        } else {
            share->peer->post_settle(kSettleMs, [this, share, concluded](bool settled) {
                share->settled = settled && !cards.has_abandoned();
                concluded();
            });
        }
    }
}

void Engine::Core::end_ticket(const std::shared_ptr<Ticket>& ticket) {
    TicketState state = TicketState::kDone;
    TransferFailure failure;
    for (const auto& share : ticket->shares) {
        Job& job = *share->job;
        if (job.waiting == 0 && !job.refused) continue;
        // A cancelled share makes the ticket cancelled only where no other has failed: the failure is what
        // the caller has to know.
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
    for (const auto& share : ticket->shares) {
        failure.settled = failure.settled && share->settled;
        if (share->told || state != TicketState::kDone) continue;
        state = TicketState::kFailed;
        failure = untold(*share->peer, share->told.error());
    }
    counters.transfers_total.fetch_add(1);
    if (state == TicketState::kFailed) counters.transfers_failed_total.fetch_add(1);
    // A ticket may be kept long after its end; memory that is deregistered meanwhile is not.
    for (const auto& share : ticket->shares) share->job->regions.reset();
    tickets.end(*ticket, state, std::move(failure));
    ticket->over = true;
}

}  // namespace moonpool
