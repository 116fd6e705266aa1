// Members and their spans; what is JSON and what is not. Texts lie at addresses of their own, so that a byte
// read beyond the end is found by AddressSanitizer. tests/disagg_proxy/http compares with Python's json at
// random.
#include <doctest/doctest.h>

#include <memory>
#include <string>

#include "json/scanner.hpp"

using namespace moonpool::json;

namespace {

bool scans(std::string_view text) {
    auto copy = std::make_unique<char[]>(text.size());
    std::copy(text.begin(), text.end(), copy.get());
    Object object;
    bool sound = object.scan({copy.get(), text.size()});
    if (sound) CHECK(std::string(object.error()).empty());
    if (!sound) {
        CHECK_FALSE(std::string(object.error()).empty());
        CHECK(object.error_at() <= text.size());
        CHECK(object.members().empty());
    }
    return sound;
}

std::string nested(size_t depth) {
    return "{\"a\":" + std::string(depth - 1, '[') + std::string(depth - 1, ']') + "}";
}

}  // namespace

TEST_CASE("scanner: members, their spans and kinds") {
    std::string text =
        " { \"a\" : -12 ,\"b\":1.5e+3,\t\"c\":\"x\\\"y\",\r\n\"d\":[1,{\"e\":[]}, \"]\" ] ,\"f\":{\"g\":{}},"
        "\"h\":null,\"i\":true,\"j\":false,\"\\u006b\":\"\",\"\":0} \n";
    Object object;
    REQUIRE(object.scan(text));
    struct Expected {
        const char *key, *value;
        Kind kind;
        bool key_escaped, value_escaped;
    };
    const Expected expected[] = {
        {"a", "-12", Kind::kInteger, false, false},
        {"b", "1.5e+3", Kind::kReal, false, false},
        {"c", "\"x\\\"y\"", Kind::kString, false, true},
        {"d", "[1,{\"e\":[]}, \"]\" ]", Kind::kArray, false, false},
        {"f", "{\"g\":{}}", Kind::kObject, false, false},
        {"h", "null", Kind::kNull, false, false},
        {"i", "true", Kind::kTrue, false, false},
        {"j", "false", Kind::kFalse, false, false},
        {"\\u006b", "\"\"", Kind::kString, true, false},
        {"", "0", Kind::kInteger, false, false},
    };
    REQUIRE(object.members().size() == std::size(expected));
    for (size_t i = 0; i < std::size(expected); ++i) {
        const Member& member = object.members()[i];
        CHECK(member.key == expected[i].key);
        CHECK(member.value == expected[i].value);
        CHECK(member.kind == expected[i].kind);
        CHECK(member.key_escaped == expected[i].key_escaped);
        CHECK(member.value_escaped == expected[i].value_escaped);
        CHECK(member.value.data() >= text.data());
        CHECK(member.value.data() + member.value.size() <= text.data() + text.size());
    }
    CHECK(object.find("k") == &object.members()[8]);
    CHECK(object.find("x") == nullptr);
}

TEST_CASE("scanner: of a key that stands twice the last counts, however it is written") {
    Object object;
    REQUIRE(object.scan(R"({"stream":true,"a":1,"str\u0065am":false})"));
    CHECK(object.members().size() == 3);
    REQUIRE(object.find("stream") != nullptr);
    CHECK(object.find("stream")->value == "false");
}

TEST_CASE("scanner: is JSON") {
    for (const char* text : {"{}", " {\t}\r\n", R"({"a":0})", R"({"a":-0})", R"({"a":0.0})", R"({"a":1E-2})",
                             R"({"a":[]})", R"({"a":[[],{},[1]]})", R"({"\"\\\/\b\f\n\r\t\u00e9":"\ud800"})",
                             "{\"a\":\"\x7f\xff\"}", R"({"a":{"b":1,"b":2}})"})
        CHECK_MESSAGE(scans(text), text);
}

TEST_CASE("scanner: is no JSON object") {
    for (const char* text : {"",
                             " ",
                             "[]",
                             "1",
                             "\"a\"",
                             "null",
                             "{",
                             "}",
                             "{]",
                             R"({"a")",
                             R"({"a":)",
                             R"({"a":1)",
                             R"({"a":1,)",
                             R"({"a":1,})",
                             R"({,"a":1})",
                             R"({"a":1 "b":2})",
                             R"({"a" 1})",
                             R"({a:1})",
                             R"({'a':1})",
                             R"({"a":1}})",
                             R"({"a":1}x)",
                             R"({"a":1}{})",
                             R"({"a":01})",
                             R"({"a":+1})",
                             R"({"a":-})",
                             R"({"a":.5})",
                             R"({"a":1.})",
                             R"({"a":1e})",
                             R"({"a":1e+})",
                             R"({"a":--1})",
                             R"({"a":1.e1})",
                             R"({"a":0x1})",
                             R"({"a":NaN})",
                             R"({"a":Infinity})",
                             R"({"a":-Infinity})",
                             R"({"a":tru})",
                             R"({"a":True})",
                             R"({"a":nulll})",
                             R"({"a":[1,]})",
                             R"({"a":[,1]})",
                             R"({"a":[1 2]})",
                             R"({"a":[1})",
                             R"({"a":[1}])",
                             R"({"a":{"b":1]})",
                             R"({"a":{"b"}})",
                             R"({"a":{"b":}})",
                             R"({"a":{"b":1,}})",
                             R"({"a":{1:2}})",
                             R"({"a":")",
                             R"({"a":"\)",
                             R"({"a":"\x"})",
                             R"({"a":"\u12"})",
                             R"({"a":"\u12g4"})",
                             R"({"a":"\u+123"})",
                             "{\"a\":\"\n\"}",
                             "{\"a\":\"\x1f\"}",
                             "{\"a\n\":1}",
                             "\xEF\xBB\xBF{}",
                             "{\"a\":1}/**/",
                             "{\"a\":\v1}",
                             R"({"a":[)",
                             R"({"a":[[)"})
        CHECK_MESSAGE(!scans(text), text);
    CHECK_FALSE(scans(std::string_view("{\"a\":1\0}", 8)));
    CHECK_FALSE(scans(std::string_view("{}\0", 3)));
    CHECK_FALSE(scans(std::string_view("{\"a\":\"\\\0\"}", 9)));
}

TEST_CASE("scanner: every beginning of a text is no text") {
    std::string text = R"({"a":[1,-2.5e3,"x\n\u00e9",{"b":[true,false,null]}],"c":{"d":{}},"e":"\\"})";
    REQUIRE(scans(text));
    for (size_t size = 0; size < text.size(); ++size) CHECK_FALSE(scans(text.substr(0, size)));
}

TEST_CASE("scanner: depth is bounded") {
    CHECK(scans(nested(kDepthMax)));
    CHECK_FALSE(scans(nested(kDepthMax + 1)));
    CHECK_FALSE(scans("{\"a\":" + std::string(1000000, '[')));
    std::string objects = "{\"a\":";
    for (int i = 0; i < 1000; ++i) objects += "{\"a\":";
    CHECK_FALSE(scans(objects));
}

TEST_CASE("scanner: strings of every length, with the special character at every place") {
    for (size_t size = 0; size < 200; ++size) {
        std::string plain(size, 'x');
        Object object;
        std::string text = "{\"a\":\"" + plain + "\"}";
        REQUIRE(scans(text));
        REQUIRE(object.scan(text));
        CHECK(object.members()[0].value.size() == size + 2);
        if (size == 0) continue;
        for (size_t at : {size_t{0}, size / 2, size - 1}) {
            std::string control = plain, quote = plain, escape = plain, high = plain;
            control[at] = '\x01';
            quote[at] = '"';
            escape.replace(at, 1, "\\n");
            high[at] = '\xff';
            CHECK_FALSE(scans("{\"a\":\"" + control + "\"}"));
            CHECK_FALSE(scans("{\"a\":\"" + quote + "\"}"));
            CHECK(scans("{\"a\":\"" + escape + "\"}"));
            CHECK(scans("{\"a\":\"" + high + "\"}"));
        }
    }
}

TEST_CASE("scanner: a member of a member") {
    std::string text =
        R"({"id":"x","usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}}})";
    auto found = find_path(text, {"usage", "prompt_tokens_details", "cached_tokens"});
    REQUIRE(found);
    CHECK(found->value == "7");
    CHECK(find_path(text, {"usage"})->kind == Kind::kObject);
    CHECK_FALSE(find_path(text, {"usage", "x"}));
    CHECK_FALSE(find_path(text, {"id", "x"}));
    CHECK_FALSE(find_path("{", {"usage"}));
}

TEST_CASE("scanner: views move with the text") {
    std::string text = R"({"a":[1],"b":""})", elsewhere = text;
    Object object;
    REQUIRE(object.scan(text));
    object.move_views(text.data(), elsewhere.data());
    text.assign(text.size(), '!');
    CHECK(object.text() == elsewhere);
    CHECK(object.find("a")->value == "[1]");
    CHECK(object.find("b")->value == "\"\"");
}
