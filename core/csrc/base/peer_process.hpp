// The process at the other end of a Unix socket: the one that connected it, or that listened where it
// connected.
#pragma once

#include <sys/types.h>

#include "base/fd.hpp"

namespace moonpool {

// As the kernel names it here; 0: it is not in this pid namespace.
pid_t pid_behind(int socket);

// It runs as our user, or as root: so may read our memory.
bool is_same_user(int socket);

// A pidfd, also of a process of another pid namespace; none where the kernel gives none. Before Linux 6.5 it
// is found by its id, which a process that has ended leaves to another one: a caller that has to be sure
// looks afterwards whether the socket is still connected.
Fd process_behind(int socket);

// process: a valid pidfd.
bool has_ended(const Fd& process);

}  // namespace moonpool
