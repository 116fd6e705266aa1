// What an engine's bytes mean: heads, and with BodyReader whole answers.
#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "http/response_parser.hpp"

using namespace moonpool::http;

namespace {

const std::string kLength = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
const std::string kChunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
const std::string kInterim =
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + kLength;

// An engine's connection, as the relay uses the parser and the reader of the body.
struct Answer {
    explicit Answer(bool head_only = false) { parser.begin(head_only); }

    // False: broken.
    bool feed(std::string_view data) {
        std::string_view rest = data;
        if (!headed) {
            received = std::string(received) + std::string(data);  // elsewhere each time
            Step step = parser.parse(received);
            if (step == Step::kRefused) return false;
            if (step == Step::kMore) return true;
            headed = true;
            body = BodyReader(parser.head().framing, parser.head().content_length);
            rest = std::string_view(received).substr(parser.head().bytes);
        }
        std::string_view mine = body.pass(rest);
        passed += mine;
        return mine.size() == rest.size() && !body.failed();
    }

    ResponseParser parser;
    BodyReader body;
    bool headed = false;
    std::string received, passed;
};

const ResponseHead& head_of(Answer& answer, const std::string& data) {
    REQUIRE(answer.feed(data));
    REQUIRE(answer.headed);
    return answer.parser.head();
}

}  // namespace

TEST_CASE("response: cut anywhere, the body comes out as it came") {
    const std::pair<std::string, std::string> cases[] = {
        {kLength, "hello"}, {kChunked, "5\r\nhello\r\n0\r\n\r\n"}, {kInterim, "hello"}};
    for (const auto& [data, expected] : cases) {
        for (size_t cut = 0; cut <= data.size(); ++cut) {
            Answer answer;
            REQUIRE(answer.feed(data.substr(0, cut)));
            CHECK((answer.headed && answer.body.done()) == (cut == data.size()));
            REQUIRE(answer.feed(data.substr(cut)));
            CHECK(answer.passed == expected);
            CHECK(answer.body.done());
            CHECK(answer.parser.head().status == 200);
            CHECK(answer.parser.head().phrase == "OK");
            CHECK(answer.parser.head().keep_alive);
        }
        Answer answer;
        for (char c : data) REQUIRE(answer.feed(std::string_view(&c, 1)));
        CHECK(answer.passed == expected);
        CHECK(answer.body.done());
    }
}

TEST_CASE("response: broken") {
    const std::string cases[] = {
        kLength + "x",
        kLength + kLength,
        kChunked + "HTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nx",
        "HTTP/1.1 204 No\r\n\r\nx",
        "HTTP/1.1 304 No\r\nContent-Length: 1\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5,5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1 2000 OK\r\n\r\n",
        "HTTP/1.1 600 OK\r\n\r\n",
        "HTTP/1.1  200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        "HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        "HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        "HTTP/1.1 200 OK\r\nA: " + std::string(70000, 'b'),
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    };
    for (const std::string& data : cases) {
        CAPTURE(data);
        Answer whole;
        CHECK_FALSE(whole.feed(data));
        if (!whole.headed) {
            CHECK(whole.parser.refusal().status == 502);
            CHECK(whole.parser.refusal().reason == std::string("bad_answer"));
            CHECK_FALSE(whole.parser.refusal().sentence.empty());
        }
        if (data.size() > 1000) continue;
        Answer pieces;
        bool sound = true;
        for (size_t at = 0; at < data.size() && sound; ++at) sound = pieces.feed(data.substr(at, 1));
        CHECK_FALSE(sound);
    }
}

TEST_CASE("response: interim heads count towards the limit of the head") {
    std::string data;
    while (data.size() < ResponseParser::kHeadBytesMax) data += "HTTP/1.1 100 Continue\r\n\r\n";
    Answer answer;
    CHECK_FALSE(answer.feed(data));
}

TEST_CASE("response: until the engine closes") {
    Answer answer;
    CHECK(head_of(answer, "HTTP/1.0 200\r\n\r\nhel").framing == Framing::kUntilClose);
    CHECK(answer.parser.head().phrase == "");
    CHECK(answer.parser.head().content_length == -1);
    REQUIRE(answer.feed("lo"));
    CHECK(answer.passed == "hello");
    CHECK_FALSE(answer.body.done());
    CHECK(answer.body.finish());
    CHECK(answer.body.done());
    CHECK_FALSE(answer.parser.head().keep_alive);
}

TEST_CASE("response: an engine that closes too early") {
    for (const std::string& data : {kLength, kChunked}) {
        for (size_t cut = 0; cut < data.size(); ++cut) {
            Answer answer;
            REQUIRE(answer.feed(data.substr(0, cut)));
            CHECK_FALSE((answer.headed && answer.body.finish()));
        }
    }
}

TEST_CASE("response: HEAD has a length and no body") {
    for (const char* framing : {"Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n", ""}) {
        Answer answer(true);
        const ResponseHead& head = head_of(answer, std::string("HTTP/1.1 200 OK\r\n") + framing + "\r\n");
        CHECK(head.framing == Framing::kLength);
        CHECK(head.content_length == 0);
        CHECK(head.keep_alive);
        CHECK(answer.body.done());
        CHECK_FALSE(answer.feed("hello"));
    }
}

TEST_CASE("response: whether the connection can be used again") {
    const std::pair<const char*, bool> cases[] = {
        {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", true},
        {"HTTP/1.1 204 No\r\n\r\n", true},
        {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", false},
        {"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", false},
        {"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", false},
    };
    for (auto [data, keeps] : cases) {
        Answer answer;
        CHECK(head_of(answer, data).keep_alive == keeps);
    }
}

TEST_CASE("response: fields that end here") {
    Answer answer;
    const ResponseHead& head = head_of(
        answer,
        "HTTP/1.1 200 OK\r\nConnection: X-A, Content-Length\r\nX-A: 1\r\nX-B: 2\r\nKeep-Alive: 5\r\n"
        "X-Request-Id: e\r\nContent-Length: 0\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\n\r\n");
    std::string forwarded;
    for (const Field& field : head.fields) {
        if (field.forward) forwarded.append(field.name).append(" ");
    }
    CHECK(forwarded == "X-B Content-Length Content-Type ");
    CHECK(head.event_stream);
}

TEST_CASE("response: begin forgets the answer before") {
    ResponseParser parser;
    parser.begin(false);
    REQUIRE(parser.parse("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n") == Step::kDone);
    parser.begin(false);
    REQUIRE(parser.parse("HTTP/1.1 404 No\r\nContent-Length: 3\r\n\r\n") == Step::kDone);
    CHECK_FALSE(parser.head().event_stream);
    CHECK(parser.head().status == 404);
    CHECK(parser.head().fields.size() == 1);
}
