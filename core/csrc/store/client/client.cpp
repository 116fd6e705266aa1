#include "store/client/client.hpp"

#include <algorithm>
#include <climits>
#include <system_error>
#include <thread>

#include "wire/address.hpp"

namespace moonpool {

namespace {

constexpr size_t kNodesAtOnce = 16;  // that one call talks to

}  // namespace

Client::Client(ClientOptions options) : own_(options), peers_(options), options_(std::move(options)) {}

Client::~Client() { close(); }

void Client::close() {
    own_.close();
    if (own_.check_open().ok() || own_.check_open().error().code == Code::kForked) return;
    std::shared_ptr<Pool> pool;
    {
        MutexLock lock(mutex_);
        closed_ = true;
        pool = std::move(pool_);
    }
    if (pool != nullptr) pool->directory->close();
    peers_.close();
    cards_.clear();
}

// Known once the own node was reached; it stays known when that node is gone.
std::shared_ptr<Client::Pool> Client::pool() {
    if (!own_.check_open()) return nullptr;  // in a child of fork() the mutex may be held for ever
    std::shared_ptr<Session> session = own_.current();
    MutexLock lock(mutex_);
    if (closed_ || session == nullptr || session->incarnation() == asked_) return pool_;
    asked_ = session->incarnation();
    if (session->master().empty()) {
        pool_.reset();
        return pool_;
    }
    auto pool = std::make_shared<Pool>();
    pool->host_id = session->host_id();
    pool->own = session->incarnation();
    DirectoryClientOptions to;
    to.master = session->master();
    to.token = options_.token;
    to.tenant = options_.tenant;
    if (uint32_t ms = session->master_timeout_ms(); ms != 0)
        to.timeout_ms = static_cast<int>(std::min<uint32_t>(ms, INT_MAX));
    // A caller that waits longer for a node waits longer for the master, too: a quarter of its own budget.
    to.timeout_ms = std::min(options_.timeout_ms, std::max(to.timeout_ms, options_.timeout_ms / 4));
    to.tls = options_.tls;
    to.follow_key = session->knows(kFeatureTenantKey);
    // A node of another host has its own way to the master, as this process has.
    if (options_.address.empty() && session->knows(kFeatureRelay)) {
        to.relay = {
            .name = session->peer(),
            .connect = [node = options_,
                        ms = to.timeout_ms] { return connect_to_node(node, deadline_in(ms), nullptr); },
            .answers = [this] { return own_.relays(); }};
    }
    pool->directory = std::make_unique<PoolDirectory>(to);
    if (pool->directory->ranges() > 1) recent_.clear();  // it numbers the nodes by itself
    pool_ = std::move(pool);
    return pool_;
}

std::vector<Hash128> Client::hashes(std::span<const std::string_view> names) const {
    std::vector<Hash128> out;
    out.reserve(names.size());
    for (std::string_view name : names) out.push_back(own_.hasher()(name));
    return out;
}

// By its TCP address, which is one node's alone, or else by its name, which nodes of several hosts may share.
Result<Client::Named> Client::named(std::string_view wanted) {
    WaitBudget budget(wait_budget_ms());
    auto unknown = [&](const std::string& why) {
        return Error{Code::kInvalidArgument,
                     "no one node of the pool is \"" + std::string(wanted) + "\": " + why};
    };
    if (wanted.empty()) return unknown("give a node's name or its address, host:port");
    Result<std::shared_ptr<Session>> own = own_.session();
    std::shared_ptr<Pool> others = pool();
    if (own && (*own)->address() == wanted) return Named{};
    if (others == nullptr) {
        if (!own) return own.error();
        if ((*own)->node_name() == wanted) return Named{};
        return unknown("the own node is \"" + (*own)->node_name() + "\" and has no master");
    }
    for (bool fresh : {false, true}) {
        Result<std::shared_ptr<const Members>> members = others->directory->members(fresh);
        if (!members) return members.error();
        std::vector<const Member*> fits;
        auto take = [&](std::string NodeIdentity::*field) {
            for (const Member& member : (*members)->rows) {
                if (member.identity.*field == wanted) fits.push_back(&member);
            }
        };
        take(&NodeIdentity::address);
        if (fits.empty()) take(&NodeIdentity::name);
        if (fits.size() > 1)
            return unknown("several hosts have one of that name; give its address, host:port");
        if (fits.empty()) continue;
        const Member& member = *fits.front();
        if (member.identity.incarnation == others->own) return Named{nullptr, member};
        if (member.state != MemberState::kAlive) {
            return Error{Code::kUnavailable, "the node " + std::string(wanted) + " is away"};
        }
        return Named{node(*others, member), member};
    }
    return unknown("the master knows none of that name or address");
}

void Client::each(std::vector<Group>& groups, const std::function<void(Group&)>& run) {
    std::atomic<size_t> next{0};
    const int left = WaitBudget::within(INT_MAX);
    std::atomic<int> spent{0};  // by the one that waited the longest: they wait at the same time
    auto work = [&] {
        WaitBudget own(left);
        for (size_t i; (i = next.fetch_add(1)) < groups.size();) run(groups[i]);
        int mine = left - WaitBudget::within(left);
        for (int most = spent; mine > most && !spent.compare_exchange_weak(most, mine);) {
        }
    };
    // Where no more threads are to be had, fewer do it.
    std::vector<std::thread> threads;
    size_t helpers = std::min(groups.size(), kNodesAtOnce) - (groups.empty() ? 0 : 1);
    try {
        for (size_t i = 0; i < helpers; ++i) threads.emplace_back(work);
    } catch (const std::system_error&) {
    }
    work();
    int mine = left - WaitBudget::within(left);
    for (std::thread& thread : threads) thread.join();
    WaitBudget::spent(spent - mine);
}

}  // namespace moonpool
