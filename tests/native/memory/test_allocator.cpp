// ExtentAllocator against a slow model: one flag for each byte.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "../random.hpp"
#include "memory/allocator.hpp"

using namespace moonpool;
using moonpool::testing::Random;

namespace {

// Knows which bytes are taken, nothing else.
class Model {
   public:
    void grow(uint64_t bytes) { taken_.resize(taken_.size() + bytes, false); }
    void take(Extent e) { set(e, true); }
    void free(Extent e) { set(e, false); }

    uint64_t free_bytes() const {
        return static_cast<uint64_t>(std::count(taken_.begin(), taken_.end(), false));
    }
    // The longest run of free bytes that starts and ends on a multiple of align.
    uint64_t longest(uint64_t align) const {
        uint64_t best = 0, begin = 0;
        for (uint64_t i = 0; i <= taken_.size(); ++i) {
            if (i < taken_.size() && !taken_[i]) continue;
            uint64_t from = (begin + align - 1) / align * align, to = i / align * align;
            best = std::max(best, to > from ? to - from : 0);
            begin = i + 1;
        }
        return best;
    }
    uint64_t runs() const {
        uint64_t n = 0;
        for (size_t i = 0; i < taken_.size(); ++i) n += !taken_[i] && (i == 0 || taken_[i - 1]);
        return n;
    }

   private:
    void set(Extent e, bool value) {
        REQUIRE(e.end() <= taken_.size());
        for (uint64_t i = e.offset; i < e.end(); ++i) {
            REQUIRE(taken_[i] != value);  // granted twice, or freed twice
            taken_[i] = value;
        }
    }
    std::vector<bool> taken_;
};

void check_same(const ExtentAllocator& allocator, const Model& model) {
    REQUIRE(allocator.check_integrity());
    REQUIRE(allocator.free_bytes() == model.free_bytes());
    REQUIRE(allocator.largest() == model.longest(1));
    REQUIRE(allocator.extents() == model.runs());
}

// What allocate() promises, whatever it chose. `exact`: alignment cannot hide an extent that fits.
void check_grant(const std::optional<Extent>& grant, const Model& before, uint64_t min, uint64_t want,
                 uint64_t align) {
    uint64_t least = (std::max<uint64_t>(min, 1) + align - 1) / align * align;
    uint64_t most = std::max((want + align - 1) / align * align, least);
    uint64_t possible = before.longest(align);
    if (!grant) {
        if (align == 1) REQUIRE(possible < least);
        return;
    }
    REQUIRE(grant->offset % align == 0);
    REQUIRE(grant->size % align == 0);
    REQUIRE(grant->size >= least);
    REQUIRE(grant->size <= most);
    if (align == 1) REQUIRE(grant->size == std::min(most, possible));
}

}  // namespace

TEST_CASE("allocator: random allocations and frees, in pieces and in any order, agree with the model") {
    for (uint64_t align : {1, 4, 16}) {
        Random random(align);
        ExtentAllocator allocator;
        Model model;
        std::vector<Extent> held;
        for (int step = 0; step < 3000; ++step) {
            uint64_t verb = random.below(10);
            if (step == 0 || (verb == 0 && allocator.capacity() < 2048)) {
                uint64_t bytes = random.below(300);
                allocator.grow(bytes);
                model.grow(bytes);
            } else if (verb < 5) {
                uint64_t min = random.below(40), want = random.below(80);
                std::optional<Extent> grant = allocator.allocate(min, want, align);
                check_grant(grant, model, min, want, align);
                if (grant) {
                    model.take(*grant);
                    held.push_back(*grant);
                }
            } else if (!held.empty()) {
                std::swap(held[random.below(held.size())], held.back());
                Extent e = held.back();
                held.pop_back();
                uint64_t cut = random.one_in(2) ? random.below(e.size) : 0;  // a piece of it, from either end
                Extent piece =
                    random.one_in(2) ? Extent{e.offset, e.size - cut} : Extent{e.offset + cut, e.size - cut};
                Extent rest = piece.offset == e.offset ? Extent{piece.end(), cut} : Extent{e.offset, cut};
                allocator.free(piece);
                model.free(piece);
                if (rest.size != 0) held.push_back(rest);
            }
            check_same(allocator, model);
        }
        for (Extent e : held) {
            allocator.free(e);
            model.free(e);
        }
        check_same(allocator, model);
        CHECK(allocator.free_bytes() == allocator.capacity());
        CHECK(allocator.extents() == 1);  // all neighbours were joined
    }
}

TEST_CASE("allocator: every state of eight bytes and every request") {
    for (unsigned state = 0; state < 256; ++state) {
        for (uint64_t align : {1, 2, 4}) {
            for (uint64_t min = 0; min <= 9; ++min) {
                for (uint64_t want = 0; want <= 9; ++want) {
                    ExtentAllocator allocator;
                    Model model;
                    allocator.grow(8);
                    model.grow(8);
                    Extent all = *allocator.allocate(8, 8, 1);
                    REQUIRE(all == Extent{0, 8});
                    model.take(all);
                    for (uint64_t byte = 0; byte < 8; ++byte) {
                        if ((state >> byte & 1) == 0) continue;
                        allocator.free(Extent{byte, 1});
                        model.free(Extent{byte, 1});
                    }
                    std::optional<Extent> grant = allocator.allocate(min, want, align);
                    check_grant(grant, model, min, want, align);
                    // With at most four extents nothing is hidden from a bounded search.
                    uint64_t least = (std::max<uint64_t>(min, 1) + align - 1) / align * align;
                    REQUIRE(grant.has_value() == (model.longest(align) >= least));
                    if (grant) model.take(*grant);
                    REQUIRE(allocator.check_integrity());
                    REQUIRE(allocator.free_bytes() == model.free_bytes());
                }
            }
        }
    }
}

TEST_CASE("allocator: the best fit leaves large extents whole") {
    ExtentAllocator allocator;
    allocator.grow(1000);
    Extent all = *allocator.allocate(1000, 1000, 1);
    allocator.free({100, 50});
    allocator.free({300, 20});
    allocator.free({500, 400});
    CHECK(*allocator.allocate(20, 20, 1) == Extent{300, 20});
    CHECK(*allocator.allocate(30, 30, 1) == Extent{100, 30});
    CHECK(*allocator.allocate(10, 1000, 1) == Extent{500, 400});  // nothing fits: the largest
    CHECK_FALSE(allocator.allocate(21, 21, 1));
    CHECK(all.size == 1000);
}
