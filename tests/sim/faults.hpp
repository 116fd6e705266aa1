// Planted: mistakes that a test plants into the simulated processes, to see that the checker finds them.
#pragma once

namespace moonpool::sim {

struct Planted {
    bool drop_lost = false;       // a node confirms a drop that it has not carried out
    bool times_wrong = false;     // the master books members as heard later than they were
    bool pin_lost = false;        // a node answers that it has pinned, and has not
    bool unpin_lost = false;      // a node keeps a pin that was released
    bool removal_lost = false;    // a node says that it has removed a key, and has not
    bool replace_lost = false;    // a node says that it has replaced an object, and keeps the old one
    bool rows_lost = false;       // a node tells its inventory, and not what changes
    bool unreached_lost = false;  // a client does not tell the master which nodes it could not reach
    bool forget_lost = false;     // a client does not tell the master of a removal
};

}  // namespace moonpool::sim
