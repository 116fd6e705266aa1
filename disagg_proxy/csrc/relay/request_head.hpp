// What a request is called, and the head with which it goes to an engine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "relay/context.hpp"
#include "relay/engine.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

class RequestIds {
   public:
    // False: the kernel has no random bytes; errno says why.
    bool start();
    // Gives a request its ids, unless it has them, and takes out of its head what clients may not say.
    void give(Request& request, RelayContext& context);

   private:
    uint64_t random();

    uint64_t next_id_ = 1;
    std::array<uint64_t, 2> random_{};
};

// Appends the head. prefill: the plan, when the engine is its prefill engine.
void write_request_head(std::string& out, Request& request, const Engine& engine, size_t body_bytes,
                        const Plan* prefill);

}  // namespace moonpool::relay
