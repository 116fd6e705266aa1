// Peer: an opened segment: its identity, and the links to it, in the order in which they are tried. What one
// link leaves waiting goes to the next, within the same transfer.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "transport/control.hpp"
#include "transport/frames.hpp"
#include "transport/link.hpp"
#include "transport/workers.hpp"

namespace moonpool::engine {

// What became of one peer's share.
struct Outcome {
    Status status = success();              // of the paths; a refused slice is in the job
    const transport::Link* last = nullptr;  // that was tried; the peer's
};

// One of the links to a peer.
struct Route {
    std::string_view transport;  // its name in the registry
    std::shared_ptr<transport::Link> link;
};

// A transport that has no link to a peer.
struct NoRoute {
    std::string_view transport;
    std::string why;
};

class Peer : public std::enable_shared_from_this<Peer> {
   public:
    // routes: in the order in which they are tried; at least one is not for cards only.
    // workers: for what only copies. waiters: for what waits for the peer; it has a few of them.
    Peer(transport::Contact contact, std::vector<Route> routes, std::vector<NoRoute> no_routes,
         transport::Counters& counters, transport::Workers& workers, transport::Workers& waiters)
        : info_(std::move(contact.info)),
          control_(std::move(contact.control)),
          routes_(for_host(routes)),
          card_routes_(std::move(routes)),
          no_routes_(std::move(no_routes)),
          counters_(counters),
          workers_(workers),
          waiters_(waiters, kWaitersMax) {
        // Those that reach a local card themselves before those to which its bytes have to be copied first.
        std::ranges::stable_partition(card_routes_, [](const Route& r) { return r.link->copies_by_card(); });
        auto carries = [](const Route& r) { return r.link->copies_by_card() || r.link->takes_slots(); };
        if (std::ranges::any_of(card_routes_, carries)) std::erase_if(card_routes_, std::not_fn(carries));
    }

    const transport::PeerInfo& info() const { return info_; }
    // Null: it is a file, which nothing can be asked or told.
    transport::Control* control() { return control_.get(); }
    std::string who() const;  // for people
    // Whether run() begins with a copy that waits for no peer.
    bool runs_on_caller(const transport::Job& job) const { return routes_.front().link->runs_on_caller(job); }
    // The transport that is tried first for memory of that kind, "" for none.
    std::string transport_for(MemoryKind kind) const;
    SegmentPath path_of(std::string_view transport) const;

    // Carries the job on the calling thread.
    Outcome run(transport::Job& job);
    // On other threads; finished() is called once.
    using Finished = std::function<void(Outcome)>;
    void post(std::shared_ptr<transport::Job> job, Finished finished);

    // As Link, over all links: what one left undone may have gone over any.
    bool settled() const {
        return std::ranges::all_of(routes_, [](const Route& r) { return r.link->settled(); });
    }
    bool settle(int timeout_ms) {
        return std::ranges::all_of(routes_, [&](const Route& r) { return r.link->settle(timeout_ms); });
    }
    // The same on a thread for what waits for the peer.
    void post_settle(int timeout_ms, std::function<void(bool)> settled) {
        waiters_.post(false, [self = shared_from_this(), timeout_ms, settled = std::move(settled)] {
            settled(self->settle(timeout_ms));
        });
    }

    void close() {
        if (control_ != nullptr) control_->close();
        for (const Route& route : card_routes_) route.link->close();
    }

    // What to say of a job that did not go well.
    TransferFailure explain(const transport::Job& job, const Outcome& outcome) const;

   private:
    static constexpr uint32_t kWaitersMax = 4;

    static std::vector<Route> for_host(std::vector<Route> routes) {
        std::erase_if(routes, [](const Route& route) { return route.link->is_for_cards(); });
        return routes;
    }
    const std::vector<Route>& routes_of(const transport::Job& job) const {
        return job.on_card ? card_routes_ : routes_;
    }
    // The route from `from` on that a job is offered next; routes.size(): none.
    static size_t next_route(const std::vector<Route>& routes, size_t from);
    void post_to(size_t route, std::shared_ptr<transport::Job> job, Outcome outcome, Finished finished);
    // True: nothing is left for other links.
    bool account(transport::Job& job, const transport::Link& link, Status status, Outcome& outcome) const;

    transport::PeerInfo info_;
    std::shared_ptr<transport::Control> control_;
    const std::vector<Route> routes_;
    std::vector<Route> card_routes_;  // all of them, for jobs with local memory of cards
    const std::vector<NoRoute> no_routes_;
    transport::Counters& counters_;
    transport::Workers& workers_;
    transport::Lane waiters_;
};

}  // namespace moonpool::engine
