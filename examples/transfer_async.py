"""The transfer engine with asyncio: many transfers at a time on one thread, and messages that are awaited.

Both engines live in this process here, so that the example needs nothing else; in two processes, or on two
hosts, the calls are the same.
"""

from __future__ import annotations

import asyncio

from moonpool import AsyncTransferEngine, Batch, Priority

BLOCK = 4096
BLOCKS = 256


async def main() -> None:
    async with AsyncTransferEngine("left") as left, AsyncTransferEngine("right") as right:
        here = await left.register(bytearray(BLOCKS * BLOCK))  # any writable memory; here a bytearray
        there = await right.allocate(BLOCKS * BLOCK)
        there.view[:] = bytes(number % 251 for number in range(BLOCKS)) * BLOCK
        peer = await left.open(right.addresses[0])

        # 256 reads at a time, each awaited by a task of its own.
        sizes = await asyncio.gather(
            *(
                left.read(peer, here.at(block * BLOCK), peer.at(block * BLOCK), BLOCK)
                for block in range(BLOCKS)
            )
        )
        print("read", sum(sizes), "bytes; equal:", here.view == there.view)

        # One large transfer in the background, and a message for the peer when its bytes are there.
        addresses = range(0, BLOCKS * BLOCK, BLOCK)
        transfer = left.submit(
            Batch("write", peer, [here.at(at) for at in addresses], [peer.at(at) for at in addresses], BLOCK),
            priority=Priority.BACKGROUND,
            notify=b"all blocks",
        )
        (news,) = await right.notifications(timeout_s=10)
        print(f"{news.peer}: {news.message.decode()}; moved {await transfer} bytes")


if __name__ == "__main__":
    asyncio.run(main())
