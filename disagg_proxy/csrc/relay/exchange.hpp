// Exchange: one request's way to the engines and back.
//
//     examining --> asking --plan--> [prefilling -->] answering --> over      kExchangeStates has all
//                      ^---- an engine failed and nothing was sent to the client yet ---'
//
// What may end it: the engines (answer complete, or failure), the client (cancel), a deadline (sweep), the
// server (engine_silent). Each way to the end passes observe() once. A prefill that fails costs the decode
// engine the computation, never the client an error.
//
// When both engines are asked at once, the decode engine sends the head of a stream long before it has
// anything to say. The head waits here, so that until the first byte of the body everything can still change.
//
// In the one-shot form (SGLang's) the decode engine can do nothing without the prefill engine: where other
// forms have it compute the prompt, another pair is asked. A prefill engine's refusal is the client's answer;
// an error of the decode engine's is, unless it came before the prefill engine has answered.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/state.hpp"
#include "http/body_reader.hpp"
#include "http/refusal.hpp"
#include "json/splice.hpp"
#include "relay/handover_forms.hpp"
#include "relay/leg.hpp"
#include "relay/logprob_merge.hpp"
#include "relay/observations.hpp"
#include "relay/request.hpp"
#include "relay/usage.hpp"

namespace moonpool::relay {

class Client;
class DecisionQueue;
class EngineTable;
struct RelayContext;

enum class ExchangeState : uint8_t {
    kOver,        // has no request, or is through with it
    kExamining,   // its body is read, perhaps beside the relay's thread
    kAsking,      // the decider is to name engines
    kAskingPage,  // the decider is to make a page of the proxy's own
    kPrefilling,  // at the prefill engine, whose answer the other one waits for
    kAnswering,   // at the engine that answers the client; at once: at both
};

inline constexpr Transitions<ExchangeState, 6> kExchangeStates{
    "relay::Exchange",
    {
        {ExchangeState::kOver, "over", {ExchangeState::kExamining, ExchangeState::kAskingPage}},
        {ExchangeState::kExamining, "examining", {ExchangeState::kAsking, ExchangeState::kOver}},
        // Again: an engine that the answer named has left meanwhile.
        {ExchangeState::kAsking,
         "asking",
         {ExchangeState::kAsking, ExchangeState::kPrefilling, ExchangeState::kAnswering,
          ExchangeState::kOver}},
        {ExchangeState::kAskingPage, "asking for a page", {ExchangeState::kOver}},
        {ExchangeState::kPrefilling,
         "prefilling",
         {ExchangeState::kAsking, ExchangeState::kAnswering, ExchangeState::kOver}},
        // Anew: the prefill came to nothing, and the engine that answers computes the prompt itself.
        {ExchangeState::kAnswering,
         "answering",
         {ExchangeState::kAsking, ExchangeState::kAnswering, ExchangeState::kOver}},
    }};
static_assert(kExchangeStates.is_complete());

class Exchange {
   public:
    Exchange(RelayContext& context, EngineTable& engines, DecisionQueue& decisions)
        : answer_(context, *this),
          prefill_(context, *this),
          context_(context),
          engines_(engines),
          decisions_(decisions) {}

    // Send a request to the engines. may_be_form: its body may be one instead of JSON. close: its answer is
    // the connection's last.
    void begin(Client& client, std::shared_ptr<Request> request, bool may_be_form, bool close);
    // Have a page of the proxy's own made.
    void begin_page(Client& client, std::shared_ptr<Request> request, bool close);
    void examined(std::optional<http::Refusal> refusal);  // what came of DecisionQueue::examine()
    void decided(Decision& decision);

    void cancel();       // the client is gone, or the proxy ends
    void close_after();  // draining: make this answer the connection's last
    void pause();        // the client reads too slowly
    void resume();
    void sweep(double now);
    void release();  // after its turn: nothing of the request is held any more
    bool over() const { return state_ == ExchangeState::kOver; }
    // Whether it is at the engine, which is leaving, or may still go there.
    bool may_use(const Engine& engine) const;
    // Whether what is at this leg's engine, which stands still, can go to another one.
    bool may_move(const Leg& leg);

    // What the legs call.
    void leg_sent(Leg& leg);
    void leg_received(Leg& leg, const http::ResponseHead* head, std::string_view body, bool complete);
    void leg_failed(Leg& leg, Reason reason, std::string why);
    void leg_refused(Leg& leg, const std::string& why);  // the engine refuses connections
    void leg_lacks(const char* why);  // what this process needs to connect; no engine is to blame

    // Of the last answer, for the access log.
    const Observation& observation() const { return observation_; }
    uint64_t body_bytes() const { return body_bytes_; }

   private:
    static constexpr std::string_view kEventStream = "text/event-stream";
    // Engines that one request may break: another cause than the request is worth one try elsewhere, no more.
    static constexpr uint32_t kBrokenMax = 2;
    static constexpr size_t kSmallBytes = 16 << 10;  // what a buffer keeps for the next request

    // Of the body, as the client gets it.
    enum class Framing : uint8_t { kAsItCame, kChunks, kChunksTakenOff };

    void begin_request(Client& client, std::shared_ptr<Request> request, bool close);
    void begin_attempt();
    void begin_answer();
    bool closes() const { return close_ || until_close_; }
    bool undecided() const;
    void await_decision(ExchangeState state);
    void ask();
    void follow(const Plan& plan);
    void answer_by(Engine& engine);
    void make_body(json::Splice& body, std::vector<json::Edit> edits);
    void send_answer_leg(Engine& engine, std::span<const std::string_view> body);
    void send_prefill_leg(Engine& engine, std::vector<json::Edit> edits);
    void answer_alone();
    void not_tried(const Engine& engine);
    bool may_trim_prefill();
    void take_prefill(const http::ResponseHead* head, std::string_view body, bool complete);
    void prefill_done();
    void prefill_failed(Verdict verdict, bool elsewhere);
    void answer_with_refusal();
    void answer_finished(Engine& engine, const Context& context);
    void hand_over(std::vector<json::Edit> edits);
    // Of an attempt with a prefill engine.
    bool at_once() const { return plan_.prefill >= 0 && handover_form(plan_.form).at_once(); }
    bool one_shot() const { return plan_.prefill >= 0 && handover_form(plan_.form).in_a_room; }
    void start_answer(const http::ResponseHead& head);
    void hand_on(const http::ResponseHead* head, std::string_view body, bool complete);
    bool met_nobody(const http::ResponseHead* head, std::string_view body) const;
    void ask_another_pair();
    bool has_another(const Engine& engine);
    void too_large();
    bool is_to_be_merged(const http::ResponseHead& head) const;
    void hold(std::string_view body, bool complete);
    void write(std::string_view body);
    void hand_on_merged();
    void hand_on_merged_events();
    void finish();
    void answer_failed(Reason reason, const std::string& why);
    void refuse(http::Refusal refusal, Outcome outcome);
    http::Refusal no_candidate() const;
    bool again_allowed() const;
    void note_broken(const Leg& leg, Reason reason);
    void observe(Outcome outcome);
    void reached(Stage stage);
    void begun();
    bool find_any_usage(std::string_view body, Usage& usage) const;
    void read_usage(std::string_view body);

    Leg answer_, prefill_;
    RelayContext& context_;
    EngineTable& engines_;
    DecisionQueue& decisions_;
    Client* client_ = nullptr;
    State<kExchangeStates> state_;

    // Of the request; begin_request() sets all of it.
    std::shared_ptr<Request> request_;
    bool close_ = false;        // the answer is the connection's last
    bool paused_ = false;       // the client takes too little: writes no more of the answer for now
    bool asked_again_ = false;  // because the answer named an engine that had left
    double ask_deadline_ = 0;
    uint64_t asked_at_removal_ = 0;  // engines that had been removed when the decider was asked
    uint32_t broken_ = 0;            // engines that broke when they had the request
    std::vector<uint16_t> tried_;
    std::string why_;  // how the last engine failed
    Observation observation_;

    // Of an attempt with the engines of one plan; begin_attempt() sets all of it.
    Plan plan_;
    json::Splice answer_body_, prefill_body_;
    struct PrefillAnswer {
        int status = 0;
        std::string type, text;
        bool trimmed = false;  // only the end of it is here
        http::BodyReader reader;
    } prefill_answer_;

    // Of the answer of one engine; begin_answer() sets all of it.
    int status_ = 0;
    Framing framing_ = Framing::kAsItCame;
    bool until_close_ = false;  // it ends with its connection, and so does the client's
    http::BodyReader unchunked_;
    std::string head_text_;  // the answer's head, until it goes out with the first byte of its body
    std::string content_;
    LogprobMerge merge_;
    uint64_t body_bytes_ = 0, engine_bytes_ = 0;
};

}  // namespace moonpool::relay
