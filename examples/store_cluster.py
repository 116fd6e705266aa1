"""One pool over several nodes: what one stores, the others find.

Needs two nodes and a master on this host: `moonpool up --nodes 2`. On several hosts each program would say no
more than Store(), which takes the node of its own host.
"""

from __future__ import annotations

import time

from moonpool import Store
from moonpool.core.config.paths import node_socket

DEADLINE_S = 5.0


def main() -> None:
    names = ["0", "1"]  # what `up --nodes 2` calls them
    spaces = [Store(str(node_socket(name)), namespace="example-cluster") for name in names]
    with spaces[0] as here, spaces[1] as there:
        # A put stays in the own node: nobody else is asked. Others hear of it some milliseconds later.
        here.put(["block/0", "block/1"], [b"zero", b"one"])
        # Copies go to other hosts first, then to other nodes of this one. Where there are fewer than asked
        # for, the answer says why.
        copied = here.put("block/2", b"two", replicas=2)
        print("copies:", copied.replicas, "of 2", copied.reason)
        deadline_s = time.monotonic() + DEADLINE_S
        while there.get(["block/0", "block/1"]).count(None) and time.monotonic() < deadline_s:
            time.sleep(0.01)

        # The rest is as with one node: a get goes to whichever node is nearest.
        print("get:", [view and bytes(view) for view in there.get(["block/0", "block/2", "block/9"])])
        prefix = there.longest_prefix(["block/0", "block/1", "block/2", "block/3"])
        print("longest prefix:", prefix.blocks, "blocks from nodes", *sorted(set(prefix.holders)))
        if prefix.pin is not None:
            prefix.pin.release()

        print("removed:", there.remove(["block/0", "block/1", "block/2"]))
        print("still here:", here.get("block/1") is not None)


if __name__ == "__main__":
    main()
