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
    for (const Route& route : routes_) {
        if (route.link->reaches(kind, nullptr)) return std::string(route.transport);
    }
    return "";
}

SegmentPath Peer::path_of(std::string_view transport) const {
    SegmentPath path{.transport = std::string(transport)};
    for (const NoRoute& missing : no_routes_) {
        if (missing.transport == transport) path.why = missing.why;
    }
    for (const Route& route : routes_) {
        if (route.transport != transport) continue;
        path.path = route.link->path();
        for (MemoryKind kind : {MemoryKind::kHost, MemoryKind::kHostArena, MemoryKind::kDevice}) {
            std::string why;
            if (!route.link->reaches(kind, &why)) path.unreached.emplace_back(kind, why);
        }
    }
    return path;
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

Outcome Peer::run(Job& job) {
    Outcome outcome;
    const std::vector<Route>& routes = routes_of(job);
    for (size_t i = next_route(routes, 0); i < routes.size(); i = next_route(routes, i + 1)) {
        size_t before = job.waiting;
        if (outcome.last != nullptr) counters_.retries_total.fetch_add(before, std::memory_order_relaxed);
        Link& link = *routes[i].link;
        job.last_path = i + 1 == routes.size();
        Status status = carry(link, job);
        if (account(job, link, std::move(status), outcome)) break;
    }
    return outcome;
}

// The last one is offered every job: its sentence says why the job fails.
size_t Peer::next_route(const std::vector<Route>& routes, size_t from) {
    while (from + 1 < routes.size() && routes[from].link->reaches_nothing()) ++from;
    return from;
}

void Peer::post(std::shared_ptr<Job> job, Finished finished) {
    size_t first = next_route(routes_of(*job), 0);
    post_to(first, std::move(job), Outcome{}, std::move(finished));
}

void Peer::post_to(size_t route, std::shared_ptr<Job> job, Outcome outcome, Finished finished) {
    size_t before = job->waiting;
    if (outcome.last != nullptr) counters_.retries_total.fetch_add(before, std::memory_order_relaxed);
    const std::vector<Route>& routes = routes_of(*job);
    const std::shared_ptr<Link>& link = routes[route].link;
    job->last_path = route + 1 == routes.size();
    auto next = [self = shared_from_this(), &routes, route, outcome = std::move(outcome),
                 finished = std::move(finished)](std::shared_ptr<Job> ended, Status status) mutable {
        bool over = self->account(*ended, *routes[route].link, std::move(status), outcome);
        size_t next = next_route(routes, route + 1);
        if (over || next == routes.size()) return finished(std::move(outcome));
        self->post_to(next, std::move(ended), std::move(outcome), std::move(finished));
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
