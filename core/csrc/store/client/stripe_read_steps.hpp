// StripeReadSteps: how a client reads a striped object whose manifest it has found, as a state machine:
// answers in, questions out. It has no socket, thread or clock: Client drives it over its connections, and
// the simulator of tests/sim over a simulated network.
//
//   kStripes or kWhole --read--> kDone
//       \--a part is missing--> kSuccessor --another object--> kStripes or kWhole
//                                     \--the same--> kLost --found after all--> kStripes
//                                                       \--lost--> kOther --another object--> kStripes or
//                                                       kWhole
//                                     \--a miss--> kFreeOrphans --> kDone
//
// A stripe that is not found was replaced with its object, is lost, or is one of which the directory has not
// heard yet. So the reader looks under the key again, and at every node when the manifest is still the same.
// Whatever it reads next it reads from the first byte on: parts of two objects never meet.
#pragma once

#include <cstdint>

#include "directory/types.hpp"
#include "store/client/standing.hpp"

namespace moonpool {

class StripeReadSteps {
   public:
    enum class Wants : uint8_t { kStripes, kWhole, kSuccessor, kLost, kOther, kFreeOrphans, kDone };

    explicit StripeReadSteps(const Manifest& manifest);

    Wants wants() const { return wants_; }
    // What is read now, or was read last.
    const Standing& now() const { return now_; }

    // kStripes: memory for manifest().size bytes, and each stripe read to its part of it, if it is
    // within_limits(). all: each had its size.
    const Manifest& manifest() const { return *now_.manifest; }
    void stripes_read(bool all);
    // kWhole: an object that lies whole at a node took the place of the striped one: memory for now().size
    // bytes. all: it was read, fits in there, and is no manifest.
    void whole_read(int64_t size, bool all);
    // kSuccessor: what lies under the key now; a replacement may be under way, of which it is a miss for a
    // moment. kOther: the same, without that.
    void standing(const Standing& next);
    // kLost: what became of the object that lacks a stripe (LostStripeSteps).
    void settled(Presence is);
    // kFreeOrphans: manifest() is no more: unless it is at a node, its stripes are removed.
    void freed() { end(kMiss); }

    // kDone: of the object that was read, or kMiss.
    int64_t size() const { return size_; }

   private:
    void read(const Standing& next);
    void end(int64_t size);

    Standing now_;
    Wants wants_ = Wants::kStripes;
    bool settled_ = false;
    int rounds_ = 0;
    int64_t size_ = kMiss;
};

}  // namespace moonpool
