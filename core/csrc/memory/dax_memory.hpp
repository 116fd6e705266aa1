// DaxMemory: a piece of a DAX device, which other processes of this host map, too, each by its own path to
// the device. What is taken stands in the device itself, so that processes need nothing in common but it:
//
//     header: magic, the size of a grain | owner of each grain | nonce of each piece | grains ...
//
// A grain is taken by one atomic exchange of its owner, so no lock is held by a process that dies. An owner
// is a process: its grains are free once it has ended, or the machine has started anew.
//
// That two processes see one device is proved and not believed: the owner writes a random nonce beside its
// piece, and the other reads it through its own mapping.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "memory/dax_device.hpp"
#include "memory/mapping.hpp"

namespace moonpool {

// What a peer needs to map a piece, and to know it for the right one.
struct DaxPlace {
    std::string device;  // "dax0.0"
    uint64_t offset = 0;
    uint64_t nonce = 0;
};

class DaxMemory {
   public:
    // Zeros. kTooLarge: no row of free grains is so long; kInvalidArgument: the device has other data on it.
    static Result<std::unique_ptr<DaxMemory>> create(const DaxDevice& device, uint64_t bytes);
    ~DaxMemory();
    DaxMemory(const DaxMemory&) = delete;

    std::byte* data() const { return mapping_.data() + place_.offset; }
    const DaxPlace& place() const { return place_; }

    // A peer's piece: a view of the device up to its end, in which it begins at place.offset. kUnavailable:
    // the device of that name here is another one.
    static Result<Mapping> map_peers(const DaxPlace& place, uint64_t bytes, const std::string& root = "");

   private:
    explicit DaxMemory(DaxDevice device) : device_(std::move(device)) {}
    const DaxDevice device_;
    DaxPlace place_;
    uint64_t first_ = 0, grains_ = 0;
    Mapping header_;
    Mapping mapping_;  // from the device's beginning; what is before the piece is read-only
};

}  // namespace moonpool
