// Fork safety: a handle remembers in which process it was made; in a child of fork() it refuses, and its destructor
// leaves the shared socket alone.
#pragma once

#include <cstdint>

namespace moonpool {

uint64_t fork_generation();  // changes in the child of every fork()

class ForkGuard {
   public:
    bool in_child() const { return generation_ != fork_generation(); }

   private:
    uint64_t generation_ = fork_generation();
};

}  // namespace moonpool
