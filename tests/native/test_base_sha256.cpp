// SHA-256, HMAC and the block digest chain against published vectors (FIPS 180-4, RFC 4231) and Python's
// hashlib. Byte i of a generated input is (131 * i + 7 * (i / 256) + 17) mod 256; token i is (2654435761 * i)
// mod 2^32.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.hpp"
#include "base/hmac.hpp"
#include "base/sha256.hpp"

using namespace moonpool;

namespace {

std::string hex(std::span<const uint8_t> bytes) {
    std::string text;
    for (uint8_t byte : bytes) text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
    return text;
}

std::vector<uint8_t> input(size_t size) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(131 * i + 7 * (i / 256) + 17);
    return bytes;
}

std::span<const uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::vector<uint32_t> token_ids(size_t count) {
    std::vector<uint32_t> tokens(count);
    for (size_t i = 0; i < count; ++i) tokens[i] = static_cast<uint32_t>(i) * 2654435761u;
    return tokens;
}

// The padding of the standard written a second time, around the compression function of a CPU without SHA-NI.
Digest sha256_without_instructions(std::vector<uint8_t> message) {
    const uint64_t bits = message.size() * 8;
    message.push_back(0x80);
    while (message.size() % 64 != 56) message.push_back(0);
    for (int shift = 56; shift >= 0; shift -= 8) message.push_back(static_cast<uint8_t>(bits >> shift));
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    sha256_compress_plain(state, message.data(), message.size() / 64);
    Digest digest;
    for (size_t i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

}  // namespace

TEST_CASE("sha256: vectors") {
    CHECK(hex(sha256(nullptr, 0)) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex(sha256("abc", 3)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    struct Vector {
        size_t size;
        const char* digest;
    };
    for (const Vector& vector : {
             Vector{55, "59aaae80b8e7958f5757b4ac9274f1fd57ec0dc7aa8349319102316781b92006"},
             Vector{56, "dca902d31487ffab357ce36cc5abc6947fbb69127ec04c468ba5687268c4bf7c"},
             Vector{63, "b8e655e9e7ad413b96f0a371eb1d6db71dcca27f4eee35892517cbe4bfaa6f9a"},
             Vector{64, "e5146be62accc56709594cb45c651b361df94f622cbb09b91ea3ca7a2060bd53"},
             Vector{65, "4b6c6774f0cbcd776a90e187b9494e04ca880c0afe3ea1c5cad51c8bbcb41f74"},
             Vector{119, "3244509f8746f6fb511ca8a72a292a4d7d12e456cce283c03f169dbbcb0d512e"},
             Vector{128, "ed045c7c319e0c9286e1dea21c80bfd4a08eca43e02e13ee8a7a2c8b4b2baec9"},
             Vector{1000, "87b5e06def64357afe3ffe0154caa56b079cbe084dbd24f049e4ab212594f371"},
             Vector{100000, "51dcc254b6473fee8927eda70372c6c31d3fc8c1ba47f0c6aedc8b2ddd5e7316"},
         }) {
        CAPTURE(vector.size);
        std::vector<uint8_t> message = input(vector.size);
        CHECK(hex(sha256(message.data(), message.size())) == vector.digest);
        CHECK(hex(sha256_without_instructions(message)) == vector.digest);
    }
}

TEST_CASE("sha256: random pieces and the plain code agree with one call") {
    const uint64_t seed = 7;
    MESSAGE("seed ", seed);
    std::mt19937_64 random(seed);
    for (int round = 0; round < 500; ++round) {
        CAPTURE(round);
        std::vector<uint8_t> message(random() % 700);
        for (uint8_t& byte : message) byte = static_cast<uint8_t>(random());
        Sha256 hash;
        for (size_t done = 0; done < message.size();) {
            size_t piece = std::min<size_t>(random() % 150, message.size() - done);
            hash.update(message.data() + done, piece);
            done += piece;
        }
        Digest digest = hash.finish();
        REQUIRE(digest == sha256(message.data(), message.size()));
        REQUIRE(digest == sha256_without_instructions(message));
    }
}

TEST_CASE("hmac_sha256: RFC 4231") {
    std::vector<uint8_t> key1(20, 0x0b), key6(131, 0xaa);
    CHECK(hex(hmac_sha256(key1, bytes_of("Hi There"))) ==
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK(hex(hmac_sha256(bytes_of("Jefe"), bytes_of("what do ya want for nothing?"))) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(hex(hmac_sha256(key6, bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK(hex(hmac_sha256({}, {})) == "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST_CASE("equal_constant_time: equal, every single difference, other lengths") {
    std::vector<uint8_t> a = input(32), b = a;
    CHECK(equal_constant_time(a, b));
    for (size_t i = 0; i < 32; ++i) {
        for (int bit = 0; bit < 8; ++bit) {
            b[i] ^= static_cast<uint8_t>(1 << bit);
            CHECK_FALSE(equal_constant_time(a, b));
            b[i] ^= static_cast<uint8_t>(1 << bit);
        }
    }
    b.pop_back();
    CHECK_FALSE(equal_constant_time(a, b));
    CHECK_FALSE(equal_constant_time(a, {}));
    CHECK(equal_constant_time({}, {}));
}

TEST_CASE("block_digests: the chain, from a prompt's start and from a seed") {
    const std::vector<uint32_t> tokens =
        token_ids(70);  // four blocks of 16, and 6 tokens that are not hashed
    std::vector<uint8_t> out(4 * 32 + 8, 0xEE);
    block_digests(tokens, 16, {}, out.data());
    CHECK(hex({out.data(), 32}) == "d149f5f5be3028c36a9c19a4124fba457aeeb56524fac467a6f6c782c4456efe");
    CHECK(hex({out.data() + 32, 32}) == "7059a53fd47343c8d3f050e50d8f7091a834abcc039d17119cd85481f447aad3");
    CHECK(hex({out.data() + 64, 32}) == "d1b08a4c22a5d22bf6e639c5249dca2ed8d3702a018a9467463634bb03431745");
    CHECK(hex({out.data() + 96, 32}) == "7afe17d02a07b9ff874465378065385f21ff220a179eeb518ff49bd15dd1de1d");
    CHECK(std::count(out.end() - 8, out.end(), 0xEE) == 8);

    using namespace std::literals;
    block_digests(tokens, 16, bytes_of("lora\0salt"sv), out.data());
    CHECK(hex({out.data(), 32}) == "72d56c5ca92eff662721ec426c9b3f30c993a2e6e4a49b829530675cf0680c9f");
    CHECK(hex({out.data() + 96, 32}) == "c6ce00d8fdea05952cd233131dde0c25ea17b9088a9e2c3220ab6231101f0096");

    std::vector<uint8_t> sevens(10 * 32);
    block_digests(tokens, 7, {}, sevens.data());
    CHECK(hex({sevens.data() + 9 * 32, 32}) ==
          "9bfd3b83744b984a0e9e71a073876aa8c47d8d17ad91de5550a6d098006468bc");
}

TEST_CASE("block_digests: continuing from a digest equals one call over everything") {
    const std::vector<uint32_t> tokens = token_ids(256);
    std::vector<uint8_t> whole(16 * 32), parts(16 * 32);
    block_digests(tokens, 16, {}, whole.data());
    const std::span<const uint32_t> all = tokens;
    for (size_t split = 1; split < 16; ++split) {
        block_digests(all.first(16 * split), 16, {}, parts.data());
        block_digests(all.subspan(16 * split), 16, {parts.data() + 32 * (split - 1), 32},
                      parts.data() + 32 * split);
        CHECK(parts == whole);
    }
}

TEST_CASE("block_digests: fewer tokens than a block, or none, write nothing") {
    const std::vector<uint32_t> tokens = token_ids(15);
    block_digests(tokens, 16, {}, nullptr);
    block_digests({}, 16, {}, nullptr);
    block_digests(tokens, 0, {}, nullptr);
}
