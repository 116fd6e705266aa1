// The half of Exchange for two engines: what prefill answers, how it is handed over, and what becomes of a
// request when prefill fails or the two do not come together.
//
// The forms of a hand-over (handover_forms.hpp) differ in when the decode engine is asked and what is put
// into the two bodies. What is common: prefill's answer is collected here and never passed on as it comes;
// whatever prefill does, the client gets either the decode engine's answer or one error.
#include <algorithm>

#include "http/head_writer.hpp"
#include "json/scanner.hpp"
#include "relay/client.hpp"
#include "relay/engine_table.hpp"
#include "relay/exchange.hpp"
#include "relay/one_shot.hpp"
#include "relay/request_head.hpp"
#include "relay/usage.hpp"

namespace moonpool::relay {

namespace {

// Of an answer that the exchange does not wait for: enough for what it says of its tokens, or for an error.
constexpr size_t kKeptBytes = 16 << 10;
// A first event that is no larger is looked at whole: it may be an error.
constexpr size_t kErrorBytes = 1 << 20;
// Pairs in a row that did not come together with one engine: it is taken to be why.
constexpr uint32_t kSuspectedMax = 3;

// Answers of a prefill engine that are about the request itself: another engine would say the same.
bool blames_request(int status) {
    return status >= 400 && status < 500 && status != 408 && status != 425 && status != 429;
}

}  // namespace

void Exchange::send_prefill_leg(Engine& engine, std::vector<json::Edit> edits) {
    make_body(prefill_body_, std::move(edits));
    prefill_.body.assign(prefill_body_.pieces().begin(), prefill_body_.pieces().end());
    prefill_.head.clear();
    prefill_.head_only = false;
    write_request_head(prefill_.head, *request_, engine, prefill_body_.bytes(), &plan_);
    tried_.push_back(static_cast<uint16_t>(engine.place));
    prefill_.go(engine);
}

void Exchange::take_prefill(const http::ResponseHead* head, std::string_view body, bool complete) {
    if (head != nullptr) {
        prefill_answer_.status = head->status;
        prefill_answer_.reader = http::BodyReader(head->framing, head->content_length);
        const http::Field* type = http::find_field(head->fields, "content-type");
        prefill_answer_.type = type == nullptr ? "application/json" : std::string(type->value);
    }
    prefill_answer_.reader.take_all(body, prefill_answer_.text);
    bool logprobs = one_shot() && request_->wants_prompt_logprobs();
    // Prefill's answer is kept in memory until it is used, so it has a maximum, which logprobs of a long
    // prompt can reach.
    size_t most = context_.settings.limits.prefill_answer_bytes_max;
    if (one_shot() && !logprobs) most = std::max(most, kErrorBytes);
    if (may_trim_prefill()) {
        prefill_answer_.trimmed = true;
        prefill_answer_.text.erase(0, prefill_answer_.text.size() - kKeptBytes);
    } else if (prefill_answer_.text.size() > most) {
        if (logprobs && prefill_answer_.status == 200) return too_large();
        return prefill_.failed(Reason::kBadAnswer, "sent a prefill answer that is larger than the limit");
    }
    if (complete) prefill_done();
}

// Whether there is more of an answer that the exchange does not wait for than need be kept. A refusal is the
// client's.
bool Exchange::may_trim_prefill() {
    if (!one_shot() || prefill_answer_.text.size() <= 2 * kKeptBytes || request_->wants_prompt_logprobs()) {
        return false;
    }
    if (prefill_answer_.trimmed) return true;
    std::string_view rest = prefill_answer_.text;
    bool stream = rest.starts_with("data:");
    if (stream && rest.size() < kErrorBytes && rest.find("\n\n") == std::string_view::npos) return false;
    return status_of_answer(prefill_answer_.status, rest) < 300;
}

void Exchange::prefill_done() {
    Engine& engine = *prefill_.engine;
    auto ended = [&](Prefill how) { ++engine.counts.prefills[static_cast<size_t>(how)]; };
    int status = one_shot() && !prefill_answer_.trimmed
                     ? status_of_answer(prefill_answer_.status, prefill_answer_.text)
                     : prefill_answer_.status;
    if (status < 200 || status >= 300) {
        ended(status < 500 ? Prefill::kRefused : Prefill::kFailed);
        why_ = "engine " + engine.settings.name + " answered " + std::to_string(status) + " to the prefill";
        bool waited_for = state_ == ExchangeState::kPrefilling || (one_shot() && !answer_.answered());
        if (blames_request(status) && waited_for) return answer_with_refusal();
        return prefill_failed(verdict_on_status(status), !blames_request(status));
    }
    observation_.prefill_done = context_.now;
    engine.counts.prefill.observe(context_.now - observation_.sent_prefill);
    if (one_shot()) {
        Usage usage;
        if (find_any_usage(prefill_answer_.text, usage)) {
            observation_.prefill_cached_tokens = usage.cached;
        }
        reached(Stage::kPrefilled);
        prefill_.leave(Verdict::kGood);
        ended(Prefill::kHandedOver);
        return merge_.active() ? hand_on_merged() : void();
    }
    auto& scanned = context_.scratch_object;
    bool whole = scanned.scan(prefill_answer_.text);
    const json::Member* usage = whole ? scanned.find("usage") : nullptr;
    if (usage != nullptr) observation_.prefill_cached_tokens = usage_of(usage->value).cached;
    reached(Stage::kPrefilled);
    prefill_.leave(Verdict::kGood);
    if (state_ != ExchangeState::kPrefilling)
        return ended(Prefill::kHandedOver);  // concurrent: not waited for
    const HandoverForm& form = handover_form(plan_.form);
    std::optional<Context> context = whole ? form.take(scanned) : std::nullopt;
    if (!context) {
        ended(Prefill::kNoParameters);
        return answer_alone();
    }
    ended(Prefill::kHandedOver);
    not_tried(engine);
    if (context->finished) return answer_finished(engine, *context);
    std::vector<json::Edit> edits{{json::Edit::kSet, form.member, context->params}};
    std::string_view prompt = request_->kind == Kind::kChat ? "prompt_token_ids" : "prompt";
    if (!context->prompt_ids.empty()) edits.push_back({json::Edit::kSet, prompt, context->prompt_ids});
    hand_over(std::move(edits));
    if (prefill_answer_.text.capacity() > kSmallBytes) prefill_answer_.text = std::string();
}

// The first token was the last: prefill's answer is the client's.
void Exchange::answer_finished(Engine& engine, const Context& context) {
    bool stream = request_->facts().stream;
    ++engine.counts.answers[2];
    Page page;
    page.body = stream ? "data: [DONE]\n\n" : context.answer;
    page.content_type = stream ? kEventStream : "application/json";
    page.headers.emplace_back("X-Moonpool-Engine", engine.settings.name);
    observation_.status = 200;
    observe(Outcome::kAnswered);
    client_->answer_page(page);
}

void Exchange::hand_over(std::vector<json::Edit> edits) {
    make_body(answer_body_, std::move(edits));
    observation_.handed_over = static_cast<uint8_t>(plan_.form);
    if (state_ != ExchangeState::kAnswering) state_.move_to(ExchangeState::kAnswering);
    send_answer_leg(engines_.at(plan_.engine), answer_body_.pieces());
}

// What the prefill engine says against the request is the answer.
void Exchange::answer_with_refusal() {
    Engine& engine = *prefill_.engine;
    prefill_.leave(Verdict::kGood);
    answer_.leave(Verdict::kNone);
    Page page;
    page.status = prefill_answer_.status;
    page.content_type = prefill_answer_.type;
    page.body = prefill_answer_.text;
    page.headers.emplace_back("X-Moonpool-Engine", engine.settings.name);
    ++engine.counts.answers[static_cast<size_t>(prefill_answer_.status / 100)];
    observation_.status = static_cast<uint16_t>(prefill_answer_.status);
    observe(Outcome::kAnswered);
    client_->answer_page(page);
}

// Ask again with the rest. When all attempts are used up, or a prefill elsewhere would end no better, the
// engine of the plan computes the prompt.
void Exchange::prefill_failed(Verdict verdict, bool elsewhere) {
    Engine& engine = *prefill_.engine;
    prefill_.leave(verdict);
    if (state_ == ExchangeState::kAnswering) {
        if (answer_.answered()) return;  // concurrent, and the client is being answered already
        if (answer_.engine != nullptr) {
            not_tried(*answer_.engine);
            answer_.leave(Verdict::kNone);  // it waits for what will not come
        }
        observation_.handed_over = 0;
    }
    if (elsewhere && again_allowed()) {
        ++engine.counts.retries;
        return ask();
    }
    answer_alone();
}

// It did well, so another plan may have it again.
void Exchange::not_tried(const Engine& engine) {
    tried_.erase(std::remove(tried_.begin(), tried_.end(), engine.place), tried_.end());
}

// The prefill came to nothing: the engine that answers computes the prompt itself.
void Exchange::answer_alone() {
    if (one_shot() || broken_ >= kBrokenMax) {
        return refuse({502, "engine_failed", why_ + "; try again"}, Outcome::kFailed);
    }
    Engine& engine = engines_.at(plan_.engine);
    bool tried = std::find(tried_.begin(), tried_.end(), engine.place) != tried_.end();
    if (!engine.healthy || tried) return ask();
    plan_.prefill = -1;
    answer_by(engine);
}

// An error of the decode engine's while the prefill engine is at work: what it waited for did not come.
bool Exchange::met_nobody(const http::ResponseHead* head, std::string_view body) const {
    if (prefill_.engine == nullptr || observation_.first_byte != 0 || !again_allowed()) return false;
    int status = head != nullptr ? head->status : status_;
    size_t event = status == 200 ? body.find("data:") : std::string_view::npos;
    if (event != std::string_view::npos) status = status_of_answer(status, body.substr(event));
    return status >= 500;
}

void Exchange::ask_another_pair() {
    Engine& engine = *answer_.engine;
    why_ = "engine " + engine.settings.name + " failed to take over from " + prefill_.engine->settings.name;
    Engine& prefill = *prefill_.engine;
    ++engine.counts.retries;
    ++prefill.counts.prefills[static_cast<size_t>(Prefill::kOvertaken)];
    // Which of the two is why cannot be seen from here, but one that others get on with is not.
    uint32_t of_answer = ++engine.suspected, of_prefill = ++prefill.suspected;
    auto verdict = [](uint32_t own, uint32_t other) {
        return own >= kSuspectedMax && own >= other ? Verdict::kBad : Verdict::kNone;
    };
    answer_.leave(verdict(of_answer, of_prefill));
    prefill_.leave(verdict(of_prefill, of_answer));
    // Another of each, or of the one of which there is another.
    bool others = has_another(engine), prefills = has_another(prefill);
    if (others && !prefills) not_tried(prefill);
    if (prefills && !others) not_tried(engine);
    observation_.handed_over = 0;
    ask();
}

// Whether a request may go to another engine of the same role.
bool Exchange::has_another(const Engine& engine) {
    std::vector<uint16_t> left;
    engines_.candidates(*request_, tried_, left);
    return std::any_of(left.begin(), left.end(),
                       [&](uint16_t place) { return engines_.at(place).role == engine.role; });
}

// It is the request that asks for so much: no engine is to blame, and another would say the same.
void Exchange::too_large() {
    std::string why = "the answer's logprobs take more than " +
                      std::to_string(context_.settings.limits.prefill_answer_bytes_max) +
                      " bytes; ask for fewer of them, or from a later logprob_start_len on";
    prefill_.leave(Verdict::kNone);
    answer_.leave(Verdict::kNone);
    if (observation_.first_byte == 0) return refuse({502, "answer_too_large", why}, Outcome::kFailed);
    observe(Outcome::kBrokenOff);
    client_->write(http::error_event("answer_too_large", why, framing_ == Framing::kChunks), {});
    client_->exchange_finished(true);
}

}  // namespace moonpool::relay
