// Nodes: two engines that have several transports, and transfers between them that are checked on both sides.
#pragma once

#include "bed.hpp"

namespace moonpool::testing {

inline constexpr size_t kMiB = 1u << 20;

// What an engine with these options says of that transport; empty: it works.
inline std::string why_not(const EngineOptions& options, const std::string& transport) {
    std::shared_ptr<Engine> engine = make_engine(options);
    for (auto& [name, why] : engine->transports()) {
        if (name == transport) return why;
    }
    return "not in the registry";
}

// Two engines of which the first has these transports, each with memory of random bytes.
struct Nodes {
    explicit Nodes(std::vector<std::string> transports, size_t size = 4 * kMiB,
                   const std::function<void(EngineOptions&)>& change = nullptr)
        : pair(options("here", transports, change), options("there", {}, change)),
          mine(*pair.here, size, MemoryKind::kHost),
          theirs(*pair.there, size, MemoryKind::kHostArena) {
        Random random(901);
        mine.fill(random);
        theirs.fill(random);
    }
    static EngineOptions options(const char* name, const std::vector<std::string>& transports,
                                 const std::function<void(EngineOptions&)>& change) {
        EngineOptions made = engine_options(name, "");
        if (!transports.empty()) made.transports = transports;
        if (change) change(made);
        return made;
    }
    uint64_t moved_by(const std::string& transport) {
        return metric(*pair.here, transport + "_write_bytes_total") +
               metric(*pair.here, transport + "_read_bytes_total");
    }
    // The memory has its keys: what comes goes by that transport.
    void warm_up(const std::string& transport) {
        for (size_t at = 0; at < mine.size(); at += kMiB) {
            for (uint64_t before = moved_by(transport); moved_by(transport) == before;) {
                REQUIRE(
                    pair.transfer({{mine.address() + at, theirs.address() + at, 1, Direction::kRead}}).ok());
            }
        }
    }
    // Writes to the first half and reads to the second, and what both sides have afterwards.
    void check_transfer(Random& random) {
        size_t half = mine.size() / 2;
        std::vector<std::byte> a = mine.bytes(), b = theirs.bytes();
        std::vector<Slice> slices;
        for (size_t at = 0; at < half;) {
            size_t n = std::min<size_t>(half - at,
                                        random.one_in(3) ? random.between(1, kMiB) : random.between(1, 5000));
            bool write = random.one_in(2);
            size_t from = at + (write ? 0 : half);
            slices.push_back({mine.address() + from, theirs.address() + from, n,
                              write ? Direction::kWrite : Direction::kRead});
            std::memcpy(write ? &b[from] : &a[from], write ? &a[from] : &b[from], n);
            at += n;
        }
        Result<uint64_t> moved = pair.transfer(slices);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        REQUIRE(mine.bytes() == a);
        REQUIRE(theirs.bytes() == b);
    }

    Pair pair;
    Memory mine, theirs;
};

}  // namespace moonpool::testing
