// LogprobMerge: a filter for the answer of a decode engine that is to carry what only the prefill engine
// knows, the logprobs of the prompt. It holds the answer's body until prefill has answered, then gives it out
// merged: a stream event by event, any other answer whole. Pure: bytes in, bytes out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "http/body_reader.hpp"
#include "http/response_parser.hpp"
#include "relay/one_shot.hpp"

namespace moonpool::relay {

class LogprobMerge {
   public:
    // False: an event stream whose length is promised; it goes on as it is.
    static bool can_take(const http::ResponseHead& head);

    // Inactive, for another answer; keeps small buffers.
    void clear();
    // Active, for the answer with this head.
    void begin(const http::ResponseHead& head);
    bool active() const { return active_; }
    bool is_stream() const { return stream_; }

    // Bytes of decode's body as they came, in any framing. complete: the last ones.
    void take(std::string_view body, bool complete);
    bool complete() const { return complete_; }
    size_t held_bytes() const { return held_.size(); }

    // prefill's answer, whole. Before any of what follows.
    void take_prompt(std::string prefill);
    bool has_prompt() const { return logprobs_.has_value(); }

    // Of an answer that is no stream, when it is complete.
    std::string merged() const { return logprobs_->put_into(held_); }
    // Of a stream: appends its events merged, each as a chunk if `chunked`, until `out` has `most` bytes, and
    // adds their bytes without framing to body_bytes. False: no whole event is left.
    bool put_events(std::string& out, size_t most, bool chunked, uint64_t& body_bytes);
    // Of a stream that is complete: what stands behind its last event, as it came, and the end of the chunks.
    void put_rest(std::string& out, bool chunked, uint64_t& body_bytes);

   private:
    bool active_ = false, stream_ = false, complete_ = false;
    http::BodyReader reader_;
    std::string held_;     // of decode's body, without framing: what was not given out
    std::string prefill_;  // what logprobs_ points into
    std::optional<PromptLogprobs> logprobs_;
};

}  // namespace moonpool::relay
