// A node whose masters are replaced, one host after the other, at addresses that it learns.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "../directory/server_bed.hpp"
#include "base/crc32c.hpp"
#include "store/node/node_member.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

// A node with memory alone. Its loop is whichever thread asks, one at a time.
class Node {
   public:
    explicit Node(const std::string& master) {
        PoolOptions pool_options;
        pool_options.arena_bytes = 1 << 20;
        auto made = Pool::create(pool_options, Incarnation{});
        REQUIRE(made.ok());
        pools_["default"] = std::move(*made);
        for (;;) {
            Result<uint64_t> bytes = pool().commit_memory();
            REQUIRE(bytes.ok());
            if (*bytes == 0) break;
            pool().open_memory();
        }
        space_ = *pool().open_space("default", "", 8);
        ClusterOptions options;
        options.master = master;
        options.name = "a";
        options.host_id = "h";
        options.address = "127.0.0.1:7710";
        Incarnation life{};
        life.fill(1);
        member_ = std::make_unique<NodeMember>(options, kToken, "", life, pools_, nullptr, removals_,
                                               [this](const std::function<void()>& f) {
                                                   std::lock_guard lock(loop_);
                                                   f();
                                                   return true;
                                               });
        REQUIRE(member_->start());
    }
    ~Node() { member_->stop(); }

    // Returns the key's hash.
    Hash128 put(const std::string& name) {
        constexpr uint64_t kBytes = 1000;
        std::lock_guard lock(loop_);
        std::optional<Extent> lease = pool().lease(kBytes, kBytes);
        REQUIRE(lease);
        std::memset(pool().writable() + lease->offset, 7, kBytes);
        Extent extent{lease->offset, kBytes};
        REQUIRE(pool().leases().commit(extent));
        const uint32_t crc = crc32c(0, pool().data() + lease->offset, kBytes);
        const Hash128 hash = pool().hash(space_, name);
        REQUIRE(pool().table().commit(space_, hash, name, extent, crc, kNoSlot, false) ==
                ObjectTable::Commit::kStored);
        pool().leases().close(lease->offset);
        return hash;
    }
    uint64_t gauge(const std::string& name) {
        const auto gauges = member_->gauges();
        const auto place = std::ranges::find(gauges, name, [](const auto& gauge) { return gauge.first; });
        REQUIRE(place != gauges.end());
        return place->second;
    }
    // One for each master that it tells, or may tell.
    size_t agents() { return member_->settled().size(); }
    std::string masters() { return member_->masters(); }

   private:
    Pool& pool() { return *pools_["default"]; }

    std::mutex loop_;
    NodeMember::Pools pools_;
    Removals removals_;
    uint32_t space_ = 0;
    std::unique_ptr<NodeMember> member_;
};

using Masters = std::unique_ptr<MasterServer>;

Masters follow(MasterServer& owner) {
    auto standby = serve(
        "127.0.0.1:0", [&](MasterServerOptions& options) { options.standby_of = owner.addresses().front(); });
    REQUIRE(until([&] { return owner.standby().is_whole; }));
    return standby;
}

void succeed(Masters owner, MasterServer& standby) {
    owner->stop();
    REQUIRE(until([&] { return standby.role() == MasterRole::kActing; }));
    REQUIRE(standby.take_over());
}

bool knows(MasterServer& master, const std::vector<Hash128>& keys) {
    DirectoryClient client(client_options(master.addresses().front()));
    return until([&] { return hits(client, keys) == keys.size(); });
}

}  // namespace

TEST_CASE("node member: the agent of an address that is forgotten takes the next one that is learned") {
    auto first = serve();
    const std::string configured = first->addresses().front();
    Node node(configured);
    std::vector<Hash128> keys = {node.put("before any standby")};
    auto second = follow(*first);
    REQUIRE(until([&] { return node.gauge("masters_joined") == 2; }));
    CHECK(node.agents() == 2);
    succeed(std::move(first), *second);
    auto third = follow(*second);
    REQUIRE(until([&] { return node.gauge("masters_joined") == 2; }));
    CHECK(node.masters() ==
          configured + "," + second->addresses().front() + "," + third->addresses().front());
    const size_t agents = node.agents();
    CHECK(agents == 3);

    for (int i = 0; i < 3; ++i) {
        keys.push_back(node.put("at owner " + std::to_string(i)));
        succeed(std::move(second), *third);
        // The list of a later term names the new owner alone. The former one has ended.
        REQUIRE(until([&] { return node.masters() == configured + "," + third->addresses().front(); }));
        REQUIRE(until([&] { return node.gauge("masters_joined") == 1; }));
        second = std::move(third);
        third = follow(*second);
        REQUIRE(until([&] { return node.gauge("masters_joined") == 2; }));
        CHECK(node.gauge("masters_learned") == 2);  // the list with a standby ends the former owner
        CHECK(node.masters() ==
              configured + "," + second->addresses().front() + "," + third->addresses().front());
        CHECK(node.agents() == agents);  // no thread and no log more
    }
    // What was put before it was told, and what is put now.
    keys.push_back(node.put("at the last"));
    succeed(std::move(second), *third);
    CHECK(knows(*third, keys));
}

TEST_CASE("node member: a master that a list has dropped keeps its agent until its connection ends") {
    auto first = serve();
    Node node(first->addresses().front());
    std::vector<Hash128> keys = {node.put("k")};
    auto cut_off = follow(*first);
    REQUIRE(until([&] { return node.gauge("masters_joined") == 2; }));
    succeed(std::move(first), *cut_off);
    auto owner = follow(*cut_off);
    REQUIRE(until([&] { return node.gauge("masters_joined") == 2; }));
    // As where the standby does not reach an owner that runs, whose clients still ask that one.
    REQUIRE(owner->take_over());
    auto standby = follow(*owner);
    // The list that names the standby is of a later term, and lacks the former owner.
    REQUIRE(until([&] { return standby->nodes().rows.size() == 1; }));
    REQUIRE(until([&] { return node.gauge("masters_joined") == 3; }));
    CHECK(node.agents() == 4);
    keys.push_back(node.put("l"));
    CHECK(cut_off->role() == MasterRole::kOwner);
    CHECK(knows(*cut_off, keys));

    cut_off->stop();
    REQUIRE(until([&] { return node.gauge("masters_joined") == 2; }));
    succeed(std::move(owner), *standby);
    auto last = follow(*standby);
    REQUIRE(until([&] { return node.gauge("masters_joined") == 2; }));
    CHECK(node.agents() == 4);  // it has taken the place of one that is gone
    succeed(std::move(standby), *last);
    CHECK(knows(*last, keys));
}
