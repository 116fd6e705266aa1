// How the kernel controls the congestion of a TCP connection.
#pragma once

namespace moonpool {

// For connections that carry the bytes of objects, once they have had a round trip. Where the system's choice
// is BBR and the peer is near, this connection gets Reno, which every user may choose: BBR sends at the rate
// that it has measured, by a timer for every few packets, and over a path of tens of microseconds the timers
// cost more CPU than moving the bytes, and are late. (CUBIC's slow start takes the close answers of such a
// path for a full one and ends too early; past it, over so short a path, CUBIC grows as Reno does.) Any other
// choice of the system, and BBR to peers that are farther away, stay.
void leave_bbr_when_near(int fd);

}  // namespace moonpool
