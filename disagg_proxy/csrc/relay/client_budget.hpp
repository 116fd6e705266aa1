// ClientBudget: what clients hold of the proxy's memory, all together and each address: bodies of requests,
// and bytes that no client has taken yet. Bodies for the proxy's own pages, for which no client is asked for
// a key here, come out of a small budget of their own. Pure.
#pragma once

#include <cstddef>
#include <optional>

#include "http/refusal.hpp"
#include "relay/addresses.hpp"
#include "relay/settings.hpp"

namespace moonpool::relay {

class ClientBudget {
   public:
    enum class For { kEngines, kPages };

    explicit ClientBudget(const Limits& limits);

    // So many bytes of a body more, for a client of this address. Why not, or nullopt.
    std::optional<http::Refusal> take_body(For whom, Held& address, size_t bytes);
    void give_body(For whom, Held& address, size_t bytes);
    size_t body_bytes() const { return engines_.held + pages_.held; }

    // What one client has not taken was `before` bytes and is `after` now.
    void change_unread(size_t before, size_t after) { unread_bytes_ += after - before; }
    size_t unread_bytes() const { return unread_bytes_; }

    // body_bytes, unread_bytes: the sums over all clients.
    bool check_integrity(size_t body_bytes, size_t unread_bytes) const;

   private:
    struct Purse {
        size_t held = 0, most = 0;  // bytes
    };
    Purse& of(For whom) { return whom == For::kPages ? pages_ : engines_; }

    const Limits& limits_;
    Purse engines_, pages_;
    size_t unread_bytes_ = 0;
};

}  // namespace moonpool::relay
