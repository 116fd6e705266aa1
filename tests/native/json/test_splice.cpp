// Edits, as the text that engines get.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "../random.hpp"
#include "json/splice.hpp"

using namespace moonpool::json;

namespace {

std::string edited(const std::string& text, const std::vector<Edit>& edits) {
    Object object;
    REQUIRE(object.scan(text));
    Splice splice;
    splice.make(object, edits);
    std::string joined = splice.joined();
    CHECK(splice.bytes() == joined.size());
    for (std::string_view piece : splice.pieces()) CHECK_FALSE(piece.empty());
    Object again;
    CHECK_MESSAGE(again.scan(joined), joined);
    return joined;
}

}  // namespace

TEST_CASE("splice: set, drop, set where present") {
    const std::vector<Edit> edits = {
        {Edit::kSet, "s", "false"}, {Edit::kDrop, "d"}, {Edit::kSetWherePresent, "p", "1"}};
    CHECK(edited("{}", edits) == R"({"s":false})");
    CHECK(edited(R"( { "a" : 1 } )", edits) == R"( { "a" : 1,"s":false})");
    CHECK(edited(R"({"s":true})", edits) == R"({"s":false})");
    CHECK(edited(R"({"d":1})", {{Edit::kDrop, "d"}}) == "{}");
    CHECK(edited(R"({"d":1 , "a":2})", {{Edit::kDrop, "d"}}) == R"({"a":2})");
    CHECK(edited(R"({"a":2 , "d":1 })", {{Edit::kDrop, "d"}}) == R"({"a":2})");
    CHECK(edited(R"({"a":1 ,"d":1, "b":2,"d":{"d":3},"c":3})", edits) == R"({"a":1, "b":2,"c":3,"s":false})");
    CHECK(edited(R"({"p":5,"a":1,"p":6})", edits) == R"({"a":1,"s":false,"p":1})");
    CHECK(edited(R"({"a":{"s":true,"d":1}})", edits) == R"({"a":{"s":true,"d":1},"s":false})");
    CHECK(edited(R"({"\u0073":1,"s\u0020":2})", edits) == R"({"s\u0020":2,"s":false})");
}

TEST_CASE("splice: what stays is not copied") {
    std::string text = R"({"prompt":"long","stream":true,"model":"m"})";
    Object object;
    REQUIRE(object.scan(text));
    const Edit edits[] = {{Edit::kSet, "stream", "false"}};
    Splice splice;
    splice.make(object, edits);
    REQUIRE(splice.pieces().size() == 3);
    CHECK(splice.pieces()[0].data() == text.data());
    CHECK(splice.pieces()[0] == R"({"prompt":"long")");
    CHECK(splice.pieces()[1].data() == text.data() + text.find(",\"model"));
    splice.make(object, edits);
    CHECK(splice.pieces().size() == 3);
}

TEST_CASE("splice: very many pieces are one") {
    std::string text = "{\"x\":0", expected = text;
    for (int i = 0; i < 1000; ++i) {
        text += ",\"a\":1,\"x\":2";
        expected += ",\"x\":2";
    }
    Object object;
    REQUIRE(object.scan(text += "}"));
    const Edit edits[] = {{Edit::kDrop, "a"}};
    Splice splice;
    splice.make(object, edits);
    CHECK(splice.pieces().size() <= kPiecesMax);
    CHECK(splice.joined() == expected + "}");
    CHECK(splice.bytes() == expected.size() + 1);
}

TEST_CASE("splice: random objects against a slow model") {
    moonpool::testing::Random random(33);
    const char* keys[] = {"a", "b", "c", "d"};
    for (int round = 0; round < 2000; ++round) {
        std::string text = "{", expected = "{";
        auto add = [](std::string& to, const std::string& what) { to += (to.size() > 1 ? "," : "") + what; };
        std::vector<Edit> edits;
        std::vector<bool> edit(4), present(4);
        for (size_t i = 0; i < 4; ++i) edit[i] = random.one_in(2);
        for (uint64_t n = random.below(7); n > 0; --n) {
            size_t key = random.below(4);
            present[key] = true;
            std::string member = std::string("\"") + keys[key] + "\":" + std::to_string(n);
            add(text, member);
            if (!edit[key]) add(expected, member);
        }
        for (size_t i = 0; i < 4; ++i) {
            if (!edit[i]) continue;
            auto action = static_cast<Edit::Action>(random.below(3));
            edits.push_back({action, keys[i], "7"});
            if (action == Edit::kSet || (action == Edit::kSetWherePresent && present[i]))
                add(expected, std::string("\"") + keys[i] + "\":7");
        }
        CHECK(edited(text + "}", edits) == expected + "}");
    }
}
