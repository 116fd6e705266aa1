// Request: a client's request, whole. Made by the client's connection, examined once, perhaps in another
// thread, then shared by the exchange that answers it and by the decider, perhaps in another thread; from
// then on only `gone` changes, and the decider may set `switches` before it answers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "http/refusal.hpp"
#include "http/request_parser.hpp"
#include "json/scanner.hpp"
#include "relay/settings.hpp"

namespace moonpool::relay {

enum class Kind : uint8_t { kChat, kCompletions, kEmbeddings, kGenerate, kOther };

Kind kind_of_path(std::string_view path);

// The ids of W3C Trace Context, as the engines are told them.
struct Trace {
    uint8_t trace_id[16] = {};
    uint8_t parent_id[8] = {};  // zero: the client named none, the trace begins here
    uint8_t span_id[8] = {};
    uint8_t flags = 1;  // bit 0: sampled
};

struct Request {
    uint64_t id = 0;
    Kind kind = Kind::kOther;
    double arrived_at = 0;
    std::string head_bytes;  // what `head` points into
    http::RequestHead head;
    std::string body;  // without transfer coding
    std::string request_id;
    Trace trace;
    std::string traceparent;  // made here; "" when the client's own goes on among its fields
    // Of the client's tenant, hexadecimal; "": none. Engines are told it with the request, so that a block of
    // one tenant is never found by another one, and does not say by the time it takes what others have asked.
    std::string salt;
    // Names and JSON values of what connectors of engines are told of this request alone: members of
    // "moonpool" in kv_transfer_params, in every body that is made of the request, also where a plan failed.
    std::vector<std::pair<std::string, std::string>> switches;
    std::atomic<bool> gone{false};

    // What the JSON of the body says; all empty where it is no JSON object, and until examine().
    struct Facts {
        json::Object object;
        bool is_object = false;
        std::string model;
        bool stream = false;
        bool one = false;  // it is for one answer to one prompt
        std::optional<int64_t> max_tokens;
        std::optional<std::string> cache_salt;
        std::optional<size_t> prompts;
        bool reserved = false;  // it had members that no client may say
    };
    const Facts& facts() const { return facts_; }

    // Reads the whole body, once, before any caller asks for its facts, takes reserved members out of it, and
    // sets the salt.
    // Why it cannot be served, or nullopt. form: multipart/form-data may stand in the place of JSON. Takes
    // its time for a large body: beside the relay's thread, which leaves the request alone meanwhile.
    std::optional<http::Refusal> examine(const BodyLimits& limits, bool form);

    // The member that has the prompt is "prompt", of SGLang's /generate "text" or "input_ids"
    // (or "input_embeds", of which only the count is looked at).

    // The ids when it is one list of them. nullopt: it is not.
    std::optional<std::vector<uint32_t>> prompt_tokens() const;
    // Whether it is to be answered by a model that reads text: a chat, or a completion of text.
    bool has_text() const;
    // When it is one string, its text (UTF-8, unless the client sent other bytes).
    std::optional<std::string> prompt_text() const;
    // How many there are when it is a list of prompts. nullopt: it is one.
    std::optional<size_t> prompt_count() const { return facts_.prompts; }
    // Whether it is for one answer to one prompt; else what an answer's tokens and time say is not known.
    bool wants_one() const { return facts_.one; }
    // Whether it is SGLang's /generate, and asks for the logprobs of the prompt, too.
    bool wants_prompt_logprobs() const;

    // Ready for another request; keeps small buffers.
    void clear();

   private:
    const json::Member* prompt() const;
    std::optional<http::Refusal> scan(const BodyLimits& limits);
    std::optional<http::Refusal> look_at_prompt(const BodyLimits& limits);
    std::optional<http::Refusal> set_salt();
    void look_at_members(const BodyLimits& limits);

    Facts facts_;
};

// How a prefill engine (Plan::prefill >= 0) and the one that answers work together; the numbers are those of
// observations.
enum class Form : uint8_t {
    kTwoStep = 1,      // prefill computes the prompt, its kv_transfer_params go to engine
    kConcurrent,       // both at once, each with the kv_transfer_params given (JSON values)
    kOneShot,          // both at once with the same body, in which `members` (names, JSON values) are set
    kContextFirst,     // prefill computes the prompt, the disaggregated_params of its answer go to engine
    kGenerationFirst,  // both at once: prefill with the disaggregated_params given, engine with `members` set
};

// What a policy made of a request. Places count from 0 in the order of the settings.
struct Plan {
    int engine = -1;
    int prefill = -1;
    Form form = Form::kTwoStep;
    std::string prefill_params, engine_params;
    std::vector<std::pair<std::string, std::string>> members;
    std::vector<std::pair<std::string, std::string>>
        prefill_headers;                                       // for prefill, in place of the client's
    std::vector<std::pair<std::string, std::string>> headers;  // for the client, when it asks for them
    int64_t note = 0;                                          // comes back in the observation
};

// An answer of the proxy itself. reason: for the metric of refusals, "" where it is none.
struct Page {
    int status = 200;
    std::string content_type;  // "": application/json
    std::vector<std::pair<std::string, std::string>> headers;
    std::string body;
    std::string reason;
};

// What came of asking. kLater: the decider will say, by the request's id.
struct Decision {
    enum class Kind : uint8_t { kLater, kPlan, kPage, kFailed };
    Kind kind = Kind::kFailed;
    Plan plan;
    Page page;
};

// One request to decide about. page: for one of the proxy's own paths, so a Page is wanted.
struct Question {
    std::shared_ptr<Request> request;
    std::vector<uint16_t> candidates;
    uint32_t attempt = 0;
    bool page = false;
    Decision decision;
};

// What decides. Called on the relay's thread, with all that has come up since the last call.
class Decider {
   public:
    virtual ~Decider() = default;
    virtual void decide(std::vector<Question>& questions) = 0;
    // An engine refuses connections: it has left the rotation.
    virtual void engine_refused(size_t place, const std::string& why) = 0;
    // An engine that was removed has left nothing behind: its place is free.
    virtual void engine_gone(size_t) {}
    virtual void thread_started() {}
    virtual void thread_ending() {}
};

}  // namespace moonpool::relay
