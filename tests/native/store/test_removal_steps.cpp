// RemovalSteps, over its own questions and answers.
#include <doctest/doctest.h>

#include <memory>
#include <set>

#include "store/client/removal_steps.hpp"

using namespace moonpool;

namespace {

constexpr Hash128 kKey{1, 2};

Incarnation life(uint8_t n) {
    Incarnation life{};
    life[0] = n;
    return life;
}

std::shared_ptr<Members> members_of(uint8_t nodes) {
    auto members = std::make_shared<Members>();
    for (uint8_t n = 0; n < nodes; ++n) {
        Member member;
        member.id = n;
        member.identity.name = "node-" + std::to_string(n);
        member.identity.host_id = "host-" + std::to_string(n);
        member.identity.incarnation = life(n);
        members->rows.push_back(member);
    }
    return members;
}

struct Bed {
    LocationCache locations;
    RecentCopies recent;
    RemovalSteps steps{{kKey}, life(0), true, locations, recent};

    // Up to the end, with no copy but on the own node, 0.
    explicit Bed(uint8_t nodes) {
        OrderAnswer answer;
        answer.at.keys.end_key();
        answer.at.members = members_of(nodes);
        answer.versions = {7};
        steps.ordered(0, answer);
        steps.own_told(std::vector<uint8_t>{1});
        steps.all_told();
        REQUIRE(steps.wants() == RemovalSteps::Wants::kEnd);
    }

    void fail_all(std::set<NodeId>* asked) {
        for (const NodeItems& node : std::vector<NodeItems>(steps.witnesses())) {
            asked->insert(node.member.id);
            steps.witnessed(node, Error{Code::kTimeout, "no answer"});
        }
    }
};

}  // namespace

TEST_CASE("removal steps: another node is told where one that was to know does not answer") {
    Bed bed(4);
    std::set<NodeId> asked;
    bed.fail_all(&asked);
    CHECK(asked.size() == 1);
    std::vector<NodeItems> second = bed.steps.witnesses();
    REQUIRE(second.size() == 1);
    CHECK(!asked.contains(second[0].member.id));
    bed.steps.witnessed(second[0], std::vector<uint8_t>{0});
    CHECK(bed.steps.witnesses().empty());
    bed.steps.ended(std::vector<Version>{7});
    CHECK(bed.steps.acknowledged());
    CHECK(bed.steps.unsure(0).empty());
}

TEST_CASE("removal steps: it says so where the own node alone knows, and others did not answer") {
    Bed bed(4);
    std::set<NodeId> asked;
    bed.fail_all(&asked);
    bed.fail_all(&asked);
    CHECK(asked.size() == 2);
    CHECK(bed.steps.witnesses().empty());  // a caller waits for two at most
    bed.steps.ended(std::vector<Version>{7});
    CHECK(bed.steps.acknowledged());
    CHECK(bed.steps.unsure(0) == "nodes that restart together with the master");
}

TEST_CASE("removal steps: nodes that do not serve the tenant need not know") {
    Bed bed(3);
    for (std::vector<NodeItems> asked = bed.steps.witnesses(); !asked.empty();
         asked = bed.steps.witnesses()) {
        for (const NodeItems& node : asked)
            bed.steps.witnessed(node, Error{Code::kAuth, "this node has no such tenant"});
    }
    bed.steps.ended(std::vector<Version>{7});
    CHECK(bed.steps.unsure(0).empty());
}

TEST_CASE("removal steps: a pool of one node needs no other to know") {
    Bed bed(1);
    CHECK(bed.steps.witnesses().empty());
    bed.steps.ended(std::vector<Version>{7});
    CHECK(bed.steps.unsure(0).empty());
}
