// Where a body ends, by any framing, however it is cut.
#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "../random.hpp"
#include "http/body_reader.hpp"

using namespace moonpool::http;

namespace {

const std::string kGood = "5\r\nhello\r\n1;name=value\r\n,\r\n00A\r\n 123456789\r\n0\r\nTrailer: x\r\n\r\n";

// All content in data, until the body ends or breaks; data keeps what was not taken.
std::string content(BodyReader& reader, std::string_view& data) {
    std::string out;
    while (!data.empty()) {
        BodyReader::Piece piece = reader.take(data);
        if (piece.taken == 0) break;
        out += piece.content;
        data.remove_prefix(piece.taken);
    }
    return out;
}

}  // namespace

TEST_CASE("body: the chunks come off, cut in two anywhere") {
    for (size_t cut = 0; cut <= kGood.size(); ++cut) {
        BodyReader reader(Framing::kChunked, -1);
        std::string_view first = std::string_view(kGood).substr(0, cut);
        std::string got = content(reader, first);
        CHECK(first.empty());
        CHECK(reader.done() == (cut == kGood.size()));
        std::string rest = kGood.substr(cut) + "next";
        std::string_view second = rest;
        got += content(reader, second);
        CHECK(got == "hello, 123456789");
        CHECK(second == "next");
        CHECK(reader.done());
    }
}

TEST_CASE("body: chunks byte by byte, and passed as they came") {
    BodyReader taken(Framing::kChunked, -1), passed(Framing::kChunked, -1);
    std::string got, raw;
    for (size_t at = 0; at < kGood.size(); ++at) {
        CHECK_FALSE(taken.done());
        std::string one = kGood.substr(at, 1);
        std::string_view view = one;
        got += content(taken, view);
        raw += passed.pass(one);
    }
    CHECK(taken.done());
    CHECK(passed.done());
    CHECK(got == "hello, 123456789");
    CHECK(raw == kGood);
    CHECK(passed.pass("x").empty());
    BodyReader whole(Framing::kChunked, -1);
    CHECK(whole.pass(kGood + "next") == kGood);
}

TEST_CASE("body: malformed chunks, at once and byte by byte") {
    std::string trailers = "0\r\n";
    for (int i = 0; i < 3000; ++i) trailers += "a: b\r\n";
    const std::string cases[] = {
        "\r\n",
        "x\r\n",
        "-1\r\n",
        "+1\r\na",
        "0x1\r\na",
        " 1\r\na",
        "1 \r\na",
        "1\ta\r\na",
        "1\na\r\n",
        "1\r\r\n",
        "1\r\nab\r\n",
        "1\r\na\n0\r\n",
        "1\r\na\rb",
        "1\r\na0\r\n",
        "1234567890abcdef\r\n",
        "1\r\na\r\n\r\n",
        ";a\r\n",
        "1;a\nb\r\n",
        "1;a\rb\r\n",
        std::string("1;\0\r\n", 5),
        "0\r\nA: b\nC: d\r\n\r\n",
        "0\r\nA\rB\r\n",
        "0\r\n\n",
        "0\n\r\n",
        "0\r\nA\r\n",
        "0\r\n: b\r\n",
        "0\r\nA b: c\r\n",
        "0\r\n A: b\r\n",
        "1;" + std::string(2000, 'x'),
        trailers,
    };
    for (const std::string& bad : cases) {
        CAPTURE(bad);
        BodyReader whole(Framing::kChunked, -1);
        CHECK(whole.pass(bad).size() < bad.size());
        CHECK(whole.failed());
        CHECK_FALSE(whole.done());
        CHECK(whole.why() != nullptr);
        CHECK_FALSE(whole.finish());
        BodyReader pieces(Framing::kChunked, -1);
        size_t passed = 0;
        for (size_t at = 0; at < bad.size() && !pieces.failed(); ++at)
            passed += pieces.pass(bad.substr(at, 1)).size();
        CHECK(pieces.failed());
        CHECK(pieces.why() == std::string(whole.why()));
        CHECK(passed == BodyReader(Framing::kChunked, -1).pass(bad).size());
    }
}

TEST_CASE("body: a size of fifteen digits is counted down, not overflowed") {
    BodyReader reader(Framing::kChunked, -1);
    std::string data = "fffffffffffffff\r\n" + std::string(100, 'x');
    CHECK(reader.pass(data) == data);
    CHECK_FALSE(reader.done());
}

TEST_CASE("body: by its length") {
    BodyReader none(Framing::kLength, 0), absent(Framing::kLength, -1), five(Framing::kLength, 5);
    CHECK(none.done());
    CHECK(absent.done());
    CHECK(none.pass("x").empty());
    CHECK(five.pass("hel") == "hel");
    CHECK_FALSE(five.done());
    CHECK(five.pass("lo, there") == "lo");
    CHECK(five.done());
    CHECK(five.pass("x").empty());
}

TEST_CASE("body: an error event may follow only a whole chunk that ends a whole event") {
    const std::pair<const char*, bool> chunked[] = {
        {"", true},
        {"9\r\ndata: a\n\n\r\n", true},
        {"a\r\ndata: a\n\r\n\r\n", true},
        {"8\r\ndata: a\n\r\n1\r\n\n\r\n", true},  // an event may end in a chunk of its own
        {"9\r\ndata: a\n\n", false},
        {"9\r\ndata: a\n\n\r", false},
        {"8\r\ndata: a\n\r\n", false},
        {"9\r\nda", false},
        {"9\r\ndata: a\n\n\r\n9", false},
        {"9\r\ndata: a\n\n\r\n0\r\n", false},
        {"9\r\ndata: a\n\n\r\n0\r\n\r\n", false},
    };
    for (auto [data, between] : chunked) {
        CAPTURE(data);
        BodyReader whole(Framing::kChunked, -1), pieces(Framing::kChunked, -1);
        whole.pass(data);
        for (const char* at = data; *at != '\0'; ++at) pieces.pass({at, 1});
        CHECK(whole.between_events() == between);
        CHECK(pieces.between_events() == between);
    }
    BodyReader open(Framing::kUntilClose, -1), promised(Framing::kLength, 100);
    CHECK(open.between_events());
    CHECK_FALSE(promised.between_events());
    open.pass("data: a\n\n");
    promised.pass("data: a\n\n");
    CHECK(open.between_events());
    CHECK_FALSE(promised.between_events());
    open.pass("d");
    CHECK_FALSE(open.between_events());
}

TEST_CASE("body: random chunks in random pieces") {
    moonpool::testing::Random random(32);
    for (int round = 0; round < 300; ++round) {
        std::string body, coded;
        for (uint64_t n = random.below(6); n > 0; --n) {
            std::string piece(random.between(1, 300), static_cast<char>('a' + random.below(26)));
            char line[32];
            std::snprintf(line, sizeof line, random.one_in(2) ? "%zx\r\n" : "%04zX;x\r\n", piece.size());
            body += piece;
            coded += line + piece + "\r\n";
        }
        coded += random.one_in(2) ? "0\r\n\r\n" : "000\r\nA: b\r\nC: d\r\n\r\n";
        BodyReader reader(Framing::kChunked, -1);
        std::string got;
        for (size_t at = 0; at < coded.size();) {
            std::string piece = coded.substr(at, random.between(1, 50));
            at += piece.size();
            std::string_view view = piece;
            got += content(reader, view);
            REQUIRE(view.empty());
        }
        CHECK(got == body);
        CHECK(reader.done());
    }
}
