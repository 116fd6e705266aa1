"""Other processes for the tests of the store: ``store_puppet.py VERB ARGUMENTS``. Each says on stdout what it
did, one JSON value a line, and ends when its stdin does, unless it was killed before."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from typing import Any

from moonpool import Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import Timeout, Unavailable
from moonpool.core.store.types import PutStatus


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def node(socket_path: str, token: str, options: str) -> None:
    """A node; each line on stdin asks for its metrics."""
    given = {"tenants": [["default", 64 << 20]]} | json.loads(options)
    tenants = [(name, size) for name, size in given.pop("tenants")]
    changed = {name: given.pop(name) for name in _native.Server.setting_names() if name in given}
    server = _native.Server(socket_path, tenants, token.encode(), node_settings(**changed), **given)
    server.start()
    say("ready")
    for _ in sys.stdin:
        say(server.metrics() | {"integrity": server.check_integrity()})
    server.stop()


def writer(socket_path: str, token: str, size: str) -> None:
    """Puts objects of that size for ever: only a kill ends it."""
    store = Store(socket_path, token=token.encode())
    data = bytes(int(size))
    say("ready")
    for i in range(1 << 60):
        store.put(f"writer-{i % 4}", data, replace=True)


def holder(socket_path: str, token: str, prefix: str, n: str) -> None:
    """Pins objects by name and as views, and holds them."""
    store = Store(socket_path, token=token.encode())
    names = [f"{prefix}{i}" for i in range(int(n))]
    views = store.get(names)
    pinned = store.longest_prefix(names)
    say([sum(view is not None for view in views), pinned.blocks])
    sys.stdin.read()


def traffic(socket_path: str, token: str, size: str) -> None:
    """Puts and gets until told to stop; counts outcomes and times, and lets no exception pass but the two of
    a lost node."""
    store = Store(socket_path, token=token.encode())
    into, data = bytearray(int(size)), os.urandom(int(size))
    counts = {"done": 0, "lost": 0, "missed": 0, "longest_s": 0.0, "recovered": 0}
    say("ready")
    lost = False
    os.set_blocking(0, False)
    i = 0
    while sys.stdin.read(1) == "":
        i += 1
        began = time.monotonic()
        try:
            if i % 2:
                store.put(f"traffic-{i % 64}", data, replace=True)
            else:
                n = store.get(f"traffic-{(i - 1) % 64}", into)
                assert n is None or into == data
                counts["missed"] += n is None
            counts["done"] += 1
            counts["recovered"] += lost
            if lost:
                say("recovered")
            lost = False
        except (Unavailable, Timeout):
            counts["lost"] += 1
            if not lost:
                say("lost")
            lost = True
        counts["longest_s"] = max(counts["longest_s"], time.monotonic() - began)
    say(counts)


STAMP = 16  # bytes: writer u64, number u32, key u32


def stamped(key: int, stamp: int, size: int) -> bytes:
    """Content that names itself everywhere: any torn or foreign byte shows."""
    word = key.to_bytes(4, "little") + (stamp & 0xFFFFFFFF).to_bytes(4, "little") + size.to_bytes(4, "little")
    return (word + zlib.crc32(word).to_bytes(4, "little")) * (size // STAMP)


def check_stamped(key: int, data: bytes | bytearray | memoryview) -> None:
    whole = bytes(data)
    word = whole[:STAMP]
    assert int.from_bytes(word[:4], "little") == key, "another key's bytes"
    assert int.from_bytes(word[8:12], "little") == len(whole), "another object's length"
    assert zlib.crc32(word[:12]) == int.from_bytes(word[12:], "little"), "a torn stamp"
    assert whole == word * (len(whole) // STAMP), "a torn object"


def rewriter(socket_path: str, token: str, size: str) -> None:
    """Replaces one large object for ever, each time with other content."""
    store = Store(socket_path, token=token.encode())
    for stamp in range(1 << 60):
        store.put("large", stamped(0, stamp, int(size)), replace=True)
        if stamp == 0:
            say("ready")


def hammer(socket_path: str, token: str, seed: str, operations: str, keys: str) -> None:
    """Random puts, replaces, reads, pins and removes of few keys that all processes share."""
    rng = random.Random(int(seed))
    store = Store(socket_path, token=token.encode(), timeout_s=10)
    counts = dict.fromkeys(("put", "exists", "refused", "hit", "miss", "view", "removed", "prefix"), 0)
    into = bytearray(65536)
    held: list[tuple[int, memoryview]] = []
    names = [f"h{key}" for key in range(int(keys))]
    for i in range(int(operations)):
        key = rng.randrange(len(names))
        name = names[key]
        verb = rng.random()
        if verb < 0.30:
            size = rng.choice((16, 64, 1024, 4096, 16384, 65536))
            data = stamped(key, (int(seed) << 20) ^ i, size)
            result = store.put(name, data, replace=verb < 0.25, ack=verb < 0.28)
            counts[
                {PutStatus.STORED: "put", PutStatus.EXISTS: "exists", PutStatus.REFUSED: "refused"}[
                    result.status
                ]
            ] += 1
        elif verb < 0.80:
            size = store.get(name, into)
            if size is None:
                counts["miss"] += 1
            else:
                check_stamped(key, memoryview(into)[:size])
                counts["hit"] += 1
        elif verb < 0.95:
            view = store.get(name)
            if view is not None:
                check_stamped(key, view)
                held.append((key, view))
                counts["view"] += 1
            if len(held) > 8:
                old_key, old = held.pop(rng.randrange(len(held)))
                check_stamped(old_key, old)  # as when it was pinned, whatever happened to the key since
        elif verb < 0.98:
            first = rng.randrange(len(names) - 4)
            chain = names[first : first + 4]
            with_pin = store.longest_prefix(chain)
            for offset, view in enumerate(
                store.get(chain[: with_pin.blocks], pin=with_pin.pin) if with_pin.blocks else []
            ):
                assert view is not None
                check_stamped(first + offset, view)
            counts["prefix"] += 1
        else:
            counts["removed"] += store.remove(name)
    for key, view in held:
        check_stamped(key, view)
    say(counts)
    held.clear()
    sys.stdin.read()


if __name__ == "__main__":
    {f.__name__: f for f in (node, writer, holder, traffic, rewriter, hammer)}[sys.argv[1]](*sys.argv[2:])
