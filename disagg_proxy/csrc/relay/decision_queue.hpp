// DecisionQueue: requests on their way to a decision: examined beside the relay's thread, put to the decider
// (all of a turn together), or waiting for a decision that it gives later. On the relay's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "relay/context.hpp"
#include "relay/examiner.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

class Exchange;

class DecisionQueue {
   public:
    // Runs a function on the relay's thread; from any thread.
    using Post = std::function<void(std::function<void()>)>;

    DecisionQueue(RelayContext& context, Decider& decider, Examiner& examiner, Post post)
        : context_(context), decider_(decider), examiner_(examiner), post_(std::move(post)) {}

    // What an exchange calls. It is then told by examined() or decided(), unless it was forgotten.
    void examine(Exchange& exchange, std::shared_ptr<Request> request, bool may_be_form);
    void ask(Exchange& exchange, Question question);
    void forget(Exchange& exchange);
    // No engine gets the request by this decision. The dispatcher has accounted for its plan: reports kLeft,
    // so that it rolls back.
    void decision_unused(uint64_t request, const Decision& decision);

    // What the relay calls.
    bool empty() const { return questions_.empty(); }
    void decide();
    void resume(uint64_t request, Decision& decision);  // what the decider gives later
    void clear() { questions_.clear(); }

   private:
    RelayContext& context_;
    Decider& decider_;
    Examiner& examiner_;
    const Post post_;
    std::vector<Question> questions_;
    std::vector<Exchange*> asking_, applying_;                       // nullptr: forgotten
    std::unordered_map<uint64_t, Exchange*> undecided_, examining_;  // by the request's id
};

}  // namespace moonpool::relay
