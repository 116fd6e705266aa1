// The heads that are written: what goes on, what ends here, and answers of the proxy itself.
#include <doctest/doctest.h>

#include <string>

#include "http/head_writer.hpp"
#include "json/values.hpp"

using namespace moonpool;
using namespace moonpool::http;

TEST_CASE("writer: what goes to the engine") {
    RequestParser parser;
    REQUIRE(parser.parse("POST http://proxy:1/v1/x?q=1#frag HTTP/1.0\r\nHOST: proxy\r\nConnection: X-Drop\r\n"
                         "X-Drop: 1\r\nKeep-Alive: 5\r\nAuthorization: Bearer k\r\nX-Request-Id: mine\r\n"
                         "Transfer-Encoding: chunked\r\n\r\n") == Step::kDone);
    std::string out;
    write_request_head(out, parser.head(), "engine:80", "mine", 2);
    CHECK(out ==
          "POST /v1/x?q=1 HTTP/1.1\r\nHost: engine:80\r\nAuthorization: Bearer k\r\nX-Request-Id: mine\r\n"
          "Content-Length: 2\r\n\r\n");
    out.clear();
    const OwnField extra[] = {{"X-A", "b"}};
    write_request_head(out, parser.head(), "e", "i", std::nullopt, extra);
    CHECK(
        out ==
        "POST /v1/x?q=1 HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer k\r\nX-Request-Id: i\r\nX-A: b\r\n\r\n");
    // What was written is read as the same request, with nothing that it did not have.
    RequestParser again;
    REQUIRE(again.parse(out) == Step::kDone);
    CHECK(again.head().target == "/v1/x?q=1");
    CHECK(again.head().fields.size() == 4);
}

TEST_CASE("writer: what goes to the client") {
    ResponseParser parser;
    parser.begin(false);
    REQUIRE(parser.parse("HTTP/1.0 206 Some Of It\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\n"
                         "Connection: close\r\nX-Request-Id: theirs\r\n\r\n") == Step::kDone);
    const OwnField extra[] = {{"X-Moonpool-Engine", "e0"}, {"X-Request-Id", "ours"}};
    std::string out;
    write_response_head(out, parser.head(), extra, true, true);
    CHECK(out ==
          "HTTP/1.1 206 Some Of It\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\n"
          "X-Moonpool-Engine: e0\r\nX-Request-Id: ours\r\nConnection: close\r\n\r\n");
    out.clear();
    write_response_head(out, parser.head(), {}, false, false);
    CHECK(out == "HTTP/1.1 206 Some Of It\r\nContent-Type: a/b\r\n\r\n");
}

TEST_CASE("writer: the proxy's own answers") {
    std::string out;
    write_own_answer(out, {.status = 404, .body = "{}", .request_id = "r", .close = true});
    CHECK(
        out ==
        "HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 2\r\nX-Request-Id: r\r\n"
        "Connection: close\r\n\r\n{}");
    out.clear();
    const OwnField extra[] = {{"Retry-After", "1"}};
    write_own_answer(
        out, {.status = 299, .body = "abc", .content_type = "text/plain", .extra = extra, .head_only = true});
    CHECK(out == "HTTP/1.1 299 \r\nContent-Type: text/plain\r\nContent-Length: 3\r\nRetry-After: 1\r\n\r\n");
}

TEST_CASE("writer: errors in the shape of the OpenAI API") {
    CHECK(
        error_body(400, "malformed", "a \"b\"\n") ==
        R"({"error":{"message":"a \"b\"\u000a","type":"invalid_request_error","param":null,"code":"malformed"}})");
    CHECK(error_body(503, "no_engine", "x").find(R"("type":"server_error")") != std::string::npos);
    std::string plain = error_event("lost", "gone", false);
    CHECK(plain == "data: " + error_body(502, "lost", "gone") + "\n\n");
    std::string chunked = error_event("lost", "gone", true);
    BodyReader reader(Framing::kChunked, -1);
    std::string_view rest = chunked;
    std::string content;
    while (!reader.done()) {
        BodyReader::Piece piece = reader.take(rest);
        REQUIRE(piece.taken > 0);
        content += piece.content;
        rest.remove_prefix(piece.taken);
    }
    CHECK(content == plain);
    CHECK(rest.empty());
}

TEST_CASE("fields: names, values, words") {
    CHECK(is_field_name("X-A_b.c~"));
    for (const char* bad : {"", "a b", "a:", "a\r", "\xe9"}) CHECK_FALSE(is_field_name(bad));
    CHECK(is_field_value(""));
    CHECK(is_field_value("caf\xe9 \t\"x\""));
    CHECK_FALSE(is_field_value("a\r\nX-B: c"));
    CHECK_FALSE(is_field_value(std::string_view("a\0", 2)));
    std::string words;
    each_token(" a,, b\t, c d ,", [&](std::string_view word) { words.append("[").append(word).append("]"); });
    CHECK(words == "[a][b][c d]");
    CHECK(kind_of("CONTENT-length") == FieldKind::kContentLength);
    CHECK(kind_of("content-lengt") == FieldKind::kOther);
    CHECK(kind_of("Proxy-Authorization") == FieldKind::kHopByHop);
    CHECK(kind_of("proxy-authorization-x") == FieldKind::kOther);
    const Field fields[] = {{"A", "1"}, {"b", "2"}, {"a", "3"}};
    REQUIRE(find_field(fields, "a") != nullptr);
    CHECK(find_field(fields, "a")->value == "1");
    CHECK(find_field(fields, "c") == nullptr);
}
