// The API keys that clients may show. Compared by digest, all of them each time, so that the time it takes
// says nothing about how near a guess was.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moonpool::relay {

class ApiKeys {
   public:
    explicit ApiKeys(const std::vector<std::string>& keys);

    bool any() const { return !digests_.empty(); }
    // authorization: the field's value, "Bearer KEY".
    bool fits(std::string_view authorization) const;

   private:
    std::vector<std::array<uint8_t, 32>> digests_;
};

}  // namespace moonpool::relay
