// Fork safety: a handle remembers in which process it was made; in a child of fork() it refuses, and its
// destructor leaves shared things alone. Its sockets are closed in the child at once: a connection must end
// with the process that opened it, not when the last of its children has gone.
#pragma once

#include <cstdint>

#include "base/fd.hpp"

namespace moonpool {

uint64_t fork_generation();  // changes in the child of every fork()

class ForkGuard {
   public:
    bool in_child() const { return generation_ != fork_generation(); }

   private:
    uint64_t generation_ = fork_generation();
};

// From construction to destruction, `fd` is closed in every child of this process.
class ClosedInChildren {
   public:
    explicit ClosedInChildren(Fd& fd);
    ~ClosedInChildren();
    ClosedInChildren(const ClosedInChildren&) = delete;

   private:
    Fd* fd_;
};

}  // namespace moonpool
