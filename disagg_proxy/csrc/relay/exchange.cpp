// Runs on the relay's thread alone, but for the body's examination, which a large body has beside it. This
// half has the way of a request to one engine, the answer, retries and the end; exchange_prefill.cpp has
// what is peculiar to two engines.
//
// What decides whether a failure can still be mended is whether a byte of an answer has gone to the client
// (answer_.answered()). Before that, everything is undone and the decider is asked again, with the engines
// that were tried left out (tried_). After that, the client gets an error event where the format allows it,
// or a cut.
//
// Two bounds keep a request from harming more than one engine after the other: retries_max attempts, and
// kBrokenMax engines that broke while they had it.
//
// Each function that settles (finish, refuse, the failed ones) is the last thing done in its call:
// afterwards the exchange may belong to another request.
#include "relay/exchange.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "http/head_writer.hpp"
#include "json/scanner.hpp"
#include "relay/client.hpp"
#include "relay/context_first.hpp"
#include "relay/decision_queue.hpp"
#include "relay/engine_table.hpp"
#include "relay/request_head.hpp"
#include "relay/usage.hpp"

namespace moonpool::relay {

namespace {

// Larger bodies are read beside this thread: this much takes about a millisecond, however it is made.
constexpr size_t kBesideBytes = 128 << 10;
// An orchestrator waits a second or two for the answer to a probe.
constexpr double kProbedWithinS = 1;
// Written at once of events into which logprobs are merged.
constexpr size_t kMergedBytes = 64 << 10;

}  // namespace

void Exchange::begin_request(Client& client, std::shared_ptr<Request> request, bool close) {
    client_ = &client;
    request_ = std::move(request);
    close_ = close;
    paused_ = asked_again_ = false;
    asked_at_removal_ = broken_ = 0;
    tried_.clear();
    why_.clear();
    observation_ = Observation();
    observation_.request = request_->id;
    observation_.arrived = request_->arrived_at;
    std::memcpy(observation_.trace_id, request_->trace.trace_id, 16);
    std::memcpy(observation_.parent_id, request_->trace.parent_id, 8);
    std::memcpy(observation_.span_id, request_->trace.span_id, 8);
    observation_.sampled = request_->trace.flags & 1;
    begin_attempt();
}

// All that belongs to one plan. What belongs to the request (tried_, attempts, why_) stays.
void Exchange::begin_attempt() {
    observation_.sent_prefill = observation_.prefill_done = observation_.sent_decode = 0;
    observation_.prefill_cached_tokens = -1;
    prefill_answer_.status = 0;
    prefill_answer_.text.clear();
    prefill_answer_.trimmed = false;
    begin_answer();
}

// All that belongs to the answer of one engine. A plan may have two: the head of the first, which came
// before prefill failed, must leave nothing to the one that computes the prompt itself.
void Exchange::begin_answer() {
    status_ = 0;
    framing_ = Framing::kAsItCame;
    until_close_ = false;
    head_text_.clear();
    merge_.clear();
    body_bytes_ = engine_bytes_ = 0;
}

void Exchange::release() {
    request_.reset();
    merge_.clear();
    if (prefill_answer_.text.capacity() > kSmallBytes) prefill_answer_.text = std::string();
}

void Exchange::await_decision(ExchangeState state) {
    state_.move_to(state);
    ask_deadline_ = context_.now + context_.settings.deadlines.decide_s;
}

// In these states the exchange is known to the DecisionQueue by its request's number, and has to be
// forgotten there when it ends.
bool Exchange::undecided() const {
    return state_ == ExchangeState::kExamining || state_ == ExchangeState::kAsking ||
           state_ == ExchangeState::kAskingPage;
}

void Exchange::begin(Client& client, std::shared_ptr<Request> request, bool may_be_form, bool close) {
    begin_request(client, std::move(request), close);
    await_decision(ExchangeState::kExamining);
    if (request_->body.size() > kBesideBytes) return decisions_.examine(*this, request_, may_be_form);
    examined(request_->examine(context_.settings.limits.body, may_be_form));
}

// On the relay's thread again. The request may have been cancelled meanwhile; the queue then drops the
// result.
void Exchange::examined(std::optional<http::Refusal> refusal) {
    context_.reserved[0] += request_->facts().reserved;
    if (refusal) return refuse(std::move(*refusal), Outcome::kRefused);
    ask();
}

void Exchange::begin_page(Client& client, std::shared_ptr<Request> request, bool close) {
    begin_request(client, std::move(request), close);
    await_decision(ExchangeState::kAskingPage);
    if (request_->head.path == "/livez" || request_->head.path == "/readyz") {
        ask_deadline_ = std::min(ask_deadline_, context_.now + kProbedWithinS);
    }
    decisions_.ask(*this, Question{request_, {}, 0, true, {}});
}

// Choosing.

void Exchange::ask() {
    Question question{request_, {}, observation_.attempts, false, {}};
    bool known = engines_.candidates(*request_, tried_, question.candidates);
    if (question.candidates.empty()) {
        // No engine has the model, healthy or not: this is the client's mistake, not an outage.
        if (!known) {
            return refuse({404, "model_not_found",
                           "the model `" + request_->facts().model.substr(0, 200) +
                               "` is served by no engine here; GET /v1/models lists those that are"},
                          Outcome::kRefused);
        }
        return refuse(no_candidate(), Outcome::kFailed);
    }
    await_decision(ExchangeState::kAsking);
    // The answer may come many turns later. Engines that are removed until then stay usable for it
    // (may_use), so that a plan made before the removal is not void.
    asked_at_removal_ = engines_.removals();
    decisions_.ask(*this, std::move(question));
}

// While it is being asked for, the answer may name any engine that was there when the question was put.
bool Exchange::may_use(const Engine& engine) const {
    if (state_ == ExchangeState::kAsking) return asked_at_removal_ < engine.removal;
    if (state_ != ExchangeState::kPrefilling && state_ != ExchangeState::kAnswering) return false;
    auto place = static_cast<int>(engine.place);
    return plan_.engine == place || plan_.prefill == place;
}

http::Refusal Exchange::no_candidate() const {
    if (!why_.empty()) {
        return {502, "engine_failed", why_ + ", and no other healthy engine is left; try again"};
    }
    size_t count = engines_.count();
    if (count == 0) {
        return {503, "no_engine",
                "no engine has been discovered yet; GET /engines says where they are looked for"};
    }
    std::string which =
        count == 1 ? "the only engine is not" : "none of the " + std::to_string(count) + " engines is";
    return {503, "no_engine", which + " healthy now; GET /engines says why, try again soon"};
}

// Four answers are possible: a page (the policy refuses, or answers itself), a plan, kLater (then this is
// not called), or kFailed: the policy raised. The proxy survives a broken policy by choosing an engine
// itself.
void Exchange::decided(Decision& decision) {
    bool page = state_ == ExchangeState::kAskingPage;
    if (decision.kind == Decision::Kind::kPage) {
        // Nothing was sent to an engine: no observation, the policy knows what it answered.
        if (tried_.empty()) {
            state_.move_to(ExchangeState::kOver);
            return client_->answer_page(decision.page);
        }
        // The policy has no engine left to try; what the last one did says more than the policy's words.
        if (decision.page.reason == "no_engine") return refuse(no_candidate(), Outcome::kFailed);
        observation_.status = static_cast<uint16_t>(decision.page.status);
        observe(Outcome::kRefused);
        return client_->answer_page(decision.page);
    }
    if (decision.kind == Decision::Kind::kPlan && !page) {
        if (engines_.has(decision.plan)) return follow(decision.plan);
        decisions_.decision_unused(request_->id, decision);  // an engine of it has left meanwhile
        // Once. A policy that names engines that are gone twice in a row is treated as broken.
        if (!std::exchange(asked_again_, true)) return ask();
    }
    if (page) return refuse({500, "page_failed", "the proxy could not make this page"}, Outcome::kRefused);
    // The policy broke. The proxy goes on: any engine is better than none.
    std::vector<uint16_t> candidates;
    engines_.candidates(*request_, tried_, candidates);
    if (candidates.empty()) return refuse(no_candidate(), Outcome::kFailed);
    Plan plan;
    plan.engine = candidates[request_->id % candidates.size()];
    follow(plan);
}

void Exchange::follow(const Plan& plan) {
    begin_attempt();
    plan_ = plan;
    ++observation_.attempts;
    observation_.note = plan.note;
    observation_.decode = plan.engine;
    observation_.prefill = plan.prefill;
    observation_.stream = request_->facts().stream;
    Engine& engine = engines_.at(plan.engine);
    // A body that is no JSON object (a form, for instance) cannot carry hand-over parameters.
    if (plan.prefill < 0 || !request_->facts().is_object) {
        observation_.prefill = plan_.prefill = -1;
        return answer_by(engine);
    }
    Engine& prefill = engines_.at(plan.prefill);
    const HandoverForm& form = handover_form(plan_.form);
    state_.move_to(form.at_once() ? ExchangeState::kAnswering : ExchangeState::kPrefilling);
    send_prefill_leg(prefill, form.prefill_edits(plan_));
    // Two-step forms wait for prefill's answer (prefill_done). The others send to both engines now.
    if (!form.at_once()) return;
    // The prefill may have failed at once, and the request be on another way already.
    if (state_ == ExchangeState::kAnswering && prefill_.engine == &prefill)
        hand_over(form.answer_edits(plan_));
}

// Sending.

// One engine, which gets the request as it came, but for its switches.
void Exchange::answer_by(Engine& engine) {
    state_.move_to(ExchangeState::kAnswering);
    if (request_->switches.empty() || !request_->facts().is_object) return send_answer_leg(engine, {});
    make_body(answer_body_, {});
    send_answer_leg(engine, answer_body_.pieces());
}

void Exchange::make_body(json::Splice& body, std::vector<json::Edit> edits) {
    std::string params;
    add_switches(edits, *request_, params);
    body.make(request_->facts().object, edits);  // copies what is set
}

void Exchange::send_answer_leg(Engine& engine, std::span<const std::string_view> body) {
    begin_answer();
    answer_.body.clear();
    if (body.empty()) {
        if (!request_->body.empty()) answer_.body.push_back(request_->body);
    } else {
        answer_.body.assign(body.begin(), body.end());
    }
    answer_.head.clear();
    answer_.head_only = request_->head.method == "HEAD";
    size_t bytes = 0;
    for (std::string_view piece : answer_.body) bytes += piece.size();
    write_request_head(answer_.head, *request_, engine, bytes, nullptr);
    // Before go(), which may fail at once and ask again.
    tried_.push_back(static_cast<uint16_t>(engine.place));
    answer_.go(engine);
}

void Exchange::leg_sent(Leg& leg) {
    (&leg == &prefill_ ? observation_.sent_prefill : observation_.sent_decode) = context_.now;
}

// Receiving.

void Exchange::leg_received(Leg& leg, const http::ResponseHead* head, std::string_view body, bool complete) {
    if (&leg == &prefill_) {
        take_prefill(head, body, complete);
    } else {
        hand_on(head, body, complete);
    }
}

bool Exchange::again_allowed() const {
    return observation_.attempts <= context_.settings.limits.retries_max && broken_ < kBrokenMax;
}

// For an engine that has stopped answering health checks: its request is moved only if another engine
// works, and the request may break no further one.
bool Exchange::may_move(const Leg& leg) {
    if (answer_.answered() || observation_.attempts > context_.settings.limits.retries_max) return false;
    if (broken_ + 1 >= kBrokenMax || leg.engine == nullptr) return false;
    std::vector<uint16_t> left;
    engines_.candidates(*request_, tried_, left);
    return std::any_of(left.begin(), left.end(),
                       [&](uint16_t place) { return engines_.at(place).works(context_.now); });
}

// One piece of the answer, from the engine to the client. The order matters: first whether the piece
// changes everything (a failed pair), then the head, then bookkeeping, the client last.
void Exchange::hand_on(const http::ResponseHead* head, std::string_view body, bool complete) {
    if (one_shot() && met_nobody(head, body)) return ask_another_pair();
    engine_bytes_ += body.size();
    if (head != nullptr) {
        start_answer(*head);
        if (is_to_be_merged(*head)) {
            merge_.begin(*head);
            // The head alone is no answer yet: see the header of exchange.hpp.
        } else if (at_once() && body.empty() && !complete) {
            return answer_.set_answered(false);
        }
    }
    if (merge_.active()) return hold(body, complete);
    answer_.set_answered(true);
    read_usage(body);
    // A client of HTTP/1.0 gets the content, and the end of the connection as its end.
    if (framing_ == Framing::kChunksTakenOff) {
        content_.clear();
        unchunked_.take_all(body, content_);
        body = content_;
    }
    body_bytes_ += body.size();
    if (observation_.first_byte == 0 && (complete || !body.empty())) begun();
    // First settle, then write: what is written is all the client waits for.
    if (complete) finish();
    write(body);
    if (complete) client_->exchange_finished(closes());
}

// With the head, if it waits.
void Exchange::write(std::string_view body) {
    if (!head_text_.empty() || !body.empty()) client_->write(head_text_, body);
    head_text_.clear();
}

bool Exchange::is_to_be_merged(const http::ResponseHead& head) const {
    return one_shot() && head.status == 200 && request_->wants_prompt_logprobs() &&
           LogprobMerge::can_take(head);
}

// Nothing goes to the client before prefill has answered, which SGLang's does when decode begins.
void Exchange::hold(std::string_view body, bool complete) {
    answer_.set_answered(observation_.first_byte != 0);
    read_usage(body);
    merge_.take(body, complete);
    if (prefill_.engine == nullptr) hand_on_merged();
    bool waits = state_ == ExchangeState::kAnswering && !paused_;
    if (waits && merge_.held_bytes() > context_.settings.limits.prefill_answer_bytes_max) too_large();
}

void Exchange::hand_on_merged() {
    if (!merge_.has_prompt()) merge_.take_prompt(std::exchange(prefill_answer_.text, {}));
    if (merge_.is_stream()) return hand_on_merged_events();
    if (!merge_.complete() || merge_.held_bytes() > context_.settings.limits.prefill_answer_bytes_max) return;
    Page page;
    page.status = status_;
    page.body = merge_.merged();
    page.headers.emplace_back("X-Moonpool-Engine", answer_.engine->settings.name);
    page.headers.insert(page.headers.end(), plan_.headers.begin(), plan_.headers.end());
    answer_.set_answered(true);
    body_bytes_ = page.body.size();
    begun();
    finish();
    merge_.clear();
    client_->answer_page(page);
}

// As much as the client takes: each event carries the prompt's logprobs anew, and those may be megabytes.
void Exchange::hand_on_merged_events() {
    bool chunked = framing_ == Framing::kChunks;
    std::string out;
    for (bool more = true; more && !paused_;) {
        out.clear();
        more = merge_.put_events(out, kMergedBytes, chunked, body_bytes_);
        if (!more && merge_.complete()) break;
        if (out.empty()) return;
        answer_.set_answered(true);
        if (observation_.first_byte == 0) begun();
        write(out);
        if (state_ != ExchangeState::kAnswering) return;  // the client is gone
        out.clear();
    }
    if (paused_ || !merge_.complete()) return;
    merge_.put_rest(out, chunked, body_bytes_);
    answer_.set_answered(true);
    if (observation_.first_byte == 0) begun();
    finish();
    merge_.clear();
    write(out);
    client_->exchange_finished(closes());
}

// The first byte of the body: engines send the head of a stream before they have computed anything.
void Exchange::begun() {
    observation_.first_byte = context_.now;
    answer_.engine->counts.first_byte.observe(context_.now - request_->arrived_at);
    reached(Stage::kBegun);
}

// Fields of the engine are passed on but for those of one hop; the proxy's own go behind them.
void Exchange::start_answer(const http::ResponseHead& head) {
    const Engine& engine = *answer_.engine;
    status_ = head.status;
    observation_.status = static_cast<uint16_t>(head.status);
    // Where no policy had to read what the client asks for, the answer says whether it is a stream.
    if (plan_.note == 0 && head.event_stream) observation_.stream = 1;
    if (head.framing == http::Framing::kChunked) {
        framing_ = request_->head.http_1_0 ? Framing::kChunksTakenOff : Framing::kChunks;
        unchunked_ = http::BodyReader(http::Framing::kChunked, 0);
    }
    // An engine's answer that ends with its connection ends with the client's, too.
    until_close_ = head.framing == http::Framing::kUntilClose;
    std::array<http::OwnField, 16> own;
    size_t count = 0;
    own[count++] = {"X-Moonpool-Engine", engine.settings.name};
    own[count++] = {"X-Request-Id", request_->request_id};
    std::string cached;
    if (observation_.handed_over != 0) {  // the answering engine counts what it was handed over as cached
        int32_t known = observation_.prefill_cached_tokens;
        cached = known < 0 ? "unknown" : std::to_string(known);
        own[count++] = {"X-Moonpool-Prefill-Cached", cached};
    }
    if (!plan_.headers.empty() && http::find_field(request_->head.fields, "x-moonpool-decision") != nullptr) {
        for (const auto& [name, value] : plan_.headers) {
            if (count < own.size()) own[count++] = {name, value};
        }
    }
    head_text_.clear();
    http::write_response_head(head_text_, head, std::span(own.data(), count), framing_ == Framing::kChunks,
                              closes());
}

bool Exchange::find_any_usage(std::string_view body, Usage& usage) const {
    return request_->kind == Kind::kGenerate ? find_native_usage(body, usage) : find_usage(body, usage);
}

void Exchange::read_usage(std::string_view body) {
    Usage usage;
    if (!find_any_usage(body, usage)) return;
    observation_.prompt_tokens = usage.prompt;
    observation_.completion_tokens = usage.completion;
    if (usage.cached >= 0) observation_.cached_tokens = usage.cached;
}

void Exchange::finish() {
    Engine& engine = *answer_.engine;
    engine.counts.whole.observe(context_.now - request_->arrived_at);
    ++engine.counts.answers[static_cast<size_t>(std::min(status_ / 100, 5))];
    engine.counts.relayed_bytes += engine_bytes_;
    answer_.leave(verdict_on_status(status_));
    if (prefill_.engine != nullptr) {
        // The answer is whole before prefill's: with one token, or when the decode engine computed the
        // prompt itself.
        ++prefill_.engine->counts.prefills[static_cast<size_t>(Prefill::kOvertaken)];
        // In one shot prefill has given all it had, and answers, too.
        Verdict met = status_ < 500 ? Verdict::kGood : Verdict::kNone;
        one_shot() ? prefill_.leave_drained(met) : prefill_.leave(Verdict::kNone);
    }
    if (one_shot() && status_ < 500) {
        engine.suspected = engines_.at(plan_.prefill).suspected = 0;
    }
    observe(Outcome::kAnswered);
}

// Failing.

// From a leg, which stands still at its engine: exactly one of the functions below makes it leave.
void Exchange::leg_failed(Leg& leg, Reason reason, std::string why) {
    Engine& engine = *leg.engine;
    bool after = &leg == &answer_ && answer_.answered();
    ++engine.counts.failures[after][static_cast<size_t>(reason)];
    why_ = "engine " + engine.settings.name + " " + why;
    note_broken(leg, reason);
    if (&leg == &answer_) return answer_failed(reason, why);
    ++engine.counts.prefills[static_cast<size_t>(Prefill::kFailed)];
    prefill_failed(Verdict::kBad, true);
}

// Another engine of the same attempt may have broken, too, and the relay has not read it yet.
void Exchange::note_broken(const Leg& leg, Reason reason) {
    if (!leg.exposed() || reason == Reason::kRemoved || reason == Reason::kFirstByte) return;
    const Leg& other = &leg == &answer_ ? prefill_ : answer_;
    broken_ += 1 + (other.engine != nullptr && other.is_cut());
    if (broken_ >= kBrokenMax) why_ += ", as another engine did that had this request";
}

// The next health check is not waited for.
void Exchange::leg_refused(Leg& leg, const std::string& why) { engines_.refused(*leg.engine, why); }

// No socket or no port is left on this host. Another engine would not help, and none is blamed.
void Exchange::leg_lacks(const char* why) {
    prefill_.leave(Verdict::kNone);
    if (answer_.answered()) return;  // concurrent, and the client is being answered already
    answer_.leave(Verdict::kNone);
    refuse(
        {503, "open_files", std::string("the proxy cannot connect to engines now: ") + why + "; try again"},
        Outcome::kFailed);
}

void Exchange::answer_failed(Reason reason, const std::string&) {
    Engine& engine = *answer_.engine;
    if (answer_.answered()) {
        // Half an event cannot be followed by an error event; then the cut itself has to say it.
        bool between = merge_.active() || answer_.between_events();
        ++engine.counts.answers[static_cast<size_t>(std::min(status_ / 100, 5))];
        engine.counts.relayed_bytes += engine_bytes_;
        answer_.leave(Verdict::kBad);
        prefill_.leave(Verdict::kNone);
        observe(Outcome::kBrokenOff);
        if (!between) return client_->exchange_broken();
        client_->write(http::error_event("engine_failed", why_, framing_ == Framing::kChunks), {});
        return client_->exchange_finished(true);
    }
    answer_.leave(Verdict::kBad);
    prefill_.leave(Verdict::kNone);
    if (at_once()) not_tried(engines_.at(plan_.prefill));
    // A first byte that never came is not tried elsewhere: it took long enough.
    if (reason != Reason::kFirstByte && again_allowed()) {
        ++engine.counts.retries;
        observation_.handed_over = 0;
        return ask();
    }
    refuse({reason == Reason::kFirstByte ? 504 : 502, "engine_failed", why_ + "; try again"},
           Outcome::kFailed);
}

void Exchange::refuse(http::Refusal refusal, Outcome outcome) {
    observation_.status = static_cast<uint16_t>(refusal.status);
    if (observation_.attempts > 0) {
        observe(outcome);
    } else {
        state_.move_to(ExchangeState::kOver);
    }
    client_->exchange_refused(refusal);
}

// The one exit of an exchange that was sent to an engine: what policies learn from is complete, since each
// such request passes here once.
void Exchange::observe(Outcome outcome) {
    state_.move_to(ExchangeState::kOver);
    observation_.last_byte = context_.now;
    observation_.outcome = static_cast<uint8_t>(outcome);
    if (observation_.attempts > 0) context_.observations.add(observation_);
}

void Exchange::reached(Stage stage) {
    if (observation_.note == 0) return;  // the policy keeps no books
    Observation now = observation_;
    now.stage = static_cast<uint8_t>(stage);
    context_.observations.add(now);
}

// What the client does.

// The client left. Closing the engine's connection is what makes the engine stop computing.
void Exchange::cancel() {
    if (over()) return;
    if (undecided()) decisions_.forget(*this);
    request_->gone = true;
    const Leg& where = answer_.engine != nullptr ? answer_ : prefill_;
    if (where.engine != nullptr) {
        ++where.engine->counts.disconnects[answer_.answered()];
        where.engine->counts.relayed_bytes += engine_bytes_;
    }
    answer_.leave(Verdict::kNone);
    prefill_.leave(Verdict::kNone);
    observe(Outcome::kLeft);
}

void Exchange::close_after() { close_ = true; }

void Exchange::pause() {
    paused_ = true;
    answer_.pause();
}

void Exchange::resume() {
    paused_ = false;
    answer_.resume();
    if (state_ == ExchangeState::kAnswering && merge_.active() && observation_.first_byte != 0)
        hand_on_merged();
}

void Exchange::sweep(double now) {
    if (undecided() && now >= ask_deadline_) {
        decisions_.forget(*this);
        const char* why = state_ == ExchangeState::kAskingPage
                              ? "the proxy's own thread did not answer in time"
                              : "the proxy found no engine for this request in time; try again";
        return refuse({503, "undecided", why}, Outcome::kFailed);
    }
    if (!over()) prefill_.sweep(now);
    if (!over()) answer_.sweep(now);
}

}  // namespace moonpool::relay
