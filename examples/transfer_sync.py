"""Moving bytes between two processes: one offers memory, the other reads it, writes to it, and says so.

Nothing else has to run. On two hosts it is the same: let the engine listen on an address that the other host
reaches, with a cluster token on both (MOONPOOL_CLUSTER_TOKEN_FILE), and open that address.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

from moonpool import Batch, Slice, TransferEngine, TransferError

BLOCK = 64 * 1024


def offer(pipe: Connection) -> None:
    """The other process: memory that its engine allocated, and a message it waits for."""
    with TransferEngine("offers") as engine:
        region = engine.allocate(16 * BLOCK)
        for number in range(16):
            region.view[number * BLOCK : (number + 1) * BLOCK] = bytes([number]) * BLOCK
        pipe.send(engine.addresses[0])
        (news,) = engine.notifications(timeout_s=30)
        pipe.send(f"{news.peer} says {news.message.decode()}: {bytes(region.view[:5]).decode()}")
        pipe.recv()  # until the other one is done


def main() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=offer, args=(theirs,))
    process.start()
    try:
        with TransferEngine("takes") as engine:
            region = engine.allocate(16 * BLOCK)
            peer = engine.open(ours.recv())
            print("opened", peer.name, "with", peer.regions[0].length, "bytes over", peer.transport)

            # One range: from the peer's memory at an offset into ours.
            print("read", engine.read(peer, region, peer.at(3 * BLOCK), BLOCK), "bytes of", region.view[0])

            # Many ranges in one call: lists of addresses, one length for all.
            blocks = [0, 5, 7, 15]
            local = [region.at(place * BLOCK) for place in range(len(blocks))]
            remote = [peer.at(block * BLOCK) for block in blocks]
            engine.read(peer, local, remote, BLOCK)
            print("blocks:", [region.view[place * BLOCK] for place in range(len(blocks))])

            # Reads and writes mixed; submit() returns at once, and each slice has a state.
            region.view[:5] = b"hello"
            transfer = engine.submit(
                [
                    Slice("write", peer, region, peer.at(0), 5),
                    Slice("read", peer, region.at(BLOCK), peer.at(9 * BLOCK), BLOCK),
                ],
                notify=b"it is written",  # arrives after the data
            )
            print("moved", transfer.result(), "bytes:", [state.name for state in transfer.slices])
            print(ours.recv())

            # What cannot be done says why, and how far it came.
            try:
                engine.transfer(Batch("read", peer, local[:1], [peer.at(0) + (1 << 40)], BLOCK))
            except TransferError as error:
                print("failed as it should:", error.bytes_done, "of", error.bytes, "bytes done")
            ours.send("done")
    finally:
        process.join(10)


if __name__ == "__main__":
    main()
