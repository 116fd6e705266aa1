// MasterAddresses: where the masters of a pool are reached, of which one serves at a time: a standby refuses
// the connection until it has taken over. Of one thread, which dials.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "directory/range_handshake.hpp"
#include "directory/ranges.hpp"
#include "wire/address.hpp"
#include "wire/dial.hpp"

namespace moonpool {

class MasterAddresses {
   public:
    // "host:port", or several with commas between; all of them masters of that range
    explicit MasterAddresses(const std::string& list, const Range& range = {})
        : addresses_(split_addresses(list)), range_(range) {}

    size_t size() const { return addresses_.size(); }

    // The first that takes the connection, tried one after the other; with `to` but for the address. The one
    // that served last comes last: this is called when its connection is lost.
    Result<Dialed> dial(DialOptions to) {
        Error why{Code::kInvalidArgument, "no address of a master is given"};
        for (size_t i = 0; i < addresses_.size(); ++i) {
            if (to.given_up != nullptr && to.given_up->load()) break;
            to.address = addresses_[next_++ % addresses_.size()];
            Result<Dialed> dialed = dial_range(to, range_);
            if (dialed) return dialed;
            why = dialed.error();
        }
        return why;
    }

   private:
    const std::vector<std::string> addresses_;
    const Range range_;
    size_t next_ = 0;
};

}  // namespace moonpool
