// Values of members.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "json/values.hpp"

using namespace moonpool::json;

namespace {

Member member_of(const std::string& value) {
    static std::string text;  // what the member points into
    static Object object;
    text = "{\"a\":" + value + "}";
    REQUIRE(object.scan(text));
    return object.members()[0];
}

std::vector<uint32_t> ids(const std::string& value) {
    std::vector<uint32_t> out = {9};
    bool sound = token_ids_of(member_of(value), out);
    CHECK(sound == !out.empty());
    return out;
}

}  // namespace

TEST_CASE("values: numbers and truth") {
    CHECK(integer_of(member_of("-5")) == -5);
    CHECK(integer_of(member_of("-0")) == 0);
    CHECK(integer_of(member_of("9223372036854775807")) == INT64_MAX);
    CHECK(integer_of(member_of("9223372036854775808")) == std::nullopt);
    CHECK(integer_of(member_of("1.0")) == std::nullopt);
    CHECK(integer_of(member_of("\"1\"")) == std::nullopt);
    CHECK(bool_of(member_of("true")) == true);
    CHECK(bool_of(member_of("false")) == false);
    CHECK(bool_of(member_of("1")) == std::nullopt);
}

TEST_CASE("values: strings") {
    auto is = [](const std::string& raw, const std::string& content) {
        std::string scratch;
        CHECK(string_of(member_of("\"" + raw + "\"")) == content);
        CHECK(string_of(member_of("\"" + raw + "\""), scratch) == content);
    };
    is("", "");
    is("plain caf\xC3\xA9", "plain caf\xC3\xA9");
    is(R"(\"\\\/\b\f\n\r\t)", "\"\\/\b\f\n\r\t");
    is(R"(a\u0041\u00e9\u20aC\uD83D\uDE00z)", "aA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z");
    is(R"(\u0000)", std::string(1, '\0'));
    is(R"(\ud800)", "\xED\xA0\x80");
    is(R"(\ud800x)", "\xED\xA0\x80x");
    is(R"(\udc00\ud800)", "\xED\xB0\x80\xED\xA0\x80");
    is(R"(\ud800\ud83d\ude00)", "\xED\xA0\x80\xF0\x9F\x98\x80");
    is(R"(\ud83d\u0041)",
       "\xED\xA0\xBD"
       "A");
    is(R"(\ud83d\n)", "\xED\xA0\xBD\n");
    CHECK(string_of(member_of("1")) == std::nullopt);
}

TEST_CASE("values: a string is written so that it is read the same") {
    std::string text;
    for (int c = 0; c < 256; ++c) text.push_back(static_cast<char>(c));
    std::string written;
    append_string(written, text);
    CHECK(string_of(member_of(written)) == text);
}

TEST_CASE("values: token ids") {
    using Ids = std::vector<uint32_t>;
    CHECK(ids("[1]") == Ids{1});
    CHECK(ids("[ 0 ,\n4294967295\t]") == Ids{0, UINT32_MAX});
    CHECK(ids("[[1,2,3]]") == Ids{1, 2, 3});
    CHECK(ids("[ [ 1 ] ]") == Ids{1});
    for (const char* other : {"[]", "[[]]", "[[1],[2]]", "[[1],2]", "[1,[2]]", "[[[1]]]", "[-1]", "[1.0]",
                              "[1e2]", "[4294967296]", "[18446744073709551617]", "[true]", "[\"1\"]",
                              "[null]", "[1,null]", "\"1\"", "1", "{}", "[{}]"})
        CHECK_MESSAGE(ids(other).empty(), other);
}

TEST_CASE("the elements of an array") {
    std::vector<std::string_view> out;
    CHECK(elements_of("[]", out));
    CHECK(out.empty());
    CHECK(elements_of(R"([ 1 ,"a,]" , [2,[3]],{"b":[]}  ])", out));
    CHECK(out == std::vector<std::string_view>{"1", R"("a,]")", "[2,[3]]", R"({"b":[]})"});
    for (std::string_view text : {"{}", "", "[", "[1", "[x]"}) {
        CHECK_FALSE(elements_of(text, out));
        CHECK(out.empty());
    }
}
