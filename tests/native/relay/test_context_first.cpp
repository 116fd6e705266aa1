// TensorRT-LLM's form: what a context server's answer hands over.
#include <doctest/doctest.h>

#include <string>

#include "relay/context_first.hpp"

using namespace moonpool;

namespace {

std::optional<relay::Context> context(std::string_view answer) {
    json::Object object;
    REQUIRE(object.scan(answer));
    return relay::context_of(object);
}

}  // namespace

TEST_CASE("the parameters of a context server's answer are for the generation server") {
    auto got = context(R"({"choices":[{"a":1,"disaggregated_params":{"request_type":"context_only","b":[2]},)"
                       R"("finish_reason":"length"}],"prompt_token_ids":[1, 2]})");
    REQUIRE(got);
    CHECK(got->params == R"({"b":[2],"request_type":"generation_only"})");
    CHECK(got->prompt_ids == "[1, 2]");
    CHECK_FALSE(got->finished);
    for (const char* reason : {"null", "\"not_finished\"", "7"}) {
        std::string choice = std::string(R"({"disaggregated_params":{},"finish_reason":)") + reason + "}";
        auto open = context("{\"choices\":[" + choice + "]}");
        REQUIRE(open);
        CHECK_FALSE(open->finished);
        CHECK(open->prompt_ids == "");
    }
}

TEST_CASE("an answer that is complete loses what is the servers' own") {
    auto got =
        context(R"({"id":"x","choices":[{"disaggregated_params":{},"finish_reason":"stop","text":"a"}],)"
                R"("prompt_token_ids":[1],"usage":{}})");
    REQUIRE(got);
    CHECK(got->finished);
    CHECK(got->answer == R"({"id":"x","usage":{},"choices":[{"finish_reason":"stop","text":"a"}]})");
}

TEST_CASE("other answers hand nothing over") {
    for (const char* odd : {"{}", R"({"choices":1})", R"({"choices":[]})", R"({"choices":[1]})",
                            R"({"choices":[{"disaggregated_params":3}]})",
                            R"({"choices":[{"disaggregated_params":{}},{"disaggregated_params":{}}]})"}) {
        CHECK_FALSE(context(odd));
    }
}
