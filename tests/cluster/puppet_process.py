"""The other end of puppet.py: a process that does what lines of JSON on stdin say and answers each with one.

    {"verb": "put", "names": [...], ...}  ->  {"result": ..., "seconds": ...} or {"error": class, "text": ...}

It ends with its stdin. As a module it has what both ends need: contents().
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from typing import Any


def contents(name: str, version: int, size: int) -> bytes:
    """The bytes of an object: they name it, and differ everywhere from those of another version."""
    unit = random.Random(f"{name}/{version}").randbytes(min(size, 4096) or 1)
    return (unit * (size // len(unit) + 1))[:size]


def checksum(name: str, version: int, size: int) -> int:
    return zlib.crc32(contents(name, version, size))


class Puppet:
    def __init__(self) -> None:
        self.store: Any = None
        self.pins: list[Any] = []
        self.views: list[Any] = []
        self.nodes: list[Any] = []
        self.spent = -1.0  # of the store alone, where the making of the data took time too

    def open(self, **options: Any) -> None:
        from moonpool import Store

        if "token" in options:
            options["token"] = options["token"].encode()
        self.store = Store(**options)

    def close(self) -> None:
        self.store.close()

    def put(self, names: list[str], size: int, version: int, options: Any) -> list[Any]:
        data = [contents(name, version, size) for name in names]
        began = time.monotonic()
        rows = self.store.put(names, data, **options)
        self.spent = time.monotonic() - began
        return [[row.status.value, row.reason, row.replicas] for row in rows]

    def put_for_ever(self, names: list[str], size: int) -> None:
        """Replaces these objects until it is killed."""
        for version in range(1 << 60):
            self.store.put(names, [contents(name, version, size) for name in names], replace=True)

    def put_many(self, prefix: str, n: int, size: int) -> None:
        """n objects of equal content in batches of a thousand."""
        data = bytes(size)
        began = time.monotonic()
        for first in range(0, n, 1000):
            names = [f"{prefix}{i}" for i in range(first, min(n, first + 1000))]
            assert all(self.store.put(names, [data] * len(names)))
        self.spent = time.monotonic() - began

    def be_nodes(self, n: int, address: str, master: str, token: str) -> None:
        """This process is n nodes."""
        from moonpool import _native
        from moonpool.core.config.native_settings import node_settings

        for i in range(n):
            node = _native.Server(
                "",
                [("default", 1 << 20)],
                token.encode(),
                node_settings(),
                name=f"node{i}",
                host_id=f"host{i}",
                listen=[f"{address}:0"],
                master=master,
            )
            node.start()
            self.nodes.append(node)

    def put_on_each(self, names: list[str], size: int) -> None:
        from moonpool import Store

        token = os.environ["MOONPOOL_CLUSTER_TOKEN"].encode()
        for name, node in zip(names, self.nodes, strict=True):
            with Store(f"tcp://{node.addresses[0]}", token=token) as store:
                assert store.put(name, contents(name, 0, size))

    def get(self, names: list[str], size: int | None, options: Any) -> list[Any]:
        if size is None:
            return [shown(view) for view in self.store.get(names, **options)]
        into = [bytearray(size) for _ in names]
        sizes = self.store.get(names, into, **options)
        pairs = zip(sizes, into, strict=True)
        return [None if n is None else shown(memoryview(data)[:n]) for n, data in pairs]

    def get_for(self, names: list[str], size: int, seconds: float) -> dict[str, Any]:
        """Reads one after the other for so long; what came, and the longest wait."""
        counts: dict[str, Any] = {"hit": 0, "miss": 0, "failed": {}, "longest_s": 0.0, "wrong": 0}
        into = bytearray(size)
        end = time.monotonic() + seconds
        i = 0
        while time.monotonic() < end:
            name = names[i % len(names)]
            i += 1
            began = time.monotonic()
            try:
                n = self.store.get(name, into)
                counts["miss" if n is None else "hit"] += 1
                if n is not None and zlib.crc32(into[:n]) != checksum(name, 0, size):
                    counts["wrong"] += 1
            except Exception as error:
                failed = counts["failed"]
                failed[type(error).__name__] = failed.get(type(error).__name__, 0) + 1
            counts["longest_s"] = max(counts["longest_s"], time.monotonic() - began)
        return counts

    def exists(self, names: list[str]) -> list[str]:
        return [presence.value for presence in self.store.exists(names)]

    def longest_prefix(self, names: list[str], options: Any) -> dict[str, Any]:
        prefix = self.store.longest_prefix(names, **options)
        self.pins.append(prefix.pin)
        return {
            "blocks": prefix.blocks,
            "holders": list(prefix.holders),
            "hosts": list(prefix.hosts),
            "tiers": list(prefix.tiers),
            "why": prefix.why,
        }

    def pinned(self, names: list[str]) -> list[Any]:
        return [shown(view) for view in self.store.get(names, pin=self.pins[-1])]

    def release(self) -> None:
        pin = self.pins.pop()
        if pin is not None:
            pin.release()

    def hold(self, names: list[str]) -> int:
        self.views += [view for view in self.store.get(names) if view is not None]
        return len(self.views)

    def held(self) -> list[Any]:
        return [shown(view) for view in self.views]

    def drop(self) -> None:
        self.views.clear()

    def remove(self, names: list[str]) -> list[bool | str]:
        removed = self.store.remove(names)
        return [flag if isinstance(flag, bool) else flag.nodes for flag in removed]

    def list(self, prefix: str) -> list[str]:
        return sorted(entry.key.decode() for entry in self.store.list(prefix))

    def stat(self) -> dict[str, int]:
        return dict(self.store.stat())


def shown(data: Any) -> list[int] | None:
    return None if data is None else [len(data), zlib.crc32(data)]


def main() -> None:
    puppet = Puppet()
    for line in sys.stdin:
        request = json.loads(line)
        verb = getattr(puppet, request.pop("verb"))
        began = time.monotonic()
        puppet.spent = -1.0
        try:
            answer = {"result": verb(**request)}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        spent = puppet.spent if puppet.spent >= 0 else time.monotonic() - began
        print(json.dumps({**answer, "seconds": spent}), flush=True)


if __name__ == "__main__":
    main()
