// libfabric of this host, with its provider that works over TCP, on loopback.
#pragma once

#include "engine/engine.hpp"

namespace moonpool::testing {

inline transport::FabricOptions tcp_fabric() {
    transport::FabricOptions options;
    options.provider = "tcp";
    options.source = "127.0.0.1";
    options.chunk_bytes = 1u << 20;  // many borders
    options.piece_bytes = 256u << 10;
    options.silence_ms = 5000;  // of a machine that is busy
    return options;
}

// While one lives, engines of the test have that provider.
class FabricBed {
   public:
    FabricBed() { in_use() = true; }
    ~FabricBed() { in_use() = false; }
    FabricBed(const FabricBed&) = delete;

    static bool& in_use() {
        static bool used = false;
        return used;
    }
};

}  // namespace moonpool::testing
