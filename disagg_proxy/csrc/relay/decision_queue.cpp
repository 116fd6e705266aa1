#include "relay/decision_queue.hpp"

#include <algorithm>
#include <utility>

#include "relay/exchange.hpp"

namespace moonpool::relay {

void DecisionQueue::examine(Exchange& exchange, std::shared_ptr<Request> request, bool may_be_form) {
    examining_[request->id] = &exchange;
    auto then = [this](std::shared_ptr<Request> read, Examiner::Refusal refusal) {
        post_([this, read = std::move(read), refusal = std::move(refusal)]() mutable {
            auto it = examining_.find(read->id);
            if (it == examining_.end()) return;  // the client left meanwhile
            Exchange* asked = it->second;
            examining_.erase(it);
            asked->examined(std::move(refusal));
        });
    };
    examiner_.add(std::move(request), may_be_form, std::move(then));
}

void DecisionQueue::ask(Exchange& exchange, Question question) {
    questions_.push_back(std::move(question));
    asking_.push_back(&exchange);
}

void DecisionQueue::forget(Exchange& exchange) {
    std::replace(asking_.begin(), asking_.end(), &exchange, static_cast<Exchange*>(nullptr));
    std::replace(applying_.begin(), applying_.end(), &exchange, static_cast<Exchange*>(nullptr));
    for (auto* waiting : {&undecided_, &examining_}) {
        std::erase_if(*waiting, [&](const auto& item) { return item.second == &exchange; });
    }
}

void DecisionQueue::decision_unused(uint64_t request, const Decision& decision) {
    if (decision.kind != Decision::Kind::kPlan || decision.plan.note == 0) return;
    Observation left;
    left.request = request;
    left.note = decision.plan.note;
    left.prefill = decision.plan.prefill;
    left.decode = decision.plan.engine;
    left.arrived = left.last_byte = context_.now;
    left.outcome = static_cast<uint8_t>(Outcome::kLeft);
    context_.observations.add(left);
}

void DecisionQueue::decide() {
    if (questions_.empty()) return;
    std::vector<Question> questions;
    questions.swap(questions_);
    applying_.swap(asking_);
    asking_.clear();
    decider_.decide(questions);
    for (size_t i = 0; i < questions.size(); ++i) {
        Exchange* exchange = applying_[i];
        if (exchange == nullptr) {
            decision_unused(questions[i].request->id, questions[i].decision);
            continue;
        }
        applying_[i] = nullptr;
        if (questions[i].decision.kind == Decision::Kind::kLater) {
            undecided_[questions[i].request->id] = exchange;
        } else {
            exchange->decided(questions[i].decision);
        }
    }
    applying_.clear();
}

void DecisionQueue::resume(uint64_t request, Decision& decision) {
    auto it = undecided_.find(request);
    if (it == undecided_.end()) return decision_unused(request, decision);  // the client left meanwhile
    Exchange* exchange = it->second;
    undecided_.erase(it);
    exchange->decided(decision);
}

}  // namespace moonpool::relay
