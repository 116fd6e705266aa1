// A master, and nodes that are a set of keys, over real sockets in one process.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "directory/directory_client.hpp"
#include "directory/master_server.hpp"
#include "directory/member_agent.hpp"
#include "directory/protocol.hpp"

namespace moonpool::testing {

inline constexpr const char* kToken = "the token of these tests";

inline Hash128 hash_of(uint64_t n) { return xxh3_128(&n, sizeof(n)); }

inline std::vector<Hash128> hashes(uint64_t begin, uint64_t end) {
    std::vector<Hash128> all;
    for (uint64_t n = begin; n < end; ++n) all.push_back(hash_of(n));
    return all;
}

inline bool until(const std::function<bool()>& condition, int timeout_ms = 10000) {
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) return false;
        ::poll(nullptr, 0, 1);  // lets others run; no event ends it
    }
    return true;
}

inline std::unique_ptr<MasterServer> serve(const std::string& address = "127.0.0.1:0",
                                           const std::function<void(MasterServerOptions&)>& change = {}) {
    MasterServerOptions options;
    options.addresses = {address};
    options.token = kToken;
    if (change) change(options);
    Result<std::unique_ptr<MasterServer>> server = MasterServer::create(std::move(options));
    if (!server) FAIL(server.error().text);
    REQUIRE((*server)->start());
    return std::move(*server);
}

// What a node's store would be: a set of keys under a lock.
class FakeNode {
   public:
    FakeNode(const std::string& master, const std::string& name, uint8_t life = 1,
             std::shared_ptr<const TlsClient> tls = nullptr, const Range& range = {})
        : range_(range),
          log_(
              1000, [this] { agent_.wake(); }, nullptr, range),
          agent_(options(master, name, life, tls, range), hooks(), log_) {
        REQUIRE(agent_.start());
    }
    ~FakeNode() { agent_.stop(); }

    void put(uint64_t n) {
        std::lock_guard lock(mutex_);
        if (keys_.insert(n).second) log_.push(hash_of(n), Tier::kDram, true);
    }
    void remove(uint64_t n) {
        std::lock_guard lock(mutex_);
        if (keys_.erase(n) == 1) log_.push(hash_of(n), Tier::kDram, false);
    }
    size_t size() {
        std::lock_guard lock(mutex_);
        return keys_.size();
    }
    Version applied() {
        std::lock_guard lock(mutex_);
        return applied_;
    }
    void set_applied(Version applied) {
        std::lock_guard lock(mutex_);
        applied_ = std::max(applied_, applied);
        confirmed_ = applied_;
    }
    MemberAgent& agent() { return agent_; }
    DeltaLog& log() { return log_; }

   private:
    static MemberAgentOptions options(const std::string& master, const std::string& name, uint8_t life,
                                      std::shared_ptr<const TlsClient> tls, const Range& range) {
        MemberAgentOptions o;
        o.range = range;
        o.tls = std::move(tls);
        o.master = master;
        o.token = kToken;
        o.identity.name = name;
        o.identity.host_id = "h-" + name;
        o.identity.address = "127.0.0.1:7710";
        o.identity.incarnation.fill(life);
        return o;
    }
    MemberHooks hooks() {
        return MemberHooks{
            [this](uint64_t& cursor, std::vector<DeltaRow>& rows) {
                std::lock_guard lock(mutex_);
                auto it = keys_.lower_bound(cursor);
                for (int i = 0; i < 100 && it != keys_.end(); ++i, ++it) {
                    if (range_.contains(hash_of(*it))) rows.push_back({hash_of(*it), Tier::kDram, true});
                }
                cursor = it == keys_.end() ? 0 : *it;
                return true;
            },
            [this](NodeLoad& load) {
                std::lock_guard lock(mutex_);
                load.tenants.push_back({"default", 1000, 1000 - keys_.size(), keys_.size(), 0});
                return true;
            },
            [this](const Drops& drops) {
                std::lock_guard lock(mutex_);
                std::erase_if(keys_, [&](uint64_t n) {
                    return drops.all ||
                           std::ranges::find(drops.items, hash_of(n), &Drop::hash) != drops.items.end();
                });
                applied_ = std::max(applied_, drops.upto);
                return true;
            },
            [this] {
                std::lock_guard lock(mutex_);
                return applied_;
            },
            [this] {
                std::lock_guard lock(mutex_);
                return confirmed_;
            },
            [this](Version version) {
                std::lock_guard lock(mutex_);
                confirmed_ = std::max(confirmed_, version);
                return true;
            },
            [this] {
                std::lock_guard lock(mutex_);
                return keys_.empty();
            },
            [](Version, Version&, std::vector<Drop>&) { return kNoVersion; }};
    }

    std::mutex mutex_;
    std::set<uint64_t> keys_;
    Version applied_ = kNoVersion, confirmed_ = kNoVersion;
    const Range range_;
    DeltaLog log_;
    MemberAgent agent_;
};

inline DirectoryClientOptions client_options(const std::string& master) {
    DirectoryClientOptions options;
    options.master = master;
    options.token = kToken;
    options.timeout_ms = 5000;
    return options;
}

inline size_t hits(DirectoryClient& client, std::span<const Hash128> keys) {
    Result<LocateAnswer> answer = client.locate(keys);
    if (!answer) return 0;
    size_t n = 0;
    for (size_t i = 0; i < answer->keys.size(); ++i) n += !answer->keys[i].empty();
    return n;
}

}  // namespace moonpool::testing
