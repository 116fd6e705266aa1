// What a client's bytes mean. Every input is also fed byte by byte, from a new place each time, so that a
// byte read beyond the end is found by AddressSanitizer, and a view into an old place too.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "../random.hpp"
#include "http/request_parser.hpp"

using namespace moonpool::http;

namespace {

constexpr RequestLimits kLimits = {4096, 4096};
const std::string kHost = "Host: x\r\n";

// Bytes at an address of their own, with nothing behind them.
struct Bytes {
    explicit Bytes(std::string_view from) : size(from.size()), data(new char[from.size()]) {
        std::copy(from.begin(), from.end(), data.get());
    }
    std::string_view view() const { return {data.get(), size}; }
    size_t size;
    std::unique_ptr<char[]> data;
};

struct Outcome {
    Step step = Step::kMore;
    std::string method, target, path, host, request_id, fields;
    bool http_1_0 = false, keep_alive = false, expects_continue = false;
    Framing framing = Framing::kLength;
    int64_t content_length = -1;
    size_t bytes = 0;
    int status = 0;
    std::string reason, sentence;

    friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome outcome_of(const RequestParser& parser, Step step) {
    Outcome out;
    out.step = step;
    if (step == Step::kRefused) {
        out.status = parser.refusal().status;
        out.reason = parser.refusal().reason;
        out.sentence = parser.refusal().sentence;
    }
    if (step != Step::kDone) return out;
    const RequestHead& head = parser.head();
    out.method = head.method;
    out.target = head.target;
    out.path = head.path;
    out.host = head.host;
    out.request_id = head.request_id;
    for (const Field& field : head.fields) {
        if (field.forward) out.fields.append(field.name).append("=").append(field.value).append(";");
    }
    out.http_1_0 = head.http_1_0;
    out.keep_alive = head.keep_alive;
    out.expects_continue = head.expects_continue;
    out.framing = head.framing;
    out.content_length = head.content_length;
    out.bytes = head.bytes;
    return out;
}

Outcome at_once(std::string_view data) {
    Bytes bytes(data);
    RequestParser parser(kLimits);
    return outcome_of(parser, parser.parse(bytes.view()));
}

Outcome byte_by_byte(std::string_view data) {
    RequestParser parser(kLimits);
    for (size_t size = 0; size <= data.size(); ++size) {
        Bytes bytes(data.substr(0, size));
        Step step = parser.parse(bytes.view());
        if (step != Step::kMore) return outcome_of(parser, step);
    }
    return Outcome();
}

Outcome outcome(std::string_view data) {
    Outcome whole = at_once(data);
    CHECK(byte_by_byte(data) == whole);
    return whole;
}

}  // namespace

TEST_CASE("request: a head becomes values") {
    std::string data = "\r\n\r\nPOST /v1/completions?a=b HTTP/1.1\r\n" + kHost +
                       "Content-Length: 5\r\nX-A: \t 1 2\t \r\nX-Empty:\r\nX-Request-Id: mine\r\n\r\n";
    Outcome got = outcome(data);
    REQUIRE(got.step == Step::kDone);
    CHECK(got.method == "POST");
    CHECK(got.target == "/v1/completions?a=b");
    CHECK(got.path == "/v1/completions");
    CHECK(got.host == "x");
    CHECK(got.request_id == "mine");
    CHECK(got.fields == "X-A=1 2;X-Empty=;");
    CHECK(got.framing == Framing::kLength);
    CHECK(got.content_length == 5);
    CHECK(got.keep_alive);
    CHECK_FALSE(got.http_1_0);
    CHECK_FALSE(got.expects_continue);
    CHECK(got.bytes == data.size());
}

TEST_CASE("request: what ends here") {
    Outcome got = outcome(
        "POST http://proxy:1/v1/x?q=1#frag HTTP/1.1\r\nHOST: proxy\r\nConnection: keep-alive, X-Drop\r\n"
        "x-drop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nTrailer: y\r\n"
        "Proxy-Connection: a\r\nProxy-Authorization: b\r\nProxy-Authenticate: c\r\nExpect: 100-Continue\r\n"
        "Authorization: Bearer k\r\nX-Request-Id: mine\r\nTransfer-Encoding: Chunked\r\n\r\n");
    REQUIRE(got.step == Step::kDone);
    CHECK(got.fields == "Authorization=Bearer k;");
    CHECK(got.target == "/v1/x?q=1");
    CHECK(got.path == "/v1/x");
    CHECK(got.framing == Framing::kChunked);
    CHECK(got.content_length == -1);
    CHECK(got.expects_continue);
    CHECK(got.keep_alive);
}

TEST_CASE("request: bytes behind the head are not looked at") {
    std::string head = "GET /v1/models HTTP/1.1\r\n" + kHost + "\r\n";
    Outcome got = at_once(head + std::string(10000, '\0'));
    CHECK(got.step == Step::kDone);
    CHECK(got.bytes == head.size());
}

TEST_CASE("request: the version and what it allows") {
    auto of = [](const std::string& fields, const char* version) {
        return outcome(std::string("GET / HTTP/") + version + "\r\n" + fields + "\r\n");
    };
    CHECK(of(kHost + "Connection: Close\r\n", "1.1").keep_alive == false);
    CHECK(of(kHost + "Connection: a\r\nConnection: b, close ,\r\n", "1.1").keep_alive == false);
    Outcome old = of("Connection: keep-alive\r\nExpect: 100-continue\r\n", "1.0");
    CHECK(old.step == Step::kDone);
    CHECK(old.http_1_0);
    CHECK_FALSE(old.keep_alive);
    CHECK_FALSE(old.expects_continue);
    CHECK(old.host.empty());
}

TEST_CASE("request: targets") {
    auto target = [](const std::string& text) {
        return outcome("GET " + text + " HTTP/1.1\r\n" + kHost + "\r\n").target;
    };
    CHECK(target("/") == "/");
    CHECK(target("*") == "*");
    CHECK(target("/a#b") == "/a");
    CHECK(target("/a?{}|^`<>\"\\") == "/a?{}|^`<>\"\\");
    CHECK(target("HTTPS://h/a/b?c") == "/a/b?c");
    CHECK(target("http://h") == "/");
    CHECK(target("//evil/x") == "//evil/x");
}

TEST_CASE("request: an id that cannot be repeated is dropped") {
    for (const std::string& id :
         {std::string(), std::string("a b"), std::string(129, 'x'), std::string("caf\xe9")})
        CHECK(outcome("GET / HTTP/1.1\r\n" + kHost + "X-Request-Id: " + id + "\r\n\r\n").request_id == "");
    CHECK(outcome("GET / HTTP/1.1\r\n" + kHost + "X-Request-Id: a\r\nX-Request-Id: b\r\n\r\n").request_id ==
          "b");
}

TEST_CASE("request: refused") {
    struct Case {
        std::string data;
        int status;
        const char* reason;
        const char* words;
    };
    const std::string get = "GET / HTTP/1.1\r\n" + kHost, post = "POST / HTTP/1.1\r\n" + kHost;
    std::string many_fields = get, many_names = get + "Connection: ";
    for (int i = 0; i < 300; ++i) many_fields += "a:\r\n";
    for (int i = 0; i < 65; ++i) many_names += "a,";
    const Case cases[] = {
        {std::string("\x16\x03\x01\x02\x00\x01\x00", 7), 400, "malformed", "no HTTP/1.1 request"},
        {"hello\r\n", 400, "malformed", "first line"},
        {"get / HTTP/1.1\r\n", 400, "malformed", "first line"},
        {" GET / HTTP/1.1\r\n", 400, "malformed", "first line"},
        {"GET  / HTTP/1.1\r\n", 400, "malformed", "blanks"},
        {"GET / HTTP/1.1 \r\n", 400, "malformed", "blanks"},
        {"GET /\t HTTP/1.1\r\n", 400, "malformed", "blanks"},
        {"GET /a b HTTP/1.1\r\n", 400, "malformed", "blanks"},
        {"GET / HTTP/1.1\n", 400, "malformed", "CRLF"},
        {"GET / HTTP/11\r\n", 400, "malformed", "version"},
        {"GET / http/1.1\r\n", 400, "malformed", "version"},
        {"GET /caf\xC3\xA9 HTTP/1.1\r\n", 400, "malformed", "not ASCII"},
        {"GET a HTTP/1.1\r\n", 400, "malformed", "no path"},
        {"GET http:///x HTTP/1.1\r\n", 400, "malformed", "no path"},
        {"GET ftp://h/x HTTP/1.1\r\n", 400, "malformed", "no path"},
        {"GET http://h?/x HTTP/1.1\r\n", 400, "malformed", "no path"},
        {"CONNECT h:80 HTTP/1.1\r\n", 400, "malformed", "no path"},
        {get + "A : b\r\n", 400, "malformed", "no field"},
        {get + "A\r\n", 400, "malformed", "no field"},
        {get + ": b\r\n", 400, "malformed", "no field"},
        {get + "A\xe9: b\r\n", 400, "malformed", "no field"},
        {get + "A: b\r\n c\r\n", 400, "malformed", "goes on"},
        {get + "A: b\r\n\tc: d\r\n", 400, "malformed", "goes on"},
        {get + std::string("A: b\0c", 6), 400, "malformed", "control"},
        {get + "A: b\x7f", 400, "malformed", "control"},
        {get + "A: b\rX-B: c\r\n", 400, "malformed", "carriage return"},
        {get + "A: b\nX-B: c\r\n", 400, "malformed", "CRLF"},
        {get + "A: b\r\n\n", 400, "malformed", "CRLF"},
        {get + "\rx", 400, "malformed", "carriage return"},
        {"PRI * HTTP/2.0\r\n", 505, "http_version", "not HTTP/2"},
        {"GET / HTTP/2.0\r\n", 505, "http_version", "not HTTP/2.0"},
        {"GET / HTTP/1.2\r\n", 505, "http_version", "not HTTP/1.2"},
        {"GET /\r\n", 505, "http_version", "not HTTP/0.9"},
        {"GET / HTTP/1.1\r\n\r\n", 400, "malformed", "exactly one Host"},
        {get + kHost + "\r\n", 400, "malformed", "exactly one Host"},
        {"GET / HTTP/1.0\r\n" + kHost + kHost + "\r\n", 400, "malformed", "exactly one Host"},
        {post + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "malformed", "both"},
        {post + "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n", 400, "malformed", "both"},
        {post + "Content-Length: 1\r\ncontent-length: 1\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length: 1, 1\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length: -1\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length: +1\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length: 1e3\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length: 0x1\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length:\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length: 1000000000000000000\r\n\r\n", 400, "malformed", "Length"},
        {post + "Content-Length: 4097\r\n\r\n", 413, "body_too_large", "limit of 4096 bytes"},
        {post + "Content-Length: 999999999999999999\r\n\r\n", 413, "body_too_large", "limit"},
        {post + "Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "transfer_encoding", "chunked"},
        {post + "Transfer-Encoding: chunked, identity\r\n\r\n", 501, "transfer_encoding", "chunked"},
        {post + "Transfer-Encoding: xchunked\r\n\r\n", 501, "transfer_encoding", "chunked"},
        {post + "Transfer-Encoding:\r\n\r\n", 501, "transfer_encoding", "chunked"},
        {post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501, "transfer_encoding",
         "c"},
        {post + "Transfer-Encoding : chunked\r\n", 400, "malformed", "no field"},
        {post + "Transfer-Encoding: \x0b"
                "chunked\r\n",
         400, "malformed", "control"},
        {post + "Expect: much\r\n\r\n", 417, "expect", "100-continue"},
        {get + "A: " + std::string(5000, 'b'), 431, "head_too_large", "limit of 4096 bytes"},
        {[] {
             std::string s;
             for (int i = 0; i < 3000; ++i) s += "\r\n";
             return s;
         }(),
         431, "head_too_large", "l"},
        {many_fields + "\r\n", 431, "head_too_large", "256 fields"},
        {many_names + "\r\n\r\n", 400, "malformed", "too many"},
    };
    for (const Case& test : cases) {
        CAPTURE(test.data);
        Outcome got = outcome(test.data);
        CHECK(got.step == Step::kRefused);
        CHECK(got.status == test.status);
        CHECK(got.reason == test.reason);
        CAPTURE(got.sentence);
        CHECK(got.sentence.find(test.words) != std::string::npos);
    }
}

TEST_CASE("request: the limit of a head is exact") {
    std::string head = "GET / HTTP/1.1\r\n" + kHost + "A: ";
    std::string fits = head + std::string(4096 - head.size() - 4, 'b') + "\r\n\r\n";
    REQUIRE(fits.size() == 4096);
    CHECK(outcome(fits).step == Step::kDone);
    CHECK(at_once(fits + "body").step == Step::kDone);
    std::string beyond = head + std::string(4097 - head.size() - 4, 'b') + "\r\n\r\n";
    CHECK(outcome(beyond).status == 431);
    CHECK(at_once(beyond + "body").status == 431);
}

TEST_CASE("request: begun is about bytes of a head, not blank lines") {
    RequestParser parser(kLimits);
    CHECK_FALSE(parser.begun());
    CHECK(parser.parse("\r\n\r\n") == Step::kMore);
    CHECK_FALSE(parser.begun());
    CHECK(parser.parse("\r\n\r\nG") == Step::kMore);
    CHECK(parser.begun());
    parser.reset();
    CHECK_FALSE(parser.begun());
}

TEST_CASE("request: views move with the input, and a parser is used again") {
    std::string data = "POST http://h/a?b HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nX-Request-Id: me\r\n\r\n";
    RequestParser parser(kLimits);
    for (int round = 0; round < 2; ++round) {
        auto before = std::make_unique<Bytes>(data);
        REQUIRE(parser.parse(before->view()) == Step::kDone);
        Bytes after(data);
        parser.head().move_views(before->data.get(), after.data.get());
        before.reset();
        Outcome got = outcome_of(parser, Step::kDone);
        CHECK(got == at_once(data));
        CHECK(got.target == "/a?b");
        parser.reset();
    }
}

TEST_CASE("request: any change of a byte is judged the same in one piece and in many") {
    moonpool::testing::Random random(31);
    const std::string base =
        "POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close, a\r\na: b\r\n\r\n";
    const std::string octets("\r\n\0 \t:,;/\x7f\xe9GH1", 14);
    for (int i = 0; i < 3000; ++i) {
        std::string data = base;
        for (uint64_t n = random.between(1, 3); n > 0; --n) {
            size_t at = random.below(data.size());
            if (random.one_in(3))
                data.erase(at, 1);
            else if (random.one_in(2))
                data.insert(at, 1, octets[random.below(octets.size())]);
            else
                data[at] = octets[random.below(octets.size())];
        }
        CAPTURE(data);
        Outcome got = outcome(data);
        if (got.step != Step::kDone) continue;
        CHECK(got.fields.find_first_of("\r\n") == std::string::npos);
        CHECK(got.target.find_first_of(" \r\n") == std::string::npos);
    }
}
