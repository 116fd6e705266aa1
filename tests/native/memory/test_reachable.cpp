// What the CPU may read and write, and what it may not: small ranges, which the kernel probes, and large
// ones.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "base/fd.hpp"
#include "memory/reachable.hpp"

using namespace moonpool;

namespace {

constexpr uint64_t kPage = 4096;

class Pages {
   public:
    explicit Pages(uint64_t bytes, int protection = PROT_READ | PROT_WRITE, int fd = -1) : bytes_(bytes) {
        int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
        void* pages = ::mmap(nullptr, bytes, protection, flags, fd, 0);
        REQUIRE(pages != MAP_FAILED);
        data_ = static_cast<char*>(pages);
    }
    ~Pages() { ::munmap(data_, bytes_); }
    Pages(const Pages&) = delete;
    char* data() const { return data_; }
    uint64_t at(uint64_t offset = 0) const { return reinterpret_cast<uint64_t>(data_) + offset; }

   private:
    uint64_t bytes_;
    char* data_;
};

}  // namespace

TEST_CASE("reachable: memory of any kind that may be written") {
    for (uint64_t bytes : {kPage, 64 * kPage, uint64_t{256} << 20}) {
        CAPTURE(bytes);
        Pages pages(bytes);
        CHECK_FALSE(find_unreachable(pages.at(), bytes));
        CHECK_FALSE(find_unreachable(pages.at(17), bytes - 17));
        CHECK_FALSE(find_unreachable(pages.at(bytes - 1), 1));
        // Several mappings side by side are one range.
        REQUIRE(::madvise(pages.data() + bytes / 2 / kPage * kPage, kPage, MADV_DONTFORK) == 0);
        CHECK_FALSE(find_unreachable(pages.at(), bytes));
    }
    std::string text(100, 'x');
    CHECK_FALSE(find_unreachable(reinterpret_cast<uint64_t>(text.data()), text.size()));
    CHECK(text == std::string(100, 'x'));
    char here = 'x';
    CHECK_FALSE(find_unreachable(reinterpret_cast<uint64_t>(&here), 1));
    Fd fd(::memfd_create("reachable", MFD_CLOEXEC));
    REQUIRE(::ftruncate(fd.get(), 64 * kPage) == 0);
    Pages shared(64 * kPage, PROT_READ | PROT_WRITE, fd.get());
    CHECK_FALSE(find_unreachable(shared.at(), 64 * kPage));
}

TEST_CASE("reachable: a range of which one page may not be touched is found out, and where") {
    for (uint64_t bytes : {4 * kPage, uint64_t{64} << 20}) {
        for (uint64_t hole : {uint64_t{0}, bytes / 2, bytes - kPage}) {
            CAPTURE(bytes);
            CAPTURE(hole);
            auto found = [&](int protection) {
                Pages pages(bytes);
                if (protection < 0) {
                    REQUIRE(::munmap(pages.data() + hole, kPage) == 0);
                } else {
                    REQUIRE(::mprotect(pages.data() + hole, kPage, protection) == 0);
                }
                std::optional<Unreachable> place = find_unreachable(pages.at(), bytes);
                REQUIRE(place);
                CHECK(place->address == pages.at(hole));
                if (hole != 0) CHECK_FALSE(find_unreachable(pages.at(), hole));
                std::string why = place->why;
                if (protection < 0) {  // so that ~Pages unmaps nobody else's
                    REQUIRE(::mmap(pages.data() + hole, kPage, PROT_NONE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
                }
                return why;
            };
            CHECK(found(PROT_NONE).find("without access") != std::string::npos);
            CHECK(found(PROT_READ).find("read-only") != std::string::npos);
            CHECK(found(-1).find("nothing is mapped") != std::string::npos);
        }
    }
}

TEST_CASE("reachable: addresses that no process has, and the end of a file") {
    CHECK(find_unreachable(16, 1));
    CHECK(find_unreachable(0xffff800000000000, 4096));
    CHECK(find_unreachable(UINT64_MAX - 4096, 4096));
    std::optional<Unreachable> place = find_unreachable(17, 100);
    REQUIRE(place);
    CHECK(place->address == 17);
    Fd fd(::memfd_create("reachable", MFD_CLOEXEC));
    for (uint64_t bytes : {8 * kPage, uint64_t{64} << 20}) {
        REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes / 2)) == 0);
        Pages pages(bytes, PROT_READ | PROT_WRITE, fd.get());
        CHECK_FALSE(find_unreachable(pages.at(), bytes / 2));
        CHECK(find_unreachable(pages.at(), bytes));
    }
}
