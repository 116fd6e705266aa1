#include "relay/exchange.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <utility>

#include "http/head_writer.hpp"
#include "json/scanner.hpp"
#include "relay/client.hpp"
#include "relay/context_first.hpp"
#include "relay/engine.hpp"
#include "relay/relay.hpp"
#include "relay/usage.hpp"

namespace moonpool::relay {

namespace {

// Larger bodies are read beside this thread: this much takes about a millisecond, however it is made.
constexpr size_t kBesideBytes = 128 << 10;
// Written at once of events into which logprobs are merged.
constexpr size_t kMergedBytes = 64 << 10;

}  // namespace

void Exchange::reset(Client& client, std::shared_ptr<Request> request, bool close) {
    client_ = &client;
    request_ = std::move(request);
    close_ = close;
    page_ = taking_chunks_off_ = chunked_ = paused_ = asked_again_ = false;
    broken_ = 0;
    tried_.clear();
    why_.clear();
    status_ = 0;
    body_bytes_ = 0;
    observation_ = Observation();
    observation_.request = request_->id;
    observation_.arrived = request_->arrived_at;
    std::memcpy(observation_.trace_id, request_->trace.trace_id, 16);
    std::memcpy(observation_.parent_id, request_->trace.parent_id, 8);
    std::memcpy(observation_.span_id, request_->trace.span_id, 8);
    observation_.sampled = request_->trace.flags & 1;
}

void Exchange::begin(Client& client, std::shared_ptr<Request> request, bool close) {
    reset(client, std::move(request), close);
    if (request_->body.size() <= kBesideBytes) {
        bool form = relay_.routes.is_added(request_->head.path);
        return examined(request_->examine(relay_.settings.limits.body, form));
    }
    state_ = State::kExamining;
    ask_deadline_ = relay_.now + relay_.settings.deadlines.decide_s;
    relay_.examine(*this, request_);
}

void Exchange::examined(std::optional<http::Refusal> refusal) {
    relay_.reserved[0] += request_->facts().reserved;
    if (refusal) return refuse(std::move(*refusal), Outcome::kRefused);
    ask();
}

void Exchange::begin_page(Client& client, std::shared_ptr<Request> request, bool close) {
    reset(client, std::move(request), close);
    page_ = true;
    state_ = State::kAsking;
    ask_deadline_ = relay_.now + relay_.settings.deadlines.decide_s;
    relay_.ask(*this, Question{request_, {}, 0, true, {}});
}

void Exchange::release() {
    request_.reset();
    for (std::string* text : {&held_, &prefill_answer_}) {
        if (text->capacity() > kSmallBytes) *text = std::string();
    }
}

// Choosing.

void Exchange::ask() {
    Question question{request_, {}, observation_.attempts, false, {}};
    bool known = relay_.candidates(*request_, tried_, question.candidates);
    if (question.candidates.empty()) {
        if (!known) {
            return refuse({404, "model_not_found",
                           "the model `" + request_->facts().model.substr(0, 200) +
                               "` is served by no engine here; GET /v1/models lists those that are"},
                          Outcome::kRefused);
        }
        return refuse(nobody(), Outcome::kFailed);
    }
    state_ = State::kAsking;
    ask_deadline_ = relay_.now + relay_.settings.deadlines.decide_s;
    asked_at_removal_ = relay_.removals();
    relay_.ask(*this, std::move(question));
}

// While it is being asked for, the answer may name any engine that was there when the question was put.
bool Exchange::may_use(const Engine& engine) const {
    if (state_ == State::kOver || state_ == State::kExamining) return false;
    if (state_ == State::kAsking) return !page_ && asked_at_removal_ < engine.removal;
    auto place = static_cast<int>(engine.place);
    return plan_.engine == place || plan_.prefill == place;
}

http::Refusal Exchange::nobody() const {
    if (!why_.empty()) {
        return {502, "engine_failed", why_ + ", and no other healthy engine is left; try again"};
    }
    size_t count = relay_.engine_count();
    if (count == 0) {
        return {503, "no_engine",
                "no engine has been discovered yet; GET /engines says where they are looked for"};
    }
    std::string which =
        count == 1 ? "the only engine is not" : "none of the " + std::to_string(count) + " engines is";
    return {503, "no_engine", which + " healthy now; GET /engines says why, try again soon"};
}

void Exchange::decided(Decision& decision) {
    if (decision.is == Decision::Is::kPage) {
        if (tried_.empty()) {
            state_ = State::kOver;
            return client_->answer_page(decision.page);
        }
        if (decision.page.reason == "no_engine") return refuse(nobody(), Outcome::kFailed);
        observation_.status = static_cast<uint16_t>(decision.page.status);
        observe(Outcome::kRefused);
        return client_->answer_page(decision.page);
    }
    if (decision.is == Decision::Is::kPlan && !page_) {
        if (relay_.are_there(decision.plan)) return follow(decision.plan);
        relay_.not_wanted(request_->id, decision);  // an engine of it has left meanwhile
        if (!std::exchange(asked_again_, true)) return ask();
    }
    if (page_) return refuse({500, "page_failed", "the proxy could not make this page"}, Outcome::kRefused);
    // The policy broke. The proxy goes on: any engine is better than none.
    std::vector<uint16_t> candidates;
    relay_.candidates(*request_, tried_, candidates);
    if (candidates.empty()) return refuse(nobody(), Outcome::kFailed);
    Plan plan;
    plan.engine = candidates[request_->id % candidates.size()];
    follow(plan);
}

void Exchange::follow(const Plan& plan) {
    plan_ = plan;
    ++observation_.attempts;
    observation_.note = plan.note;
    observation_.decode = plan.engine;
    observation_.prefill = plan.prefill;
    // Nothing of an attempt before this one.
    answer_.answered = prefill_.answered = false;
    head_waits_ = merging_ = merging_events_ = held_whole_ = false;
    held_.clear();
    logprobs_.reset();
    engine_bytes_ = 0;
    observation_.sent_prefill = observation_.prefill_done = observation_.sent_decode = 0;
    observation_.prefill_cached_tokens = -1;
    observation_.stream = request_->facts().stream;
    Engine& engine = *relay_.engines[static_cast<size_t>(plan.engine)];
    if (plan.prefill < 0 || !request_->facts().is_object) {
        observation_.prefill = plan_.prefill = -1;
        return answer_by(engine);
    }
    Engine& prefill = *relay_.engines[static_cast<size_t>(plan.prefill)];
    const HandoverForm& form = handover_form(plan_.form);
    state_ = form.at_once() ? State::kAnswering : State::kPrefilling;
    send_prefill_leg(prefill, form.prefill_edits(plan_));
    if (!form.at_once()) return;
    // The prefill may have failed at once, and the request be on another way already.
    if (state_ == State::kAnswering && prefill_.engine == &prefill) hand_over(form.answer_edits(plan_));
}

// Sending.

// One engine, which gets the request as it came.
void Exchange::answer_by(Engine& engine) {
    state_ = State::kAnswering;
    send_answer_leg(engine, {});
}

void Exchange::send_answer_leg(Engine& engine, std::span<const std::string_view> body) {
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
    relay_.write_request_head(answer_.head, *request_, engine, bytes, nullptr);
    tried_.push_back(static_cast<uint16_t>(engine.place));
    answer_.go(engine);
}

void Exchange::leg_sent(Leg& leg) {
    (&leg == &prefill_ ? observation_.sent_prefill : observation_.sent_decode) = relay_.now;
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
    return observation_.attempts <= relay_.settings.limits.retries_max && broken_ < kBrokenMax;
}

bool Exchange::may_move(const Leg& leg) {
    if (answer_.answered || observation_.attempts > relay_.settings.limits.retries_max) return false;
    if (broken_ + 1 >= kBrokenMax || leg.engine == nullptr) return false;
    std::vector<uint16_t> left;
    relay_.candidates(*request_, tried_, left);
    return std::any_of(left.begin(), left.end(),
                       [&](uint16_t place) { return relay_.engines[place]->works(relay_.now); });
}

void Exchange::hand_on(const http::ResponseHead* head, std::string_view body, bool complete) {
    if (one_shot() && met_nobody(head, body)) return ask_another_pair();
    engine_bytes_ += body.size();
    if (head != nullptr) {
        start_answer(*head);
        head_waits_ = true;
        merging_ = is_to_be_merged(*head);
        if (at_once() && !merging_ && body.empty() && !complete) {
            answer_.answered = false;
            return;
        }
    }
    if (merging_) return hold(body, complete);
    answer_.answered = true;
    read_usage(body);
    if (taking_chunks_off_) {
        content_.clear();
        while (!body.empty()) {
            auto piece = unchunked_.take(body);
            content_.append(piece.content);
            body.remove_prefix(piece.taken);
            if (piece.taken == 0) break;
        }
        body = content_;
    }
    body_bytes_ += body.size();
    if (observation_.first_byte == 0 && (complete || !body.empty())) begun();
    std::string_view text = head_waits_ ? std::string_view(head_text_) : std::string_view();
    head_waits_ = false;
    if (complete) {
        // First settle, then write: what is written is all the client waits for.
        finish();
        client_->write(text, body);
        client_->exchange_finished(close_);
    } else if (!text.empty() || !body.empty()) {
        client_->write(text, body);
    }
}

bool Exchange::is_to_be_merged(const http::ResponseHead& head) {
    if (!one_shot() || head.status != 200 || !request_->wants_prompt_logprobs()) return false;
    const http::Field* type = http::find_field(head.fields, "content-type");
    merging_events_ = type != nullptr && type->value.starts_with(kEventStream);
    held_.clear();
    held_whole_ = false;
    unchunked_ = http::BodyReader(head.framing, head.content_length);
    return !merging_events_ || head.framing != http::Framing::kLength;  // the length is promised
}

// Nothing goes to the client before prefill has answered, which SGLang's does when decode begins.
void Exchange::hold(std::string_view body, bool complete) {
    answer_.answered = observation_.first_byte != 0;
    read_usage(body);
    while (!body.empty()) {
        auto piece = unchunked_.take(body);
        held_.append(piece.content);
        body.remove_prefix(piece.taken);
        if (piece.taken == 0) break;
    }
    held_whole_ = complete;
    if (prefill_.engine == nullptr) hand_on_merged();
    bool waits = state_ == State::kAnswering && !paused_;
    if (waits && held_.size() > relay_.settings.limits.prefill_answer_bytes_max) too_large();
}

void Exchange::hand_on_merged() {
    if (merging_events_) return hand_on_merged_events();
    if (!held_whole_ || held_.size() > relay_.settings.limits.prefill_answer_bytes_max) return;
    logprobs_.emplace(prefill_answer_);
    Page page;
    page.status = status_;
    page.body = logprobs_->put_into(held_);
    page.headers.emplace_back("X-Moonpool-Engine", answer_.engine->settings.name);
    page.headers.insert(page.headers.end(), plan_.headers.begin(), plan_.headers.end());
    answer_.answered = true;
    body_bytes_ = page.body.size();
    begun();
    finish();
    held_ = prefill_answer_ = std::string();
    client_->answer_page(page);
}

// As much as the client takes: each event carries the prompt's logprobs anew, and those may be megabytes.
void Exchange::hand_on_merged_events() {
    if (!logprobs_) logprobs_.emplace(prefill_answer_);
    std::string out;
    std::string_view left = held_;
    auto put = [&](std::string_view text) {
        char size[24];
        std::snprintf(size, sizeof(size), "%zx\r\n", text.size());
        if (chunked_) out += size;
        out += text;
        if (chunked_) out += "\r\n";
        body_bytes_ += text.size();
    };
    auto write = [&] {
        answer_.answered = true;
        if (observation_.first_byte == 0) begun();
        std::string_view head = head_waits_ ? std::string_view(head_text_) : std::string_view();
        head_waits_ = false;
        client_->write(head, out);
        out.clear();
    };
    while (!paused_) {
        auto event = next_event(left);
        if (event.empty()) break;
        put("data: " + logprobs_->put_into(event) + "\n\n");
        if (out.size() >= kMergedBytes) write();
        if (state_ != State::kAnswering) return;  // the client is gone
    }
    held_.erase(0, held_.size() - left.size());
    if (paused_ || !held_whole_) return out.empty() ? void() : write();
    if (!held_.empty()) put(held_);  // no event: it goes on as it came
    if (chunked_) out += "0\r\n\r\n";
    answer_.answered = true;
    if (observation_.first_byte == 0) begun();
    finish();
    held_ = prefill_answer_ = std::string();
    logprobs_.reset();
    client_->write(head_waits_ ? std::string_view(head_text_) : std::string_view(), out);
    head_waits_ = false;
    client_->exchange_finished(close_);
}

// The first byte of the body: engines send the head of a stream before they have computed anything.
void Exchange::begun() {
    observation_.first_byte = relay_.now;
    answer_.engine->counts.first_byte.observe(relay_.now - request_->arrived_at);
    reached(Stage::kBegun);
}

void Exchange::start_answer(const http::ResponseHead& head) {
    const Engine& engine = *answer_.engine;
    status_ = head.status;
    observation_.status = static_cast<uint16_t>(head.status);
    // Where no policy had to read what the client asks for, the answer says whether it is a stream.
    if (plan_.note == 0 && head.event_stream) observation_.stream = 1;
    chunked_ = head.framing == http::Framing::kChunked;
    taking_chunks_off_ = chunked_ && request_->head.http_1_0;
    if (taking_chunks_off_) {
        unchunked_ = http::BodyReader(http::Framing::kChunked, 0);
        chunked_ = false;
    }
    close_ = close_ || head.framing == http::Framing::kUntilClose;
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
    http::write_response_head(head_text_, head, std::span(own.data(), count), chunked_, close_);
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
    engine.counts.whole.observe(relay_.now - request_->arrived_at);
    ++engine.counts.answers[static_cast<size_t>(std::min(status_ / 100, 5))];
    engine.counts.relayed_bytes += engine_bytes_;
    answer_.leave(verdict_on_status(status_));
    if (prefill_.engine != nullptr) {
        ++prefill_.engine->counts.prefills[static_cast<size_t>(Prefill::kOvertaken)];
        // In one shot prefill has given all it had, and answers, too.
        Verdict met = status_ < 500 ? Verdict::kGood : Verdict::kNone;
        one_shot() ? prefill_.leave_drained(met) : prefill_.leave(Verdict::kNone);
    }
    if (one_shot() && status_ < 500) {
        engine.suspected = relay_.engines[static_cast<size_t>(plan_.prefill)]->suspected = 0;
    }
    observe(Outcome::kAnswered);
}

// Failing.

void Exchange::leg_failed(Leg& leg, Reason reason, std::string why) {
    Engine& engine = *leg.engine;
    bool after = &leg == &answer_ && answer_.answered;
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

void Exchange::leg_lacks(const char* why) {
    prefill_.leave(Verdict::kNone);
    if (answer_.answered) return;  // concurrent, and the client is being answered already
    answer_.leave(Verdict::kNone);
    refuse(
        {503, "open_files", std::string("the proxy cannot connect to engines now: ") + why + "; try again"},
        Outcome::kFailed);
}

void Exchange::answer_failed(Reason reason, const std::string&) {
    Engine& engine = *answer_.engine;
    if (answer_.answered) {
        bool between = merging_ || answer_.between_events();
        ++engine.counts.answers[static_cast<size_t>(std::min(status_ / 100, 5))];
        engine.counts.relayed_bytes += engine_bytes_;
        answer_.leave(Verdict::kBad);
        prefill_.leave(Verdict::kNone);
        observe(Outcome::kBrokenOff);
        if (!between) return client_->exchange_broken();
        client_->write(http::error_event("engine_failed", why_, chunked_), {});
        return client_->exchange_finished(true);
    }
    answer_.leave(Verdict::kBad);
    prefill_.leave(Verdict::kNone);
    if (at_once()) not_tried(*relay_.engines[static_cast<size_t>(plan_.prefill)]);
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
        state_ = State::kOver;
    }
    client_->exchange_refused(refusal);
}

void Exchange::observe(Outcome outcome) {
    state_ = State::kOver;
    observation_.last_byte = relay_.now;
    observation_.outcome = static_cast<uint8_t>(outcome);
    if (observation_.attempts > 0) relay_.observations.add(observation_);
}

void Exchange::reached(Stage stage) {
    if (observation_.note == 0) return;  // the policy keeps no books
    Observation now = observation_;
    now.stage = static_cast<uint8_t>(stage);
    relay_.observations.add(now);
}

// What the client does.

void Exchange::cancel() {
    if (state_ == State::kOver) return;
    if (state_ == State::kAsking || state_ == State::kExamining) relay_.forget(*this);
    request_->gone = true;
    const Leg& where = answer_.engine != nullptr ? answer_ : prefill_;
    if (where.engine != nullptr) {
        ++where.engine->counts.disconnects[answer_.answered];
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
    if (state_ == State::kAnswering && merging_ && observation_.first_byte != 0) hand_on_merged();
}

void Exchange::sweep(double now) {
    if ((state_ == State::kAsking || state_ == State::kExamining) && now >= ask_deadline_) {
        relay_.forget(*this);
        return refuse({503, "undecided", "the proxy found no engine for this request in time; try again"},
                      Outcome::kFailed);
    }
    if (state_ != State::kOver) prefill_.sweep(now);
    if (state_ != State::kOver) answer_.sweep(now);
}

}  // namespace moonpool::relay
