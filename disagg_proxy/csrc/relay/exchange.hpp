// Exchange: one request's way to the engines and back.
//
//     [examining -->] asking --plan--> [prefilling -->] answering --> over
//                        ^---- an engine failed and nothing was sent to the client yet ---'
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
#include <string>
#include <vector>

#include "http/body_reader.hpp"
#include "http/refusal.hpp"
#include "json/splice.hpp"
#include "relay/handover_forms.hpp"
#include "relay/leg.hpp"
#include "relay/observations.hpp"
#include "relay/one_shot.hpp"
#include "relay/request.hpp"
#include "relay/usage.hpp"

namespace moonpool::relay {

class Client;

class Exchange {
   public:
    explicit Exchange(Relay& relay) : answer_(relay, *this), prefill_(relay, *this), relay_(relay) {}

    // Send a request to the engines. close: its answer is the connection's last.
    void begin(Client& client, std::shared_ptr<Request> request, bool close);
    // Have a page of the proxy's own made.
    void begin_page(Client& client, std::shared_ptr<Request> request, bool close);
    void examined(std::optional<http::Refusal> refusal);  // what came of relay.examine()
    void decided(Decision& decision);

    void cancel();       // the client is gone, or the proxy ends
    void close_after();  // draining: make this answer the connection's last
    void pause();        // the client reads too slowly
    void resume();
    void sweep(double now);
    void release();  // after its turn: nothing of the request is held any more
    bool over() const { return state_ == State::kOver; }
    // Whether it is at the engine, which is leaving, or may still go there.
    bool may_use(const Engine& engine) const;
    bool answering() const { return answer_.answered; }
    // Whether what is at this leg's engine, which stands still, can go to another one.
    bool may_move(const Leg& leg);

    // What the legs call.
    void leg_sent(Leg& leg);
    void leg_received(Leg& leg, const http::ResponseHead* head, std::string_view body, bool complete);
    void leg_failed(Leg& leg, Reason reason, std::string why);
    void leg_lacks(const char* why);  // what this process needs to connect; no engine is to blame

    // Of the last answer, for the access log.
    const Observation& observation() const { return observation_; }
    uint64_t body_bytes() const { return body_bytes_; }

   private:
    static constexpr std::string_view kEventStream = "text/event-stream";
    // Engines that one request may break: another cause than the request is worth one try elsewhere, no more.
    static constexpr uint32_t kBrokenMax = 2;
    static constexpr size_t kSmallBytes = 16 << 10;  // what a buffer keeps for the next request

    enum class State : uint8_t { kOver, kExamining, kAsking, kPrefilling, kAnswering };

    void reset(Client& client, std::shared_ptr<Request> request, bool close);
    void ask();
    void follow(const Plan& plan);
    void answer_by(Engine& engine);
    void send_answer_leg(Engine& engine, std::span<const std::string_view> body);
    void send_prefill_leg(Engine& engine, std::span<const json::Edit> edits);
    void answer_alone();
    void not_tried(const Engine& engine);
    bool may_trim_prefill();
    void take_prefill(const http::ResponseHead* head, std::string_view body, bool complete);
    void prefill_done();
    void prefill_failed(Verdict verdict, bool elsewhere);
    void answer_with_refusal();
    void answer_finished(Engine& engine, const Context& context);
    void hand_over(std::span<const json::Edit> edits);
    // Of an attempt with a prefill engine.
    bool at_once() const { return plan_.prefill >= 0 && handover_form(plan_.form).at_once(); }
    bool one_shot() const { return plan_.prefill >= 0 && handover_form(plan_.form).in_a_room; }
    void start_answer(const http::ResponseHead& head);
    void hand_on(const http::ResponseHead* head, std::string_view body, bool complete);
    bool met_nobody(const http::ResponseHead* head, std::string_view body) const;
    void ask_another_pair();
    bool has_another(const Engine& engine);
    void too_large();
    bool is_to_be_merged(const http::ResponseHead& head);
    void hold(std::string_view body, bool complete);
    void hand_on_merged();
    void hand_on_merged_events();
    void finish();
    void answer_failed(Reason reason, const std::string& why);
    void refuse(http::Refusal refusal, Outcome outcome);
    http::Refusal nobody() const;
    bool again_allowed() const;
    void note_broken(const Leg& leg, Reason reason);
    void observe(Outcome outcome);
    void reached(Stage stage);
    void begun();
    bool find_any_usage(std::string_view body, Usage& usage) const;
    void read_usage(std::string_view body);

    Leg answer_, prefill_;
    Relay& relay_;
    Client* client_ = nullptr;
    State state_ = State::kOver;
    std::shared_ptr<Request> request_;
    bool close_ = false, page_ = false;
    double ask_deadline_ = 0;
    uint64_t asked_at_removal_ = 0;  // engines that had been removed when the decider was asked
    bool asked_again_ = false;       // because the answer named an engine that had left
    uint32_t broken_ = 0;            // engines that broke when they had the request

    Plan plan_;
    std::vector<uint16_t> tried_;
    std::string why_;  // how the last engine failed

    json::Splice answer_body_, prefill_body_;
    int prefill_status_ = 0;
    std::string prefill_type_, prefill_answer_;
    bool prefill_trimmed_ = false;
    http::BodyReader prefill_reader_;

    int status_ = 0;
    bool chunked_ = false;  // the client gets chunks
    bool taking_chunks_off_ = false;
    bool head_waits_ = false;  // the answer's head goes out with the first byte of its body
    // Of an answer into which prefill's logprobs are merged: what has come and did not go out.
    bool merging_ = false, merging_events_ = false, held_whole_ = false;
    std::string held_;
    bool paused_ = false;                     // the client reads too slowly
    std::optional<PromptLogprobs> logprobs_;  // of prefill_answer_
    http::BodyReader unchunked_;
    std::string head_text_, content_;
    uint64_t body_bytes_ = 0, engine_bytes_ = 0;
    Observation observation_;
};

}  // namespace moonpool::relay
