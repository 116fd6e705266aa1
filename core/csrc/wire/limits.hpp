// Every maximum of the wire and the store in one place; the error of each names it.
#pragma once

#include <cstdint>

namespace moonpool {

inline constexpr uint32_t kConnectionSpacesMax = 1024;  // that one connection has open

struct Limits {
    uint32_t key_bytes = 1024;
    uint32_t parts = 4096;
    uint32_t frame_bytes = 8u << 20;
    uint32_t frame_keys = 16384;
    uint32_t handshake_bytes = 1024;         // before the peer has proved that it knows the token
    uint32_t handshake_ms = 5000;            // for the whole handshake
    uint32_t stalled_frame_ms = 10000;       // inside a frame; more as bytes move (frame_pace.hpp):
    uint32_t frame_bytes_per_s_min = 16384;  // of a peer that is not given up
    uint32_t connections = 512;              // of the own host, of which
    uint32_t connections_unproved = 64;      // may still be in the handshake
    uint32_t remote_connections = 4096;      // of other hosts: they take no place from the own host's
    uint32_t send_backlog_bytes = 1u << 20;  // over it, the node stops reading from that connection
    uint32_t pins = 65536;                   // of one connection, which hold
    uint32_t pinned_objects = 1u << 20;      // objects together
    uint32_t slabs = 256;                    // leased to one connection
    uint32_t spaces = 65536;                 // of one tenant
    double object_share = 0.25;              // the largest object, of its tenant's arena
    double pins_share = 0.75;                // of an arena, that pins may hold, of which
    double remote_pins_share = 0.25;         // those of other hosts
    uint32_t remote_pin_idle_ms = 300000;    // then a caller of another host that holds pins is given up
};

}  // namespace moonpool
