// Peer: an opened segment: its identity, and the links to it, in the order of the registry, and in the one in
// which jobs are offered to them (LinkOrder; for local memory of cards it is fixed). What one link leaves
// waiting goes to the next, within the same transfer.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "engine/link_order.hpp"
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
    // routes: in the order of the registry; at least one is not for cards only.
    // clock_ns: of what links cost; null: they keep that order.
    // workers: for what only copies. waiters: for what waits for the peer; it has a few of them.
    Peer(transport::Contact contact, std::vector<Route> routes, std::vector<NoRoute> no_routes,
         transport::Counters& counters, transport::Workers& workers, transport::Workers& waiters,
         uint64_t (*clock_ns)())
        : info_(std::move(contact.info)),
          control_(std::move(contact.control)),
          routes_(for_host(routes)),
          card_routes_(std::move(routes)),
          no_routes_(std::move(no_routes)),
          counters_(counters),
          workers_(workers),
          waiters_(waiters, kWaitersMax),
          clock_ns_(clock_ns),
          first_copies_(routes_.front().link->only_copies()),
          order_(only_copies(routes_)) {
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
    // The transport that is tried first for small slices of memory of that kind, "" for none.
    std::string transport_for(MemoryKind kind) const;
    SegmentPath path_of(std::string_view transport) const;
    // Of its host routes, in the order in which small slices are offered to them.
    std::vector<std::string_view> tried() const;

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
    static std::vector<bool> only_copies(const std::vector<Route>& routes) {
        std::vector<bool> rows;
        for (const Route& route : routes) rows.push_back(route.link->only_copies());
        return rows;
    }

    // The routes that a job is offered, one after the other.
    class Tries {
       public:
        Tries(Peer& peer, const transport::Job& job) : peer_(&peer), routes_(&peer.routes_of(job)) {}
        // False: none is left.
        bool next(const transport::Job& job);
        size_t index() const { return LinkOrder::at(order_, place_); }
        const std::shared_ptr<transport::Link>& link() const { return (*routes_)[index()].link; }
        bool is_last() const { return place_ + 1 == routes_->size(); }

       private:
        Peer* peer_;
        const std::vector<Route>* routes_;
        LinkOrder::Packed order_ = LinkOrder::kAsTheyStand;
        size_t place_ = SIZE_MAX;
    };

    // A job on one link, timed if its cost is to be known.
    struct Timing {
        bool timed = false;
        bool alone = false;  // by its own times, and not by those of the link
        bool whole = false;  // no other link has carried any of it
        uint64_t began_ns = 0;
    };
    // first: the job was made just now.
    Timing begin_timing(size_t route, const transport::Job& job, bool first);
    // Of a job that was timed.
    void end_timing(const Timing& timing, size_t route, const transport::Job& job);
    LinkOrder::Packed order_of(const transport::Job& job);
    void post_to(Tries tries, std::shared_ptr<transport::Job> job, Outcome outcome, Finished finished);
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
    uint64_t (*const clock_ns_)();
    const bool first_copies_;           // of routes_
    LinkOrder order_;                   // of routes_
    std::atomic<uint32_t> untimed_{0};  // jobs by a first link of which few are timed, about
};

}  // namespace moonpool::engine
