// What a relay is told at its start: values only. Times in seconds, sizes in bytes; docs/proxy.md has the
// table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moonpool::relay {

enum class Role : uint8_t { kBoth, kPrefill, kDecode };

struct EngineSettings {
    std::string name;  // header and metrics
    std::string host;  // what goes into the Host field
    Role role = Role::kBoth;
    std::string authorization = {};  // what it is shown in the field of this name, in place of the client's
};

// How much of a body is looked at; beyond it a request is refused before it costs memory or time.
struct BodyLimits {
    size_t members_max = 1024;        // of the object, and of each that is looked into
    size_t prompts_max = 4096;        // in one request
    size_t prompt_ids_max = 1 << 20;  // token ids, of all its prompts
};

struct Limits {
    size_t client_connections_max = 10000;
    size_t head_bytes_max = 32 << 10;
    size_t body_bytes_max = 64 << 20;
    size_t bodies_bytes_max = size_t{1} << 30;
    double address_share = 0.5;  // of connections and of bodies_bytes_max, that one client's address may hold
    size_t pipelined_bytes_max = 64 << 10;
    size_t write_buffer_bytes_max = 256 << 10;
    size_t unread_bytes_max = 512 << 20;  // of answers, and of what was read ahead, of all clients
    size_t prefill_answer_bytes_max = 16 << 20;
    size_t idle_upstreams_max = 256;
    size_t observations_max = 65536;
    uint32_t retries_max = 2;
    BodyLimits body;
};

struct Deadlines {
    double head_s = 20;
    double body_stall_s = 30;
    double body_bytes_per_s_min = 1024;
    double client_idle_s = 75;
    double client_stall_s = 300;
    double linger_s = 2;
    double decide_s = 60;
    double connect_s = 5;
    double first_byte_s = 600;
    double stream_stall_s = 600;
    double suspect_engine_s = 5;
    double silent_engine_s = 15;
    double upstream_idle_s = 4;
    int tcp_dead_peer_s = 30;
    double sweep_s = 0.25;
};

struct BreakerLimits {
    uint32_t failures_max = 5;
    double open_s = 2;
    double open_s_max = 30;
};

struct Settings {
    std::vector<EngineSettings> engines;
    size_t engines_max = 0;  // places for engines, some of which come later; 0: for those above
    Limits limits;
    Deadlines deadlines;
    BreakerLimits breaker;
    std::vector<std::string> api_keys;  // empty: no client is asked for one
    std::string access_log;             // a path, "-" for standard output, "" for none
    std::string instance;  // random hexadecimal digits: the start of request ids that are made here
    double retry_after_s = 1;
    bool registry = false;                 // engines may register; relay/routes.hpp
    std::vector<std::string> relay_paths;  // relayed besides those of inference; relay/routes.hpp
    bool spans = false;  // each request is a span of its own, which engines are told in place of the client's
};

}  // namespace moonpool::relay
