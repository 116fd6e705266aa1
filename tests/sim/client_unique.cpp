// SimClient: a put of what no node of the pool has, as Client::put_unique.
#include <utility>

#include "client.hpp"

namespace moonpool::sim {

// The last attempt replaces: the master is wrong then.
void SimClient::put_unique(const CallRef& call, size_t attempt) {
    connect(node_line(host()), [this, call, attempt](const Status& own) {
        if (own && attempt == 1 && nodes_[host()]->read(call->name)) return finish(call, Operation::kNothing);
        auto put = std::make_shared<Put>();
        put->call = call;
        put->known = known(hash_(call->name));
        put->unique = attempt < kUniqueAttempts ? attempt : 0;
        put->steps.emplace(1, PutSteps::Plan{.replace = true});
        go_on(put);
    });
}

// Its place in the order is asked for: the key is free, or stays as it is.
void SimClient::leave_taken(const std::shared_ptr<Put>& put) {
    const RemovalSteps& removal = *put->removal->steps;
    if (!removal.no_master().empty()) {
        put->removal.reset();
        return finish(put->call, Operation::kNothing);
    }
    const Taken taken = removal.taken(0);
    if (is_free(taken) && !removal.versions().empty()) put->version = removal.versions()[0];
    if (is_free(taken) || planted_.unique_believes_itself) {
        put->steps->removed();
    } else {
        put->outcome = Operation::kNothing;
        put->held = taken == Taken::kHeld;
        put->steps->removed({});
    }
    go_on(put);
}

// What the master has heard of may be removed since: it is looked at, and what is gone is asked for again.
void SimClient::end_unique(const std::shared_ptr<Put>& put) {
    if (!put->held) return finish(put->call, put->outcome);
    auto look = std::make_shared<Call>(*put->call);
    look->operation.value = 0;
    look->done = [this, put](const Operation& found) {
        const bool is_gone = found.outcome == Operation::kDone && found.value == 0;
        if (!is_gone) return finish(put->call, put->outcome);
        later(unique_wait_ms(put->unique) * kMs, [this, put] { put_unique(put->call, put->unique + 1); });
    };
    get(look);
}

}  // namespace moonpool::sim
