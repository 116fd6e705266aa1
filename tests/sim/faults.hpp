// Planted: mistakes that a test plants into the simulated processes, to see that the checker finds them.
#pragma once

namespace moonpool::sim {

struct Planted {
    bool drop_lost = false;      // a node confirms a drop that it has not carried out
    bool pin_lost = false;       // a node answers that it has pinned, and has not
    bool unpin_lost = false;     // a node keeps a pin that was released
    bool removal_lost = false;   // a node says that it has removed a key, and has not
    bool replace_lost = false;   // a node says that it has replaced an object, and keeps the old one
    bool rows_lost = false;      // a node tells its inventory, and not what changes
    bool all_told = false;       // a client says of all holders that they know of a removal
    bool handover_lost = false;  // nodes tell a new master of no removals
    bool standby_late = false;   // an owner acknowledges before its standby has heard
    bool older_taken = false;    // a node puts an object that is older than a removal it was told
    bool put_anew = false;       // each attempt of a put comes after the removals known by then
    bool one_told = false;       // a client tells no second node of a removal
    // A disk has what it was told up to which removal it is right before it has what goes with it.
    bool applied_early = false;
    // A disk has the log's tail, and its removals, before the copies and objects that they vouch for.
    bool tail_early = false;
    bool write_survives = false;          // a removal leaves what is being written to the disk
    bool unique_believes_itself = false;  // a client puts what the master says another node has
    bool term_ignored = false;            // a former owner goes on when another one has taken over
    // Of several ranges: some clients ask the next range's master, which takes each key;
    bool two_ranges = false;
    bool versions_mixed = false;  // and a put comes after the removals of all ranges
    // Of striped objects: a reader that is overtaken keeps stripes of the object before;
    bool stripes_mixed = false;
    bool stripes_left = false;  // a client that finds a stripe lost does not free what is left of the object
    bool stripes_unpinned = false;   // a pin pins only the first stripe
    bool stripes_unasked = false;    // a client says of an object that it is there when its manifest is
    bool stripes_overtaken = false;  // a replacement that was overtaken leaves its stripes
    bool stripes_later = false;      // a replacement frees the stripes of a later one
    bool stripes_unremoved = false;  // a removal does not remove the stripes
};

}  // namespace moonpool::sim
