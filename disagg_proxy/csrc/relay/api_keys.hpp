// The API keys that clients may show. Compared by digest, all of them each time, so that the time it takes
// says nothing about how near a guess was.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "relay/settings.hpp"

namespace moonpool::relay {

class ApiKeys {
   public:
    explicit ApiKeys(std::vector<ApiKey> keys) : keys_(std::move(keys)) {}

    bool any() const { return !keys_.empty(); }
    // The key that is shown; nullptr: it is none of these. authorization: the field's value, "Bearer KEY".
    const ApiKey* find(std::string_view authorization) const;

   private:
    std::vector<ApiKey> keys_;
};

}  // namespace moonpool::relay
