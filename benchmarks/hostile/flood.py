"""Opens connections from one address as fast as it can, says nothing on them, and closes the oldest when it
holds 1,000; until SIGTERM, or so many seconds. Prints how many it opened a second.

python -m benchmarks.hostile.flood PORT ADDRESS SECONDS
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections import deque

HELD = 1000
NO_GOODBYE = struct.pack("ii", 1, 0)  # SO_LINGER: a reset, which leaves no port behind
IP_BIND_ADDRESS_NO_PORT = 24


def flood(port: int, address: str, seconds: float) -> float:
    """Connections a second."""
    held: deque[socket.socket] = deque()
    opened = 0
    began_s = time.monotonic()
    while time.monotonic() - began_s < seconds:
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_GOODBYE)
        made.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        try:
            made.bind((address, 0))
            made.connect_ex(("127.0.0.1", port))
            opened += 1
        except OSError:
            made.close()
            continue
        held.append(made)
        if len(held) > HELD:
            held.popleft().close()
    return opened / (time.monotonic() - began_s)


if __name__ == "__main__":
    print(flood(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])), flush=True)
