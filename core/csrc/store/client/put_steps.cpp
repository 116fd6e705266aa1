#include "store/client/put_steps.hpp"

#include <numeric>
#include <utility>

namespace moonpool {

PutSteps::PutSteps(size_t items, const Plan& plan) : plan_(plan), left_(items) {
    std::iota(left_.begin(), left_.end(), 0);
    if (plan_.replace) {
        wants_ = Wants::kRemove;
    } else {
        after_removal();
    }
}

void PutSteps::after_removal() { go_to(plan_.elsewhere_wanted ? Wants::kPutWanted : Wants::kSpill); }

void PutSteps::go_to(Wants next) {
    // Only a new block is better in free memory elsewhere than in the place of another here.
    bool may_spill = plan_.ack && !plan_.replace && !plan_.own_wanted;
    if (next == Wants::kSpill && !may_spill) next = Wants::kPutHere;
    // A put without acknowledgement waits for no node but its own.
    if (next == Wants::kPutElsewhere && !plan_.ack) next = Wants::kDone;
    wants_ = left_.empty() ? Wants::kDone : next;
}

void PutSteps::put(std::vector<size_t> left) {
    left_ = std::move(left);
    switch (wants_) {
        case Wants::kPutWanted:
            return go_to(Wants::kSpill);
        case Wants::kSpill:
            return go_to(Wants::kPutHere);
        case Wants::kPutHere:
            return go_to(Wants::kPutElsewhere);
        default:
            return go_to(Wants::kDone);
    }
}

PlaceSteps::PlaceSteps(std::vector<size_t> items, const Incarnation& own,
                       std::shared_ptr<const Members> members, bool evict)
    : left_(std::move(items)), members_(std::move(members)), evict_(evict) {
    for (const Member& member : members_->rows) {
        if (member.identity.incarnation == own) where_.avoid_nodes.push_back(member.id);
    }
    ask_again();
}

void PlaceSteps::ask_again() {
    if (left_.empty()) {
        wants_ = Wants::kDone;
    } else if (attempts_++ < kAttemptsMax) {
        wants_ = Wants::kPlace;
    } else {
        next_kind();
    }
}

// First nodes with free memory, then those that would have to evict.
void PlaceSteps::next_kind() {
    if (where_.evict || !evict_) {
        wants_ = Wants::kDone;
        return;
    }
    where_.evict = true;
    attempts_ = 1;
    wants_ = Wants::kPlace;
}

void PlaceSteps::placed(const Result<std::vector<NodeId>>& answer) {
    if (!answer || answer->empty()) return next_kind();
    chosen_ = answer->front();
    where_.avoid_nodes.push_back(chosen_);
    const Member* member = members_->find(chosen_);
    if (member != nullptr) node_ = *member;
    wants_ = member == nullptr ? Wants::kMembers : Wants::kPut;
}

void PlaceSteps::members(const Result<std::shared_ptr<const Members>>& answer) {
    if (!answer) {
        wants_ = Wants::kDone;
        return;
    }
    members_ = *answer;
    const Member* member = members_->find(chosen_);
    if (member == nullptr) return ask_again();
    node_ = *member;
    wants_ = Wants::kPut;
}

void PlaceSteps::put(std::vector<size_t> left) {
    left_ = std::move(left);
    ask_again();
}

}  // namespace moonpool
