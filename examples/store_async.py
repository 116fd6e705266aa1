"""The same verbs for asyncio: operations run on a C++ thread, the event loop never blocks.

Needs a node on this host: `moonpool node --dram 1GiB`
"""

from __future__ import annotations

import asyncio

from moonpool import AsyncStore


async def main() -> None:
    async with AsyncStore(namespace="example-async") as store:
        names = [f"block/{number}" for number in range(100)]

        # Several calls at a time, each with its own list.
        await asyncio.gather(
            store.put(names[:50], [name.encode() for name in names[:50]]),
            store.put(names[50:], [name.encode() for name in names[50:]]),
        )
        views = await store.get(names)
        print(
            "all there:",
            all(
                view is not None and bytes(view) == name.encode()
                for name, view in zip(names, views, strict=True)
            ),
        )

        prefix = await store.longest_prefix([*names, "block/100"])
        print("longest prefix:", prefix.blocks)
        if prefix.pin is not None:
            store.release(prefix.pin)

        print("removed:", sum(await store.remove(names)))


if __name__ == "__main__":
    asyncio.run(main())
