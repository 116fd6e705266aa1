#include "python/relay_settings.hpp"

#include "python/raise.hpp"

namespace moonpool::python {

namespace {

class Taken {
   public:
    explicit Taken(const Values& values) : left_(values) {}
    template <class T>
    void take(const char* name, T& into) {
        auto it = left_.find(name);
        if (it == left_.end()) return;
        into = static_cast<T>(it->second);
        left_.erase(it);
    }
    void check() const {
        if (!left_.empty()) {
            raise(Error{Code::kInvalidArgument, "there is no setting " + left_.begin()->first}, "proxy");
        }
    }

   private:
    Values left_;
};

}  // namespace

void take(const Values& values, relay::Limits& limits) {
    Taken taken(values);
    taken.take("client_connections_max", limits.client_connections_max);
    taken.take("head_bytes_max", limits.head_bytes_max);
    taken.take("body_bytes_max", limits.body_bytes_max);
    taken.take("bodies_bytes_max", limits.bodies_bytes_max);
    taken.take("address_share", limits.address_share);
    taken.take("members_max", limits.body.members_max);
    taken.take("prompts_max", limits.body.prompts_max);
    taken.take("prompt_ids_max", limits.body.prompt_ids_max);
    taken.take("pipelined_bytes_max", limits.pipelined_bytes_max);
    taken.take("write_buffer_bytes_max", limits.write_buffer_bytes_max);
    taken.take("prefill_answer_bytes_max", limits.prefill_answer_bytes_max);
    taken.take("unread_bytes_max", limits.unread_bytes_max);
    taken.take("idle_upstreams_max", limits.idle_upstreams_max);
    taken.take("observations_max", limits.observations_max);
    taken.take("retries_max", limits.retries_max);
    taken.check();
}

void take(const Values& values, relay::Deadlines& deadlines) {
    Taken taken(values);
    taken.take("head_s", deadlines.head_s);
    taken.take("body_stall_s", deadlines.body_stall_s);
    taken.take("body_bytes_per_s_min", deadlines.body_bytes_per_s_min);
    taken.take("client_idle_s", deadlines.client_idle_s);
    taken.take("client_stall_s", deadlines.client_stall_s);
    taken.take("linger_s", deadlines.linger_s);
    taken.take("decide_s", deadlines.decide_s);
    taken.take("connect_s", deadlines.connect_s);
    taken.take("first_byte_s", deadlines.first_byte_s);
    taken.take("stream_stall_s", deadlines.stream_stall_s);
    taken.take("suspect_engine_s", deadlines.suspect_engine_s);
    taken.take("silent_engine_s", deadlines.silent_engine_s);
    taken.take("upstream_idle_s", deadlines.upstream_idle_s);
    taken.take("tcp_dead_peer_s", deadlines.tcp_dead_peer_s);
    taken.take("sweep_s", deadlines.sweep_s);
    taken.check();
}

void take(const Values& values, relay::BreakerLimits& breaker) {
    Taken taken(values);
    taken.take("failures_max", breaker.failures_max);
    taken.take("open_s", breaker.open_s);
    taken.take("open_s_max", breaker.open_s_max);
    taken.check();
}

}  // namespace moonpool::python
