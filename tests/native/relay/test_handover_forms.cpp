#include <doctest/doctest.h>

#include <string>

#include "relay/handover_forms.hpp"

namespace moonpool::relay {
namespace {

std::string edited(const std::string& text, const std::vector<json::Edit>& edits) {
    json::Object object;
    REQUIRE(object.scan(text));
    json::Splice splice;
    splice.make(object, edits);
    return splice.joined();
}

TEST_CASE("hand-over forms: each has its row, and what one waits for is what another takes") {
    for (Form form :
         {Form::kTwoStep, Form::kConcurrent, Form::kOneShot, Form::kContextFirst, Form::kGenerationFirst}) {
        const HandoverForm& row = handover_form(form);
        CHECK(row.form == form);
        CHECK((row.prefill_edits != nullptr));
        CHECK((row.at_once() == (row.take == nullptr)));
        CHECK(row.at_once() == row.member.empty());
    }
    CHECK(handover_form(Form::kOneShot).in_a_room);
}

TEST_CASE("hand-over forms: the request for a prefill engine") {
    std::string text =
        R"({"model":"m","stream":true,"stream_options":{"include_usage":true},"prompt":[1,2],"max_tokens":99,)"
        R"("min_tokens":3,"max_completion_tokens":4,"kv_transfer_params":{"a":1},"temperature":0})";
    CHECK(edited(text, prefill_edits(R"({"do_remote_decode":true})")) ==
          R"({"model":"m","prompt":[1,2],"temperature":0,"kv_transfer_params":{"do_remote_decode":true},)"
          R"("stream":false,"max_tokens":1,"max_completion_tokens":1})");
    CHECK(edited("{}", prefill_edits("{}")) == R"({"kv_transfer_params":{},"stream":false,"max_tokens":1})");
}

TEST_CASE("hand-over forms: what each engine gets of a plan") {
    Plan plan;
    plan.prefill_params = R"({"p":1})";
    plan.engine_params = R"({"e":2})";
    plan.members = {{"bootstrap_room", "7"}};
    auto prefill = [&](Form form) { return edited("{}", handover_form(form).prefill_edits(plan)); };
    auto answer = [&](Form form) { return edited("{}", handover_form(form).answer_edits(plan)); };
    std::string one_token = R"(,"stream":false,"max_tokens":1})";
    CHECK(prefill(Form::kTwoStep).find(R"("do_remote_decode":true)") != std::string::npos);
    CHECK(prefill(Form::kConcurrent) == R"({"kv_transfer_params":{"p":1})" + one_token);
    CHECK(answer(Form::kConcurrent) == R"({"bootstrap_room":7,"kv_transfer_params":{"e":2}})");
    CHECK(prefill(Form::kOneShot) == R"({"bootstrap_room":7})");
    CHECK(answer(Form::kOneShot) == prefill(Form::kOneShot));
    CHECK(prefill(Form::kContextFirst) == R"({"disaggregated_params":{"p":1},"stream":false})");
    CHECK(prefill(Form::kGenerationFirst) == prefill(Form::kContextFirst));
    CHECK(answer(Form::kGenerationFirst) == R"({"bootstrap_room":7})");
}

TEST_CASE("hand-over forms: what prefill's answer hands over") {
    json::Object answer;
    auto take = [&](const char* text) {
        REQUIRE(answer.scan(text));
        return handover_form(Form::kTwoStep).take(answer);
    };
    CHECK(take(R"({"kv_transfer_params":{"remote_host":"h"}})")->params == R"({"remote_host":"h"})");
    CHECK_FALSE(take(R"({"kv_transfer_params":null})"));
    CHECK_FALSE(take("{}"));
    CHECK_FALSE(take(R"({"kv_transfer_params":{}})")->finished);
}

TEST_CASE("hand-over forms: switches stand beside what a hand-over says, in every body") {
    Request request;
    std::string params;
    auto with = [&](std::vector<json::Edit> edits, const char* body = "{}") {
        add_switches(edits, request, params);
        return edited(body, edits);
    };
    const std::vector<json::Edit> own = {{json::Edit::kSet, "a", "1"}};
    CHECK(with(own) == R"({"a":1})");
    request.switches = {{"load", "false"}, {"store", "false"}};
    const std::string both = R"("moonpool":{"load":false,"store":false}})";
    CHECK(with({}) == R"({"kv_transfer_params":{)" + both + "}");
    CHECK(with(own, R"({"kv_transfer_params":7})") == R"({"a":1,"kv_transfer_params":{)" + both + "}");
    auto params_of = [&](const char* given) {
        return with({{json::Edit::kSet, "kv_transfer_params", given}});
    };
    CHECK(params_of(R"({"x":1})") == R"({"kv_transfer_params":{"x":1,)" + both + "}");
    CHECK(params_of(R"({"moonpool":{"handover":{"lease":7},"store":true},"x":1})") ==
          R"({"kv_transfer_params":{"x":1,"moonpool":{"handover":{"lease":7},"load":false,"store":false}}})");
    for (const char* odd : {"7", R"({"moonpool":7})", R"({"moonpool":null})"}) {
        CHECK(params_of(odd) == R"({"kv_transfer_params":{)" + both + "}");
    }
}

}  // namespace
}  // namespace moonpool::relay
