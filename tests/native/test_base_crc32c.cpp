// Every implementation that this CPU can run against the definition, bit by bit; and that none of them
// touches a byte outside its ranges (sanitizers do not see streaming stores, so unreadable pages stand on
// both sides).
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/copy.hpp"
#include "base/crc32c.hpp"
#include "base/fd.hpp"

using namespace moonpool;

namespace {

// Reflected division by the Castagnoli polynomial, one bit at a time: the remainder after every prefix of
// data.
std::vector<uint32_t> slow_crc32c_of_prefixes(const std::vector<uint8_t>& data) {
    std::vector<uint32_t> crcs = {0};
    uint32_t r = ~0u;
    for (uint8_t byte : data) {
        r ^= byte;
        for (int bit = 0; bit < 8; ++bit) r = r >> 1 ^ (r & 1) * 0x82F63B78u;
        crcs.push_back(~r);
    }
    return crcs;
}

std::vector<uint8_t> random_bytes(size_t size, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<uint8_t> bytes(size);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

// `size` bytes of memory with an unreadable page before and after.
class Fenced {
   public:
    explicit Fenced(size_t size) : size_(size) {
        mapped_ = size + 2 * kPage;
        base_ = static_cast<uint8_t*>(
            ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        REQUIRE(size % kPage == 0);
        REQUIRE(base_ != MAP_FAILED);
        REQUIRE(::mprotect(base_, kPage, PROT_NONE) == 0);
        REQUIRE(::mprotect(base_ + kPage + size, kPage, PROT_NONE) == 0);
    }
    Fenced(const Fenced&) = delete;
    Fenced& operator=(const Fenced&) = delete;
    ~Fenced() { ::munmap(base_, mapped_); }

    uint8_t* begin() { return base_ + kPage; }
    uint8_t* end() { return begin() + size_; }

   private:
    static constexpr size_t kPage = 4096;
    size_t size_, mapped_;
    uint8_t* base_;
};

}  // namespace

TEST_CASE("crc32c: known values") {
    // RFC 3720, B.4, and the check value of the CRC catalogues.
    std::vector<uint8_t> zeros(32, 0), ones(32, 0xff), up(32), down(32);
    for (uint8_t i = 0; i < 32; ++i) up[i] = i, down[i] = 31 - i;
    for (const Crc32cVariant& variant : crc32c_variants()) {
        CAPTURE(std::string(variant.name));
        CHECK(variant.crc32c(0, "123456789", 9) == 0xE3069283);
        CHECK(variant.crc32c(0, zeros.data(), 32) == 0x8A9136AA);
        CHECK(variant.crc32c(0, ones.data(), 32) == 0x62A8AB43);
        CHECK(variant.crc32c(0, up.data(), 32) == 0x46DD794E);
        CHECK(variant.crc32c(0, down.data(), 32) == 0x113FDB5C);
        CHECK(variant.crc32c(0, nullptr, 0) == 0);
        CHECK(variant.crc32c(0x12345678, nullptr, 0) == 0x12345678);
        CHECK(variant.copy_crc32c(0x12345678, nullptr, nullptr, 0) == 0x12345678);
    }
    CHECK(crc32c(0, "123456789", 9) == 0xE3069283);
}

TEST_CASE("crc32c: every small size, and sizes around the streaming border, at fences and odd addresses") {
    constexpr size_t kMost = 80 << 10;
    const std::vector<uint8_t> data = random_bytes(kMost, 1);
    const std::vector<uint32_t> expected = slow_crc32c_of_prefixes(data);
    std::vector<size_t> sizes;
    for (size_t n = 0; n <= 1300; ++n) sizes.push_back(n);
    for (size_t n = (32 << 10) - 70; n <= (32 << 10) + 330; n += 7) sizes.push_back(n);
    sizes.insert(sizes.end(), {4095, 4096, 4097, 65535, 65536, 65537, kMost});
    Fenced source(kMost), target(kMost);
    for (const Crc32cVariant& variant : crc32c_variants()) {
        CAPTURE(std::string(variant.name));
        for (size_t size : sizes) {
            CAPTURE(size);
            // Ranges that end at the fence (so they start anywhere), and ranges that start after it.
            for (bool at_end : {true, false}) {
                uint8_t* from = at_end ? source.end() - size : source.begin();
                uint8_t* to = at_end ? target.begin() : target.end() - size;
                size_t guarded = std::min<size_t>(kMost - size, 256);
                uint8_t* guard = at_end ? to + size : to - guarded;
                std::copy_n(data.begin(), size, from);
                std::memset(to, 0, size);
                std::memset(guard, 0xA5, guarded);
                REQUIRE(variant.crc32c(0, from, size) == expected[size]);
                REQUIRE(variant.copy_crc32c(0, to, from, size) == expected[size]);
                REQUIRE(std::memcmp(to, data.data(), size) == 0);
                REQUIRE(std::count(guard, guard + guarded, 0xA5) == static_cast<ptrdiff_t>(guarded));
            }
        }
    }
}

TEST_CASE("crc32c: random pieces chain to the checksum of the whole, and guards stay whole") {
    const uint64_t seed = 20240609;
    MESSAGE("seed ", seed);
    std::mt19937_64 random(seed);
    constexpr size_t kMost = 300'000, kGuard = 64;
    const std::vector<uint8_t> data = random_bytes(kMost, seed);
    const std::vector<uint32_t> expected = slow_crc32c_of_prefixes(data);
    std::vector<uint8_t> target(kMost + 3 * kGuard);
    for (const Crc32cVariant& variant : crc32c_variants()) {
        CAPTURE(std::string(variant.name));
        for (int round = 0; round < 60; ++round) {
            CAPTURE(round);
            std::fill(target.begin(), target.end(), 0x5A);
            uint8_t* to = target.data() + kGuard + random() % kGuard;
            size_t size = random() % (kMost + 1), done = 0;
            uint32_t alone = 0, copied = 0;
            while (done < size) {
                size_t most = random() % 4 == 0 ? 120'000 : random() % 3000 + 1;
                size_t piece = std::min<size_t>(random() % most + 1, size - done);
                alone = variant.crc32c(alone, data.data() + done, piece);
                copied = variant.copy_crc32c(copied, to + done, data.data() + done, piece);
                done += piece;
                REQUIRE(alone == expected[done]);
                REQUIRE(copied == expected[done]);
            }
            REQUIRE(std::memcmp(to, data.data(), size) == 0);
            auto untouched = [](uint8_t b) { return b == 0x5A; };
            REQUIRE(std::all_of(target.data(), to, untouched));
            REQUIRE(std::all_of(to + size, target.data() + target.size(), untouched));
        }
    }
}

TEST_CASE("copy_crc32c: a source that changes meanwhile never makes a checksum that does not fit the copy") {
    // The writer uses a second mapping of the same pages: to the sanitizers, as to us, it is another process.
    constexpr size_t kSize = 256 << 10;
    Fd file(::memfd_create("source", MFD_CLOEXEC));
    REQUIRE(file.valid());
    REQUIRE(::ftruncate(file.get(), kSize) == 0);
    auto map = [&] {
        void* at = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
        REQUIRE(at != MAP_FAILED);
        return static_cast<uint8_t*>(at);
    };
    uint8_t *source = map(), *same_pages = map();
    std::atomic<bool> started = false;
    std::jthread writer([&](std::stop_token stop) {
        for (uint8_t value = 0; !stop.stop_requested(); ++value) {
            std::memset(same_pages, value, kSize);
            started = true;
        }
    });
    while (!started) std::this_thread::yield();
    std::vector<uint8_t> target(kSize + 64);
    int torn = 0;
    for (const Crc32cVariant& variant : crc32c_variants()) {
        CAPTURE(std::string(variant.name));
        for (int round = 0; round < 200; ++round) {
            size_t size = round % 2 == 0 ? kSize : 20'000;  // streaming and not
            uint32_t crc = variant.copy_crc32c(0, target.data() + round % 64, source, size);
            REQUIRE(crc32c(0, target.data() + round % 64, size) == crc);
            torn += target[round % 64] != target[round % 64 + size - 1];
        }
    }
    writer.request_stop();
    writer.join();
    MESSAGE("copies torn by the writer: ", torn);
    ::munmap(source, kSize);
    ::munmap(same_pages, kSize);
}

TEST_CASE("copy: bytes arrive, nothing around them changes, and nothing is a size too") {
    const std::vector<uint8_t> data = random_bytes(5000, 3);
    for (size_t size : {0, 1, 7, 64, 4096, 5000}) {
        std::vector<uint8_t> target(size + 32, 0x11);
        copy(target.data() + 16, data.data(), size);
        CHECK(std::memcmp(target.data() + 16, data.data(), size) == 0);
        CHECK(std::count(target.begin(), target.begin() + 16, 0x11) == 16);
        CHECK(std::count(target.end() - 16, target.end(), 0x11) == 16);
    }
    copy(nullptr, nullptr, 0);
}
