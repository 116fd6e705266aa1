// docs/wire_engine.md: each example is what the code writes, byte for byte, and reads.
#include <doctest/doctest.h>

#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>

#include "../device/bed.hpp"
#include "../root.hpp"
#include "transport/frames.hpp"
#include "transport/nic/messages.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using namespace moonpool::transport;

namespace {

// The bytes of the first example whose caption begins with that text.
std::vector<std::byte> example(const std::string& caption) {
    std::ifstream page(root() / "docs" / "wire_engine.md");
    std::string line;
    bool found = false, inside = false;
    std::vector<std::byte> bytes;
    while (std::getline(page, line)) {
        if (line.rfind("Example, " + caption, 0) == 0) found = true;
        if (!found) continue;
        if (inside && line == "```") break;
        if (line == "```hex") {
            inside = true;
            continue;
        }
        std::istringstream words(inside ? line : "");
        for (std::string word; words >> word;) bytes.push_back(std::byte(std::stoi(word, nullptr, 16)));
    }
    REQUIRE_MESSAGE(!bytes.empty(), caption);
    return bytes;
}

std::vector<std::byte> framed(Kind kind, uint16_t flags, uint64_t id, const std::vector<std::byte>& body) {
    std::vector<std::byte> out;
    out.reserve(1024);
    size_t at = begin_frame(out, kind, flags, id);
    out.insert(out.end(), body.begin(), body.end());
    finish_frame(out, at);
    return out;
}

std::vector<std::byte> body_of(const std::vector<std::byte>& frame) {
    return {frame.begin() + sizeof(FrameHeader), frame.end()};
}

std::vector<std::byte> with(const std::function<void(Writer&)>& write) {
    std::vector<std::byte> out;
    out.reserve(1024);
    Writer w(out);
    write(w);
    return out;
}

constexpr size_t kLowestBytes = 2;  // at the end of HELLO and WELCOME: the lowest version

}  // namespace

TEST_CASE("engine wire: the examples of the page") {
    Hello hello;
    for (uint8_t i = 0; i < 16; ++i) {
        hello.segment[i] = i;
        hello.expected[i] = static_cast<uint8_t>(16 + i);
    }
    hello.channel = 3;
    hello.name = "A";
    CHECK(framed(Kind::kEngineHello, 0, 1, with([&](Writer& w) { encode(w, hello); })) ==
          example("HELLO of"));
    std::vector<std::byte> body = body_of(example("HELLO of"));
    CHECK(decode_hello(Reader(body))->channel == 3);
    CHECK(framed(Kind::kEngineHello, kFlagAnswer, 1, with([](Writer& w) { w.number(kEngineVersion); })) ==
          example("HELLO, answer"));

    PeerInfo peer;
    peer.version = kEngineVersion;
    CHECK(framed(Kind::kEngineRegions, 0, 2, regions_question(peer)) == example("REGIONS:"));
    transport::RegionList regions = {std::make_shared<Region>()};
    regions[0]->id = 7;
    regions[0]->address = 0x400000;
    regions[0]->length = 4096;
    regions[0]->kind = MemoryKind::kHostArena;
    regions[0]->location = "cpu:0";
    CHECK(framed(Kind::kEngineRegions, kFlagAnswer, 2, with([&](Writer& w) {
                     w.number(uint64_t{0});
                     encode_regions(w, regions, kEngineVersion);
                 })) == example("REGIONS, answer"));
    body = body_of(example("REGIONS, answer"));
    Reader r(body);
    (void)r.number<uint64_t>();
    CHECK(decode_regions(r)->front().location == "cpu:0");

    CHECK(framed(Kind::kEngineTransfer, 0, 3, with([](Writer& w) {
                     w.number(uint32_t{2});
                     w.number(uint32_t{0});
                     w.number(TransferRow{0x400000, 4, 1});
                     w.number(TransferRow{0x400100, 2, 0});
                     w.bytes("data", 4);
                 })) == example("TRANSFER:"));
    CHECK(framed(Kind::kEngineTransfer, kFlagAnswer, 3, with([](Writer& w) {
                     w.number(uint32_t{2});
                     w.number(uint32_t{0});
                     w.bytes("ok", 2);
                 })) == example("TRANSFER, answer"));
    CHECK(framed(Kind::kEngineNotify, 0, 4, with([](Writer& w) { w.bytes("hi", 2); })) ==
          example("NOTIFY of"));
    CHECK(framed(Kind::kEngineFence, 0, 5, with([](Writer& w) {
                     w.number(uint32_t{1});
                     w.number(uint32_t{3});
                 })) == example("FENCE of"));
    CHECK(framed(Kind::kEngineAsk, 0, 6, nic::end_question("rdma", 3)) == example("END of"));
}

TEST_CASE("engine wire: offers and the lowest version stand behind what older engines read and say") {
    PeerInfo info;
    info.name = "A";
    info.versions = {2, 9};
    std::vector<std::byte> before = encode_welcome(info);
    CHECK(decode_welcome(before)->versions == VersionRange{2, 9});
    before.resize(before.size() - kLowestBytes - 1);  // no number of offers, either
    CHECK(decode_welcome(before)->offers.empty());
    CHECK(decode_welcome(before)->versions == VersionRange{1, 9});
    info.offers["rdma"] = {std::byte{1}, std::byte{2}};
    info.offers["later"] = {};
    std::vector<std::byte> body = encode_welcome(info);
    CHECK(std::equal(before.begin(), before.end(), body.begin()));
    CHECK(decode_welcome(body)->offers == info.offers);
    body.push_back(std::byte{7});  // of a later version
    CHECK(decode_welcome(body)->offers == info.offers);
    body.pop_back();
    for (size_t size = before.size() + 1; size < body.size(); ++size) {
        if (size == body.size() - kLowestBytes) continue;
        CHECK_FALSE(decode_welcome(std::span(body).first(size)).has_value());
    }
}

TEST_CASE("engine wire: a region of a kind that is not known here is listed, and no link reaches it") {
    transport::RegionList regions = {std::make_shared<Region>()};
    regions[0]->address = 4096;
    regions[0]->length = 100;
    regions[0]->kind = static_cast<MemoryKind>(9);
    std::vector<std::byte> body = with([&](Writer& w) { encode_regions(w, regions, kEngineVersion); });
    std::optional<std::vector<RegionRow>> rows = decode_regions(Reader(body));
    REQUIRE(rows.has_value());
    CHECK(kind_name(rows->front().kind) == "kind 9");
    std::string why;
    for (auto kind : {MemoryKind::kDevice, MemoryKind::kFile, rows->front().kind}) {
        CHECK_FALSE(reached_by_cpu(kind, &why));
        CHECK(why.find(kind_name(kind)) != std::string::npos);
    }
    CHECK(reached_by_cpu(MemoryKind::kHostArena, &why));
}

TEST_CASE("engine wire: a peer of the version before cards is asked, and answered, as then") {
    PeerInfo peer;
    peer.version = kVersionWithCards - 1;
    std::vector<std::byte> question = regions_question(peer);
    CHECK(question.empty());
    CHECK(decode_regions_question(Reader(question))->version == 1);
    peer.version = kEngineVersion;
    question = regions_question(peer);
    CHECK(decode_regions_question(Reader(question))->version == kEngineVersion);
    question.resize(1);
    CHECK_FALSE(decode_regions_question(Reader(question)).has_value());

    Bed bed;
    transport::RegionList regions = {std::make_shared<Region>(), std::make_shared<Region>()};
    regions[0]->kind = MemoryKind::kDevice;
    regions[0]->card = device::must(device::CardCopier::open(0));
    for (uint64_t i = 0; i < 2; ++i) {
        regions[i]->address = 4096 * (i + 1);
        regions[i]->length = 4096;
    }
    for (uint16_t version : {uint16_t{1}, kEngineVersion}) {
        std::vector<std::byte> body = with([&](Writer& w) { encode_regions(w, regions, version); });
        std::optional<std::vector<RegionRow>> rows = decode_regions(Reader(body));
        REQUIRE(rows.has_value());
        REQUIRE(rows->size() == (version == 1 ? 1 : 2));
        CHECK(rows->back().kind == MemoryKind::kHost);
    }
    regions.clear();
    bed.end();
}

TEST_CASE("engine wire: what is cut off, too long or out of order is not read") {
    for (const char* caption : {"HELLO of", "REGIONS, answer"}) {
        std::vector<std::byte> body = body_of(example(caption));
        bool regions = caption[0] == 'R';
        for (size_t size = 0; size < body.size(); ++size) {
            if (!regions && size == body.size() - kLowestBytes) continue;  // as of the release before
            std::vector<std::byte> part(body.begin(), body.begin() + static_cast<long>(size));
            Reader r(part);
            if (regions) (void)r.number<uint64_t>();
            CHECK_FALSE((regions ? decode_regions(r).has_value() : decode_hello(r).has_value()));
        }
    }
    transport::RegionList wrong = {std::make_shared<Region>(), std::make_shared<Region>()};
    for (auto& region : wrong) {
        region->address = 4096;
        region->length = 100;
    }
    std::vector<std::byte> body = with([&](Writer& w) { encode_regions(w, wrong, kEngineVersion); });
    CHECK_FALSE(decode_regions(Reader(body)).has_value());
    wrong[1]->address = 8192;
    body = with([&](Writer& w) { encode_regions(w, wrong, kEngineVersion); });
    CHECK(decode_regions(Reader(body)).has_value());
}
