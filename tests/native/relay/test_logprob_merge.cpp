// The filter that puts the prompt's logprobs into the answer of a decode engine.
#include <doctest/doctest.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "relay/logprob_merge.hpp"

using namespace moonpool;
using namespace moonpool::relay;

namespace {

constexpr const char* kPrefill = R"({"meta_info":{"input_token_logprobs":[1,2]}})";
constexpr const char* kDecode = R"({"text":"x","meta_info":{"input_token_logprobs":[3]}})";
constexpr const char* kMerged = R"({"text":"x","meta_info":{"input_token_logprobs":[1,2,3]}})";

http::ResponseHead head_of(std::string_view type, http::Framing framing, int64_t length = 0) {
    http::ResponseHead head;
    head.status = 200;
    head.framing = framing;
    head.content_length = length;
    head.fields.push_back({});
    head.fields.back().name = "content-type";
    head.fields.back().value = type;
    return head;
}

std::string chunk(const std::string& text) {
    char size[24];
    std::snprintf(size, sizeof(size), "%zx\r\n", text.size());
    return size + text + "\r\n";
}

std::string event(const std::string& data) { return "data: " + data + "\n\n"; }

}  // namespace

TEST_CASE("logprob merge: a whole answer, however its bytes come") {
    const std::string body = kDecode;
    LogprobMerge merge;
    CHECK_FALSE(merge.active());
    http::ResponseHead head =
        head_of("application/json", http::Framing::kLength, static_cast<int64_t>(body.size()));
    REQUIRE(LogprobMerge::can_take(head));
    merge.begin(head);
    CHECK(merge.active());
    CHECK_FALSE(merge.is_stream());
    for (char octet : body) merge.take({&octet, 1}, false);
    CHECK_FALSE(merge.complete());
    merge.take({}, true);
    CHECK(merge.complete());
    CHECK(merge.held_bytes() == body.size());
    CHECK_FALSE(merge.has_prompt());
    merge.take_prompt(kPrefill);
    CHECK(merge.has_prompt());
    CHECK(merge.merged() == kMerged);
    merge.clear();
    CHECK_FALSE((merge.active() || merge.complete() || merge.has_prompt() || merge.held_bytes() > 0));
}

TEST_CASE("logprob merge: a stream event by event, no more at once than asked for") {
    const std::string stream = event(kDecode) + event(kDecode) + "data: [DO";
    for (bool chunked : {true, false}) {
        LogprobMerge merge;
        merge.begin(head_of("text/event-stream; charset=utf-8", http::Framing::kChunked));
        REQUIRE(merge.is_stream());
        merge.take(chunk(stream.substr(0, 30)) + chunk(stream.substr(30)), false);
        merge.take_prompt(event(kPrefill));
        auto framed = [&](const std::string& text) { return chunked ? chunk(text) : text; };
        uint64_t body_bytes = 0;
        std::string out;
        CHECK(merge.put_events(out, 1, chunked, body_bytes));
        CHECK(out == framed(event(kMerged)));
        CHECK_FALSE(merge.put_events(out, 1 << 20, chunked, body_bytes));
        CHECK(out == framed(event(kMerged)) + framed(event(kMerged)));
        merge.take(chunk("NE]\n") + "0\r\n\r\n", true);  // no event: only one line ends
        CHECK_FALSE(merge.put_events(out, 1 << 20, chunked, body_bytes));
        out.clear();
        merge.put_rest(out, chunked, body_bytes);
        CHECK(out == framed("data: [DONE]\n") + (chunked ? "0\r\n\r\n" : ""));
        CHECK(body_bytes == 2 * event(kMerged).size() + 13);
        CHECK(merge.held_bytes() == 0);
    }
}

TEST_CASE("logprob merge: a stream of promised length goes on as it is") {
    CHECK_FALSE(LogprobMerge::can_take(head_of("text/event-stream", http::Framing::kLength, 10)));
    CHECK(LogprobMerge::can_take(head_of("text/event-stream", http::Framing::kUntilClose)));
}
