"""In the virtual machine, with /dev/nvme0n1 over the file given by the transport given (guest.sh): the
block device as a segment."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from moonpool import Batch, TransferEngine

DEVICE = "/dev/nvme0n1"
SIZE = 8 << 20
STEP = 256 << 10


def main() -> None:
    backing, transport = Path(sys.argv[1]), sys.argv[2]
    assert Path("/sys/class/nvme/nvme0/transport").read_text().strip() == transport
    source = random.Random(9)
    with TransferEngine("here", token=b"of this test", timeout_s=60) as engine:
        segment = engine.open_file(DEVICE)
        ours = engine.allocate(SIZE)
        ours.view[:] = data = source.randbytes(SIZE)
        places = list(range(0, SIZE, STEP))
        source.shuffle(places)
        batch = Batch(
            "write", segment, [ours.at(at) for at in places], [segment.at(at) for at in places], STEP
        )
        assert engine.transfer(batch) == SIZE
        ours.view[:] = bytes(SIZE)
        engine.read(segment, ours, segment.at(0))
        assert ours.view == data
        # Ranges that are no multiples of a block.
        for _ in range(20):
            at, length = source.randrange(SIZE - 10000), source.randrange(1, 10000)
            piece = source.randbytes(length)
            ours.view[at : at + length] = piece
            engine.write(segment, ours.at(at), segment.at(at), length)
            data = data[:at] + piece + data[at + length :]
        ours.view[:] = bytes(SIZE)
        engine.read(segment, ours, segment.at(0))
        assert ours.view == data
        print({name: value for name, value in engine.metrics().items() if name.startswith("file")})
    with open(backing, "rb") as file:
        assert file.read(SIZE) == data, "the target's file has other bytes"
    print(f"all bytes went by NVMe over {transport}")


if __name__ == "__main__":
    main()
