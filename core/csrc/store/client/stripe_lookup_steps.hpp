// StripeLookupSteps: whether objects of a manifest's size are there as a whole, as a state machine: answers
// in, questions out. It has no socket, thread or clock: Client drives it over its connections, and the
// simulator of tests/sim over a simulated network.
//
//   kStanding --standing()--> kStripes --stripes()--> kLost --settled()--> kStanding ... kDone
//
// kHit is said of an object when each of its stripes was found at a node a moment ago, and that was a use of
// all of them. The stripes of all objects are asked for together. An object that lacks a stripe twice in a
// row was not replaced meanwhile: then it ends (LostStripeSteps).
//
// StripePinSteps: the same of pins on all stripes of one object.
//
//   kPinStripes --stripes()--> kDone
//       \--one is missing--> kPinKey --key()--> kPinStripes or kLost --settled()--> kPinStripes ... kDone
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "directory/types.hpp"
#include "store/client/standing.hpp"

namespace moonpool {

class StripeLookupSteps {
   public:
    enum class Wants : uint8_t { kStanding, kStripes, kLost, kDone };

    explicit StripeLookupSteps(size_t keys);

    Wants wants() const { return wants_; }

    // kStanding: what lies under these keys.
    const std::vector<size_t>& left() const { return left_; }
    void standing(const Result<std::vector<Standing>>& now);

    // kStripes: whether these are there, which is a use of them.
    const std::vector<std::string>& names() const { return names_; }
    void stripes(const Result<std::vector<Presence>>& present);

    // kLost: keys, and the objects under them that lack a stripe.
    const std::vector<std::pair<size_t, Manifest>>& lost() const { return lost_; }
    void settled(const std::vector<Presence>& present);

    // kDone: of each key.
    const std::vector<Presence>& present() const { return present_; }

   private:
    void next_round();

    Wants wants_ = Wants::kStanding;
    int rounds_ = 0;
    std::vector<Presence> present_;
    std::vector<std::optional<Manifest>> before_;  // what lacked a stripe in the round before
    std::vector<size_t> left_, again_;
    std::vector<std::pair<size_t, Manifest>> objects_, lost_;
    std::vector<std::string> names_;
};

class StripePinSteps {
   public:
    enum class Wants : uint8_t { kPinStripes, kPinKey, kLost, kDone };
    enum class Outcome : uint8_t {
        kPinned,  // manifest() and all its stripes
        kWhole,   // what took the place of the striped object lies whole at a node
        kNot,
        kOvertaken  // it was replaced again and again
    };

    explicit StripePinSteps(const Manifest& manifest) : manifest_(manifest) {}

    Wants wants() const { return wants_; }
    const Manifest& manifest() const { return manifest_; }

    // kPinStripes: pins on all of them, or none. is_known: nothing kept a node from saying what it has.
    void stripes(bool all, bool is_known);
    // kPinKey: what lies under the key now, under a pin of its own, which takes the place of the one before
    // unless it is manifest(). None: a miss.
    void key(const std::optional<Standing>& now);
    // kLost: what became of the object that lacks a stripe.
    void settled(Presence is);

    Outcome outcome() const { return outcome_; }

   private:
    void pin_again();
    void end(Outcome outcome);

    Manifest manifest_;
    Wants wants_ = Wants::kPinStripes;
    Outcome outcome_ = Outcome::kNot;
    bool settled_ = false;
    int rounds_ = 1;
};

}  // namespace moonpool
