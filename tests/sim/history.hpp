// History: what clients asked and were told, and the checker of it.
//
// Each key is a register of which every write has a value of its own. A read returns the last acknowledged
// value, one whose write is concurrent with it, or a miss. So there is an order of the values in which each
// follows the ones that ended before it began, and a removal is a value of its own that no read returns.
// For one register with such writes it is enough to compare pairs of values: with all operations of a value
// (its write, its reads) taken together, a comes before b if an operation of a ended before one of b began;
// two values that each come before the other have no order (P. Gibbons, E. Korach: Testing shared memories).
// The register is regular, not atomic: while a write is under way one read may return its value, and a later
// one that before it. So of b only the end of its acknowledged write puts it before a read of a.
//
// Keys that are put without replace have the same bytes from every writer, so two such values need no order:
// only a removal counts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "world.hpp"

namespace moonpool::sim {

// In which a node that was taken for silent joins again, tells what it holds and hears what to drop.
inline constexpr Micros kRejoin = 500 * kMs;

struct Operation {
    // kExists: whether a striped object is there as a whole; value: 1 it is, 0 it is not.
    // kUnique: a put that the pool refuses where a node has the key.
    enum Kind : uint8_t { kPut, kReplace, kGet, kRemove, kPin, kUnique, kExists };
    // Of a write: kDone means acknowledged, kNothing that nothing was changed (the key had bytes before),
    // kUnknown that it may have been carried out or not, kPartly that it was, and that nodes which were away
    // may have what it removes until they are back. Of a read: a value, a miss, or no answer.
    enum Outcome : uint8_t { kOpen, kDone, kNothing, kUnknown, kPartly };
    Kind kind = kGet;
    Outcome outcome = kOpen;
    uint32_t client = 0, key = 0;
    uint64_t value = 0;  // written or read; 0: a miss
    Micros begin = 0, end = 0;
    std::optional<uint32_t> from{};  // of a read: the host whose node had the value
    bool alone = false;    // of a write: one node at most knows of it, as no other that is in touch answers
    bool left = false;     // of a write: stripes may stay that no client could remove
    uint64_t version = 0;  // of a write: its place in the master's order
    // Of a write: from then on no process that runs knows of it.
    Micros forgotten_at = UINT64_MAX;
    bool away = false;  // the node of its host, or the one that was read, was out of touch with the master
};

std::string to_text(const Operation& operation);

// What is wrong: a sentence, and the key where it is about one.
struct Finding {
    enum Kind : uint8_t { kRemovedValue, kOldValue, kOtherBytes, kPinLost, kBooks, kNoEnd };
    Kind kind = kBooks;
    std::string text;
    std::optional<uint32_t> key{};
    bool for_ever = false;  // it was read still when everything had been healed for a while
};

// healed: reads that begin later are of a cluster in which everything is well again. nothing_is_lost: no copy
// ends but by a removal, so of unique puts one alone stores its value, and one of an absent key does.
std::optional<Finding> check(const std::vector<Operation>& history, Micros healed,
                             bool nothing_is_lost = false);

}  // namespace moonpool::sim
