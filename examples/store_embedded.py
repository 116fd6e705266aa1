"""A pool inside one process: no node to start, nothing left afterwards. For tests and for single programs."""

from __future__ import annotations

from moonpool import Store


def main() -> None:
    with Store(embedded="64MiB") as store:
        size = 1 << 20
        for number in range(100):  # more than fits: the objects that were used longest ago make room
            store.put(f"megabyte/{number}", bytes([number]) * size)
        kept = store.list("megabyte/", limit=1000)
        newest = store.get("megabyte/99")
        assert newest is not None
        print(f"{len(kept)} of 100 objects are still here, the newest among them: {newest[0] == 99}")
        counters = store.stat()
        print(f"evicted: {counters['evicted_total']}, arena: {counters['arena_bytes'] >> 20} MiB")


if __name__ == "__main__":
    main()
