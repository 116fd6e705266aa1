// Transfers of memory of a card over links that do not reach it: each chunk of a job stops in a slot of
// pinned memory, which the link sees in place of the card's.
//
//     write   card --copy--> slot --link--> peer
//     read    peer --link--> slot --copy--> card
//
// While the link carries one chunk, the card copies the one before (reads) or behind it (writes).
#pragma once

#include "transport/link.hpp"

namespace moonpool::transport {

// As link.run(job), for a job with local regions on cards. May wait for a card.
Status run_staged(Link& link, Job& job);

}  // namespace moonpool::transport
