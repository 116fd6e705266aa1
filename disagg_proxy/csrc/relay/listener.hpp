// Listener: a listening socket of the relay's.
#pragma once

#include "relay/poller.hpp"

namespace moonpool::relay {

class ClientTable;
struct RelayContext;

class Listener final : public Socket {
   public:
    Listener(RelayContext& context, ClientTable& clients, int listening);

    void on_events(uint32_t) override;
    // Take every client that is connected already: a client that still waits when the last holder of the
    // socket closes it is refused.
    void take_all();
    // From time to time: whether it may go on.
    void sweep();

   private:
    // The next one; false when there is none, or no descriptor for it.
    bool take_one();

    RelayContext& context_;
    ClientTable& clients_;
};

}  // namespace moonpool::relay
