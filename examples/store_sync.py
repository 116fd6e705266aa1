"""The store, from synchronous code: put, get, exists, remove, and the longest stored prefix of a chain.

Needs a node on this host: `moonpool node --dram 1GiB`
"""

from __future__ import annotations

from moonpool import Presence, Store


def main() -> None:
    with Store(namespace="example-sync") as store:
        # One key, or a list of keys: the answer has the same shape. Keys are bytes; a str is its UTF-8.
        results = store.put(["block/0", "block/1", "block/2"], [b"zero", b"one", b"two"])
        print("put:", [result.status.value for result in results])

        # Objects never change: a second put of the same key leaves the old bytes, and says so.
        print("put again:", store.put("block/0", b"something else").status.value)

        # A get gives read-only views of the pool's own memory, or copies into a buffer of yours. A miss is
        # None.
        views = store.get(["block/1", "block/9"])
        print("get:", [None if view is None else bytes(view) for view in views])
        buffer = bytearray(16)
        size = store.get("block/2", buffer)
        print("get into a buffer:", size, "bytes:", bytes(buffer[: size or 0]))

        print("exists:", store.exists("block/2") is Presence.HIT)

        # One question for a whole chain: how many leading blocks are here? They stay until the pin is
        # released.
        prefix = store.longest_prefix(["block/0", "block/1", "block/2", "block/3"])
        print("longest prefix:", prefix.blocks, "blocks from", set(prefix.tiers))
        if prefix.pin is not None:
            prefix.pin.release()

        print("removed:", store.remove(["block/0", "block/1", "block/2"]))


if __name__ == "__main__":
    main()
