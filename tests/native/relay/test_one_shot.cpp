// What SGLang's engines answer in the one-shot form, and what of a request it turns on.
#include <doctest/doctest.h>

#include <memory>
#include <string>

#include "relay/one_shot.hpp"
#include "relay/request.hpp"
#include "relay/usage.hpp"

using namespace moonpool::relay;

namespace {

std::unique_ptr<Request> asking(Kind kind, const char* body) {
    auto request = std::make_unique<Request>();
    request->kind = kind;
    request->body = body;
    request->examine({.members_max = 1024, .prompts_max = 4096, .prompt_ids_max = 1 << 20}, false);
    return request;
}

}  // namespace

TEST_CASE("events are taken off a stream one by one") {
    std::string_view stream = "data: a\n\ndata:b\n\nx\n\ndata: half";
    CHECK(next_event(stream) == "a");
    CHECK(next_event(stream) == "b");
    CHECK(next_event(stream) == "x");
    CHECK(next_event(stream) == "");
    CHECK(stream == "data: half");
}

TEST_CASE("a stream may say in its first event that it failed") {
    CHECK(status_of_answer(200, R"({"error":{"code":503}})") == 200);
    CHECK(status_of_answer(200, "data: {\"error\":{\"code\":503}}\n\n") == 503);
    CHECK(status_of_answer(200, "data: {\"error\":{\"code\":\"x\"}}\n\n") == 500);
    CHECK(status_of_answer(200, "data: {\"error\":{\"code\":200}}\n\n") == 500);
    CHECK(status_of_answer(200, "data: {\"error\":{\"code\":503}}\n") == 200);
    CHECK(status_of_answer(200, "data: {\"error\":null}\n\n") == 200);
    CHECK(status_of_answer(200, "data: [DONE]\n\n") == 200);
    CHECK(status_of_answer(404, "no") == 404);
}

TEST_CASE("prefill's logprobs go in front of decode's") {
    auto merged = [](const char* decode, const char* prefill) {
        return PromptLogprobs(prefill).put_into(decode);
    };
    const char* ours = R"({"meta_info":{"input_token_logprobs":[[1,2]],"input_top_logprobs":null}})";
    const char* theirs = R"({"meta_info":{"input_token_logprobs":[ ],"a":1,"input_top_logprobs":[]},"b":2})";
    const char* whole =
        R"({"b":2,"meta_info":{"a":1,"input_top_logprobs":[],"input_token_logprobs":[[1,2]]}})";
    CHECK(merged(theirs, ours) == whole);
    CHECK(merged("[1]", ours) == "[1]");
    CHECK(merged("[{}]", "[{},{}]") == "[{}]");
    CHECK(merged("[DONE]", "data: {}\n\n") == "[DONE]");
    for (const char* odd : {"", "no", "{}", R"({"meta_info":1})", "data: half", "data: {}\n\n", "[]"}) {
        CHECK(merged(theirs, odd) == theirs);
        CHECK(merged(odd, ours) == odd);
    }
}

TEST_CASE("each prompt of a streamed batch has its own logprobs") {
    auto event = [](const char* index, const char* ids) {
        return std::string(R"({"meta_info":{"input_token_logprobs":)") + ids + "}" + index + "}";
    };
    std::string one = event(R"(,"index":1)", "[7]"), zero = event(R"(,"index":0)", "[8]");
    std::string stream = "data: " + one + "\n\ndata: " + zero + "\n\ndata: " + event(R"(,"index":1)", "[9]") +
                         "\n\ndata: [DONE]\n\n";
    PromptLogprobs logprobs(stream);
    for (int round = 0; round < 2; ++round) {
        CHECK(logprobs.put_into(event(R"(,"index":1)", "[1]")).find("[7,1]") != std::string::npos);
        CHECK(logprobs.put_into(event(R"(,"index":0)", "[]")).find("[8]") != std::string::npos);
        CHECK(logprobs.put_into(event(R"(,"index":2)", "[1]")) == event(R"(,"index":2)", "[1]"));
        CHECK(logprobs.put_into("[DONE]") == "[DONE]");
    }
    CHECK(PromptLogprobs("data: half").put_into(one) == one);
}

TEST_CASE("a native request names its prompt in one of two ways") {
    auto count = [](Kind kind, const char* body) { return asking(kind, body)->prompt_count(); };
    CHECK(count(Kind::kGenerate, R"({"text":["a","b"]})") == 2);
    CHECK(count(Kind::kGenerate, R"({"text":null,"input_ids":[[1],[2],[3]]})") == 3);
    CHECK(count(Kind::kCompletions, R"({"prompt":[ "a" ]})") == 1);
    CHECK_FALSE(count(Kind::kCompletions, R"({"text":["a"]})"));
    CHECK_FALSE(count(Kind::kGenerate, R"({"input_ids":[1,2]})"));
    CHECK_FALSE(count(Kind::kGenerate, R"({"text":[]})"));
    CHECK_FALSE(count(Kind::kChat, R"({"prompt":["a"]})"));
    CHECK(count(Kind::kGenerate, R"({"text":null,"input_embeds":[ [[1.5],[2]], [[3]]]})") == 2);
    CHECK_FALSE(count(Kind::kGenerate, R"({"input_embeds":[[1.5],[2]]})"));
    CHECK_FALSE(count(Kind::kGenerate, R"({"input_embeds":[]})"));
    CHECK_FALSE(count(Kind::kGenerate, R"({"text":"a","input_embeds":[[[1]],[[2]]]})"));
    CHECK_FALSE(count(Kind::kGenerate, "no JSON"));

    auto ids = asking(Kind::kGenerate, R"({"input_ids":[1,2],"sampling_params":{"max_new_tokens":9}})");
    CHECK(ids->prompt_tokens() == std::vector<uint32_t>{1, 2});
    CHECK(ids->facts().max_tokens == 9);
    CHECK_FALSE(ids->has_text());
    auto text = asking(Kind::kGenerate, R"({"text":"a","return_logprob":true})");
    CHECK(text->prompt_text() == "a");
    CHECK(text->has_text());
    CHECK(text->wants_prompt_logprobs());
    CHECK_FALSE(asking(Kind::kGenerate, R"({"text":"a","return_logprob":false})")->wants_prompt_logprobs());
    CHECK_FALSE(asking(Kind::kCompletions, R"({"return_logprob":true})")->wants_prompt_logprobs());
}

TEST_CASE("a request for several answers is known") {
    auto one = [](Kind kind, const char* body) { return asking(kind, body)->wants_one(); };
    CHECK(one(Kind::kChat, R"({"messages":[]})"));
    CHECK(one(Kind::kChat, R"({"messages":[],"n":1,"best_of":null})"));
    CHECK_FALSE(one(Kind::kChat, R"({"messages":[],"n":2})"));
    CHECK(one(Kind::kCompletions, R"({"prompt":[1,2]})"));
    CHECK(one(Kind::kCompletions, R"({"prompt":["a"]})"));
    CHECK_FALSE(one(Kind::kCompletions, R"({"prompt":[[1],[2]]})"));
    CHECK_FALSE(one(Kind::kCompletions, R"({"prompt":"a","best_of":3})"));
    CHECK_FALSE(one(Kind::kCompletions, "no JSON"));
    CHECK(one(Kind::kGenerate, R"({"text":"a","sampling_params":{"temperature":0}})"));
    CHECK_FALSE(one(Kind::kGenerate, R"({"text":"a","sampling_params":{"n":2}})"));
    CHECK_FALSE(one(Kind::kGenerate, R"({"input_ids":[[1],[2]]})"));
}

TEST_CASE("what would take too long to look at is refused, with a reason") {
    const BodyLimits limits{4, 3, 5};
    auto reason = [&](Kind kind, const char* body) -> std::string {
        Request request;
        request.kind = kind;
        request.body = body;
        auto refusal = request.examine(limits, false);
        return refusal ? refusal->reason : "";
    };
    CHECK(reason(Kind::kChat, R"({"a":1,"b":1,"c":1,"d":1})") == "");
    CHECK(reason(Kind::kChat, R"({"a":1,"b":1,"c":1,"d":1,"e":1})") == "too_many_members");
    CHECK(reason(Kind::kChat, R"({"a":1,"b":1,"c":1,"d":1,"e")") == "no_object");
    CHECK(reason(Kind::kChat, "[]") == "no_object");
    CHECK(reason(Kind::kChat, "") == "");
    CHECK(reason(Kind::kCompletions, R"({"prompt":["a","b","c"]})") == "");
    CHECK(reason(Kind::kCompletions, R"({"prompt":["a","b","c","d"]})") == "too_many_prompts");
    CHECK(reason(Kind::kGenerate, R"({"input_embeds":[[[1]],[[1]],[[1]],[[1]]]})") == "too_many_prompts");
    CHECK(reason(Kind::kCompletions, R"({"prompt":["a,,,,,,","b"]})") == "");
    CHECK(reason(Kind::kCompletions, R"({"prompt":[1,2,3,4,5]})") == "");
    CHECK(reason(Kind::kCompletions, R"({"prompt":[1,2,3,4,5,6]})") == "too_many_ids");
    CHECK(reason(Kind::kCompletions, R"({"prompt":[[1,2],[3,4],[5,6]]})") == "too_many_ids");
    CHECK(reason(Kind::kEmbeddings, R"({"input":[1,2,3,4,5,6,7,8]})") == "");
}

TEST_CASE("a native answer tells its tokens") {
    Usage usage;
    CHECK(find_native_usage(
        R"({"text":"\"prompt_tokens\": 1","meta_info":{"prompt_tokens":7,"completion_tokens":2,"cached_tokens":5}})",
        usage));
    CHECK(usage.prompt == 7);
    CHECK(usage.cached == 5);
    CHECK(usage.completion == 2);
    CHECK_FALSE(find_native_usage("{}", usage));
}
