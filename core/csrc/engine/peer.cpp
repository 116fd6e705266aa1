#include "engine/peer.hpp"

#include <cstdio>

#include "transport/staged_run.hpp"

namespace moonpool::engine {

using transport::Job;
using transport::Link;

namespace {

// "5 s", "0.3 s"
std::string seconds_text(int ms) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g s", ms / 1000.0);
    return text;
}

constexpr uint32_t kTimedEvery = 64;

bool is_staged(const Link& link, const Job& job) { return job.on_card && !link.copies_by_card(); }

Status carry(Link& link, Job& job) {
    return is_staged(link, job) ? transport::run_staged(link, job) : link.run(job);
}

}  // namespace

std::string Peer::who() const {
    if (info_.file != nullptr) return "the file " + info_.name;
    return "engine \"" + info_.name + "\" at " + info_.address;
}

std::string Peer::transport_for(MemoryKind kind) const {
    LinkOrder::Packed order = order_.order(1, 1);
    for (size_t place = 0; place < routes_.size(); ++place) {
        const Route& route = routes_[LinkOrder::at(order, place)];
        if (route.link->reaches(kind, nullptr)) return std::string(route.transport);
    }
    return "";
}

SegmentPath Peer::path_of(std::string_view transport) const {
    SegmentPath path{.transport = std::string(transport)};
    for (const NoRoute& missing : no_routes_) {
        if (missing.transport == transport) path.why = missing.why;
    }
    for (size_t i = 0; i < routes_.size(); ++i) {
        const Route& route = routes_[i];
        if (route.transport != transport) continue;
        path.path = route.link->path();
        path.remarks = route.link->remarks();
        path.rails = route.link->rails();
        LinkOrder::Measured measured = order_.measured(i);
        path.jobs = measured.jobs;
        path.slice_ns = measured.cost.slice_ns;
        path.byte_ns = measured.cost.byte_ns;
        for (MemoryKind kind : {MemoryKind::kHost, MemoryKind::kHostArena, MemoryKind::kDevice}) {
            std::string why;
            if (!route.link->reaches(kind, &why)) path.unreached.emplace_back(kind, why);
        }
    }
    return path;
}

std::vector<std::string_view> Peer::tried() const {
    LinkOrder::Packed order = order_.order(1, 1);
    std::vector<std::string_view> names;
    for (size_t place = 0; place < routes_.size(); ++place) {
        names.push_back(routes_[LinkOrder::at(order, place)].transport);
    }
    return names;
}

bool Peer::account(Job& job, const Link& link, Status status, Outcome& outcome) const {
    outcome.last = &link;
    if (job.waiting == 0 || job.stopped()) {
        outcome.status = success();
        return true;
    }
    std::string text = outcome.status ? "" : outcome.status.error().text + "; ";
    Code code = status ? Code::kUnavailable : status.error().code;
    text += link.path() + ": " + (status ? std::string("left undone") : status.error().text);
    outcome.status = Error{code, text};
    return false;
}

// The last one is offered every job: its sentence says why the job fails.
bool Peer::Tries::next(const Job& job) {
    ++place_;
    const size_t n = routes_->size();
    // Nothing goes before a first link that only copies: a job that it carries asks for no order.
    if (place_ == (peer_->first_copies_ ? 1 : 0)) order_ = peer_->order_of(job);
    while (place_ + 1 < n && link()->reaches_nothing()) ++place_;
    return place_ < n;
}

LinkOrder::Packed Peer::order_of(const Job& job) {
    if (job.on_card || clock_ns_ == nullptr || !order_.chooses()) return LinkOrder::kAsTheyStand;
    uint64_t bytes = 0;
    for (const auto& slice : job.slices) bytes += slice.length;
    return order_.order_or_probe(job.slices.size(), bytes, clock_ns_());
}

// Where copies are all that a link does, or another link than this one would not be chosen anyway, a look at
// the clock for each would be felt: one in kTimedEvery is timed.
Peer::Timing Peer::begin_timing(size_t route, const Job& job, bool first) {
    Timing timing;
    if (route == 0 && (first_copies_ || !order_.chooses())) {
        uint32_t n = untimed_.load(std::memory_order_relaxed);
        untimed_.store(n + 1, std::memory_order_relaxed);
        if (n % kTimedEvery != 0) return timing;
    }
    if (clock_ns_ == nullptr || job.on_card) return timing;
    timing.alone = routes_[route].link->only_copies();
    timing.timed = true;
    timing.whole = job.waiting == job.slices.size();
    timing.began_ns =
        first && clock_ns_ == &now_ns ? job.progress_ns.load(std::memory_order_relaxed) : clock_ns_();
    if (!timing.alone) order_.began(route, timing.began_ns);
    return timing;
}

void Peer::end_timing(const Timing& timing, size_t route, const Job& job) {
    bool whole = timing.whole && job.waiting == 0 && !job.refused;
    uint64_t slices = whole ? job.slices.size() : 0, bytes = whole ? job.bytes_done.load() : 0;
    uint64_t now = clock_ns_();
    if (timing.alone) return order_.carried(route, slices, bytes, now - timing.began_ns);
    order_.ended(route, slices, bytes, now);
    if (job.waiting != 0 && !job.stopped()) order_.left_undone(route, now);
}

Outcome Peer::run(Job& job) {
    Outcome outcome;
    Tries tries(*this, job);
    while (tries.next(job)) {
        size_t before = job.waiting;
        if (outcome.last != nullptr) counters_.retries_total.fetch_add(before, std::memory_order_relaxed);
        Link& link = *tries.link();
        job.last_path = tries.is_last();
        Timing timing = begin_timing(tries.index(), job, outcome.last == nullptr);
        Status status = carry(link, job);
        if (timing.timed) end_timing(timing, tries.index(), job);
        if (account(job, link, std::move(status), outcome)) break;
    }
    return outcome;
}

void Peer::post(std::shared_ptr<Job> job, Finished finished) {
    Tries tries(*this, *job);
    (void)tries.next(*job);
    post_to(tries, std::move(job), Outcome{}, std::move(finished));
}

void Peer::post_to(Tries tries, std::shared_ptr<Job> job, Outcome outcome, Finished finished) {
    size_t before = job->waiting;
    if (outcome.last != nullptr) counters_.retries_total.fetch_add(before, std::memory_order_relaxed);
    const std::shared_ptr<Link>& link = tries.link();
    job->last_path = tries.is_last();
    auto next = [self = shared_from_this(), tries,
                 timing = begin_timing(tries.index(), *job, outcome.last == nullptr),
                 outcome = std::move(outcome),
                 finished = std::move(finished)](std::shared_ptr<Job> ended, Status status) mutable {
        if (timing.timed) self->end_timing(timing, tries.index(), *ended);
        bool over = self->account(*ended, *tries.link(), std::move(status), outcome);
        if (over || !tries.next(*ended)) return finished(std::move(outcome));
        self->post_to(tries, std::move(ended), std::move(outcome), std::move(finished));
    };
    // Copied into the callback's type once, so that it can be offered twice.
    Link::Finished callback = std::move(next);
    if (!is_staged(*link, *job) && link->post(job, callback)) return;
    bool background = job->background;
    bool only_copies = link->runs_on_caller(*job);
    auto carries = [link, job = std::move(job), callback]() mutable {
        Status status = carry(*link, *job);
        callback(std::move(job), std::move(status));
    };
    if (only_copies) {
        workers_.post(background, std::move(carries));
    } else {
        waiters_.post(background, std::move(carries));
    }
}

TransferFailure Peer::explain(const Job& job, const Outcome& outcome) const {
    uint64_t total = 0;
    for (const auto& slice : job.slices) total += slice.length;
    TransferFailure failure;
    failure.peer = info_.address;
    failure.path = outcome.last == nullptr ? "" : outcome.last->path();
    Error why = job.refused       ? job.refusal
                : !outcome.status ? outcome.status.error()
                                  : Error{Code::kUnavailable, "no path is left"};
    auto still_ms = static_cast<int64_t>((now_ns() - job.progress_ns.load()) / 1000000);
    if (!job.refused && still_ms >= job.timeout_ms) {
        why = Error{Code::kTimeout, "nothing moved for " + seconds_text(job.timeout_ms) + "; " + why.text};
    }
    failure.cause = why.text;
    std::string text = "the transfer with " + who() + " failed after " +
                       std::to_string(job.bytes_done.load()) + " of " + std::to_string(total) + " bytes: ";
    // A path that could not do it names itself; a refusal does not.
    if (job.refused && !failure.path.empty()) text += failure.path + ": ";
    failure.error = Error{why.code, text + why.text};
    return failure;
}

}  // namespace moonpool::engine
