// ClientTable: the connections of clients, and what they share: limits over all of them, keys, routes, and
// the pools that their requests come from. On the relay's thread.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "relay/addresses.hpp"
#include "relay/api_keys.hpp"
#include "relay/client.hpp"
#include "relay/client_budget.hpp"
#include "relay/context.hpp"
#include "relay/engine_table.hpp"
#include "relay/idle_list.hpp"
#include "relay/pools.hpp"
#include "relay/request_head.hpp"
#include "relay/routes.hpp"

namespace moonpool::relay {

class ClientTable {
   public:
    ClientTable(RelayContext& context, const EngineTable& engines, RequestPool& requests,
                ExchangePool& exchanges);

    // What a connection uses.
    const Routes routes;
    const EngineTable& engines;
    RequestPool& requests;
    ExchangePool& exchanges;
    RequestIds ids;
    Addresses addresses;
    ClientBudget budget;
    // Connections that can be closed for another one: without, and with a request of theirs served.
    IdleList strangers, idle;
    // Whether its key may ask engines. It gets the salt of that key.
    bool admit(Request& request) const;
    void set_keys(std::vector<ApiKey> keys) { keys_ = ApiKeys(std::move(keys)); }
    // Its go_on() is called in this turn.
    void set_ready(Client& client) { ready_.push_back(&client); }
    void defer_delete(Client& client);  // it has closed

    // What the relay and its listeners call.
    void accept(int fd, const sockaddr_storage& peer);
    // False: no connection was ready.
    bool go_on();
    void sweep();
    void drain();
    void abort_all();
    // Too much waits for clients: aborts those that have taken nothing for longest, until there is some room
    // again.
    void shed();
    const std::vector<std::unique_ptr<Client>>& all() const { return clients_; }
    uint64_t accepted() const { return accepted_; }
    bool check_integrity() const;

   private:
    bool close_idle(const Client& newcomer, const uint64_t* of_address);

    RelayContext& context_;
    ApiKeys keys_;
    std::vector<std::unique_ptr<Client>> clients_;  // each knows its index
    std::vector<Client*> ready_;
    uint64_t accepted_ = 0;
};

}  // namespace moonpool::relay
