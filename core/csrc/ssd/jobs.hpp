// What is on its way to or from a log's disk: one write or one read, from its submission to its callback.
#pragma once

#include <memory>
#include <unordered_map>

#include "ssd/index.hpp"
#include "ssd/log.hpp"

namespace moonpool::ssd {

struct WriteJob {
    enum class Kind : uint8_t { kObject, kCopy, kRemovals, kSync };
    Kind kind = Kind::kObject;
    uint64_t sequence = 0;
    uint64_t version = 0;
    uint32_t space = 0;
    std::shared_ptr<const std::string> identity;  // of the space
    Hash128 hash;
    std::string name, parent;
    std::vector<std::span<const std::byte>> parts;
    uint64_t size = 0;
    uint32_t crc = 0;
    std::vector<std::byte> own;  // the data, of a copy
    std::vector<uint64_t> removals;
    Place from;                    // of a copy
    uint64_t removals_before = 0;  // of a sync: they are to be written first
    Done done;

    Place place;
    uint32_t ios = 0;         // batches that hold some of it
    bool in_batches = false;  // all of it
    bool failed = false;
};
using WriteJobPtr = std::shared_ptr<WriteJob>;

// A write to the area before the first segment.
struct AreaJob {
    uint64_t offset = 0;  // in the file
    std::shared_ptr<std::byte> memory;
    uint64_t bytes = 0;
    Done done;
};

struct ReadJob {
    uint64_t sequence = 0;
    Hash128 hash;
    Place place;
    uint64_t offset = 0;  // of its data in the file
    std::span<std::byte> to;
    uint32_t crc = 0;
    Done done;

    uint64_t submitted = 0;  // up to here, in the file
    uint64_t consumed = 0;
    uint32_t crc_so_far = 0;
    uint32_t ios = 0;
    int error = 0;
    std::unordered_map<uint64_t, std::pair<std::byte*, uint32_t>> ready;  // by offset, ahead of its turn
};
using ReadJobPtr = std::shared_ptr<ReadJob>;

}  // namespace moonpool::ssd
