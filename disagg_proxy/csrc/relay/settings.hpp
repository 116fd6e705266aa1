// What a relay is told at its start: values only. Times in seconds, sizes in bytes; docs/proxy.md has the
// table. All of BodyLimits, Limits, Deadlines and BreakerLimits is the caller's to fill.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/sha256.hpp"
#include "wire/tls.hpp"

namespace moonpool::relay {

enum class Role : uint8_t { kBoth, kPrefill, kDecode };

struct EngineSettings {
    std::string name;  // header and metrics
    std::string host;  // what goes into the Host field
    Role role = Role::kBoth;
    std::string authorization = {};  // what it is shown in the field of this name, in place of the client's
    std::shared_ptr<const TlsClient> tls = nullptr;  // it is spoken to inside TLS; null: in plain
};

// A key that clients may show.
struct ApiKey {
    Digest digest{};   // its SHA-256
    std::string salt;  // hexadecimal: of its tenant, see Request::salt; "": none
};

// How much of a body is looked at; beyond it a request is refused before it costs memory or time.
struct BodyLimits {
    size_t members_max = 0;     // of the object, and of each that is looked into
    size_t prompts_max = 0;     // in one request
    size_t prompt_ids_max = 0;  // token ids, of all its prompts
};

struct Limits {
    size_t client_connections_max = 0;
    size_t head_bytes_max = 0;
    size_t body_bytes_max = 0;
    size_t bodies_bytes_max = 0;
    double address_share = 0;  // of connections and of bodies_bytes_max, that one client's address may hold
    size_t pipelined_bytes_max = 0;
    size_t write_buffer_bytes_max = 0;
    size_t unread_bytes_max = 0;  // of answers, and of what was read ahead, of all clients
    size_t prefill_answer_bytes_max = 0;
    size_t idle_upstreams_max = 0;
    size_t observations_max = 0;
    uint32_t retries_max = 0;
    BodyLimits body;
};

struct Deadlines {
    double head_s = 0;
    double body_stall_s = 0;
    double body_bytes_per_s_min = 0;
    double client_idle_s = 0;
    double client_stall_s = 0;
    double linger_s = 0;
    double decide_s = 0;
    double connect_s = 0;
    double first_byte_s = 0;
    double stream_stall_s = 0;
    double suspect_engine_s = 0;
    double silent_engine_s = 0;
    double upstream_idle_s = 0;
    int tcp_dead_peer_s = 0;
    double sweep_s = 0;
};

struct BreakerLimits {
    uint32_t failures_max = 0;
    double open_s = 0;
    double open_s_max = 0;
};

struct Settings {
    std::vector<EngineSettings> engines;
    size_t engines_max = 0;  // places for engines, some of which come later; 0: for those above
    Limits limits;
    Deadlines deadlines;
    BreakerLimits breaker;
    std::vector<ApiKey> api_keys;  // empty: no client is asked for one
    std::string access_log;        // a path, "-" for standard output, "" for none
    std::string instance;          // random hexadecimal digits: the start of request ids that are made here
    double retry_after_s = 0;
    bool registry = false;                 // engines may register; relay/routes.hpp
    std::vector<std::string> relay_paths;  // relayed besides those of inference; relay/routes.hpp
    std::shared_ptr<const TlsServer> tls;  // clients come inside TLS; null: none does
    bool spans = false;  // each request is a span of its own, which engines are told in place of the client's
};

}  // namespace moonpool::relay
