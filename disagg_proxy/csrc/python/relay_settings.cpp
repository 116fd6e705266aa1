#include "python/relay_settings.hpp"

#include "python/settings.hpp"

namespace moonpool::python {

namespace {

template <class Visitor>
void visit(relay::Settings& settings, Visitor& visitor) {
    visitor.field("client_connections_max", settings.limits.client_connections_max);
    visitor.field("head_bytes_max", settings.limits.head_bytes_max);
    visitor.field("body_bytes_max", settings.limits.body_bytes_max);
    visitor.field("bodies_bytes_max", settings.limits.bodies_bytes_max);
    visitor.field("address_share", settings.limits.address_share);
    visitor.field("members_max", settings.limits.body.members_max);
    visitor.field("prompts_max", settings.limits.body.prompts_max);
    visitor.field("prompt_ids_max", settings.limits.body.prompt_ids_max);
    visitor.field("pipelined_bytes_max", settings.limits.pipelined_bytes_max);
    visitor.field("write_buffer_bytes_max", settings.limits.write_buffer_bytes_max);
    visitor.field("prefill_answer_bytes_max", settings.limits.prefill_answer_bytes_max);
    visitor.field("unread_bytes_max", settings.limits.unread_bytes_max);
    visitor.field("idle_upstreams_max", settings.limits.idle_upstreams_max);
    visitor.field("observations_max", settings.limits.observations_max);
    visitor.field("retries_max", settings.limits.retries_max);
    visitor.field("head_s", settings.deadlines.head_s);
    visitor.field("body_stall_s", settings.deadlines.body_stall_s);
    visitor.field("body_bytes_per_s_min", settings.deadlines.body_bytes_per_s_min);
    visitor.field("client_idle_s", settings.deadlines.client_idle_s);
    visitor.field("client_stall_s", settings.deadlines.client_stall_s);
    visitor.field("linger_s", settings.deadlines.linger_s);
    visitor.field("decide_s", settings.deadlines.decide_s);
    visitor.field("connect_s", settings.deadlines.connect_s);
    visitor.field("first_byte_s", settings.deadlines.first_byte_s);
    visitor.field("stream_stall_s", settings.deadlines.stream_stall_s);
    visitor.field("suspect_engine_s", settings.deadlines.suspect_engine_s);
    visitor.field("silent_engine_s", settings.deadlines.silent_engine_s);
    visitor.field("upstream_idle_s", settings.deadlines.upstream_idle_s);
    visitor.field("tcp_dead_peer_s", settings.deadlines.tcp_dead_peer_s);
    visitor.field("sweep_s", settings.deadlines.sweep_s);
    visitor.field("breaker_failures_max", settings.breaker.failures_max);
    visitor.field("breaker_open_s", settings.breaker.open_s);
    visitor.field("breaker_open_s_max", settings.breaker.open_s_max);
}

}  // namespace

std::vector<std::string> relay_setting_names() {
    relay::Settings settings;
    SettingNames found;
    visit(settings, found);
    return found.names;
}

void fill(const py::dict& values, relay::Settings& settings) {
    SettingValues given(values, "proxy");
    visit(settings, given);
    given.check();
}

}  // namespace moonpool::python
