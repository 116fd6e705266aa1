// RequestPool, ExchangePool: objects for requests, used again and again. What is given back is still valid
// until the turn is over, when recycle() makes it ready for another request.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "relay/examiner.hpp"
#include "relay/exchange.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

class RequestPool {
   public:
    // examiner: frees large bodies.
    explicit RequestPool(Examiner& examiner) : examiner_(examiner) {}

    std::shared_ptr<Request> take() {
        if (spare_.empty()) return std::make_shared<Request>();
        std::shared_ptr<Request> request = std::move(spare_.back());
        spare_.pop_back();
        return request;
    }
    void give_back(std::shared_ptr<Request>&& request) {
        if (request) spent_.push_back(std::move(request));
    }
    void recycle() {
        for (auto& request : spent_) {
            if (request.use_count() == 1 && request->body.capacity() >= kMappedBytes) {
                examiner_.free(std::exchange(request->body, {}));
            }
            if (request.use_count() != 1 || spare_.size() >= kSpareMax) continue;
            request->clear();
            spare_.push_back(std::move(request));
        }
        spent_.clear();
    }

    // Buffers of this size and more are the kernel's as soon as they are freed, instead of holes in a heap:
    // it is malloc's threshold.
    static constexpr size_t kMappedBytes = 1 << 20;

   private:
    static constexpr size_t kSpareMax = 512;

    Examiner& examiner_;
    std::vector<std::shared_ptr<Request>> spent_, spare_;
};

class ExchangePool {
   public:
    ExchangePool(RelayContext& context, EngineTable& engines, DecisionQueue& decisions)
        : context_(context), engines_(engines), decisions_(decisions) {}

    Exchange* take() {
        if (spare_.empty()) {
            all_.push_back(std::make_unique<Exchange>(context_, engines_, decisions_));
            return all_.back().get();
        }
        Exchange* exchange = spare_.back();
        spare_.pop_back();
        return exchange;
    }
    void give_back(Exchange* exchange) { spent_.push_back(exchange); }
    void recycle() {
        for (Exchange* exchange : spent_) {
            exchange->release();
            spare_.push_back(exchange);
        }
        spent_.clear();
    }
    // Whether a request is at the engine or may still go there.
    bool may_use(const Engine& engine) const {
        auto uses = [&](const auto& exchange) { return exchange->may_use(engine); };
        return std::any_of(all_.begin(), all_.end(), uses);
    }

   private:
    RelayContext& context_;
    EngineTable& engines_;
    DecisionQueue& decisions_;
    std::vector<std::unique_ptr<Exchange>> all_;
    std::vector<Exchange*> spent_, spare_;
};

}  // namespace moonpool::relay
