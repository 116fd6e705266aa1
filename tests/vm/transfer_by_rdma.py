"""In the virtual machine: two engines that may use RDMA alone; bytes there and back, and a message."""

from __future__ import annotations

import random

from moonpool import Batch, TransferEngine
from moonpool.core.errors import InvalidArgument

SIZE = 1 << 20
SLICES = 64


def main() -> None:
    token = b"of this test"
    try:
        TransferEngine("wrong", token=token, rdma_devices=["ra0", "mlx5_0"])
    except InvalidArgument as error:
        print(error)
    with (
        TransferEngine(
            "there", token=token, transports=["rdma"], rdma_devices=["rb0", "rb1"], timeout_s=60
        ) as there,
        TransferEngine(
            "here", token=token, transports=["rdma"], rdma_devices=["ra0", "ra1"], timeout_s=60
        ) as here,
    ):
        theirs, ours = there.allocate(SIZE), here.allocate(SIZE)
        peer = here.open(there.addresses[0])
        print(*here.paths(peer), sep="\n")
        data = random.Random(7).randbytes(SIZE)
        ours.view[:] = data
        here.write(peer, ours.at(0), theirs.address, SIZE)
        assert theirs.view == data
        ours.view[:] = bytes(SIZE)
        step = SIZE // SLICES
        places = [number * step for number in range(SLICES)]
        remote = [theirs.address + at for at in places]
        batch = Batch("read", peer, [ours.at(at) for at in places], remote, step)
        assert here.submit(batch, notify=b"read").result(60) == SIZE
        assert ours.view == data
        assert [message.message for message in there.notifications(60)] == [b"read"]
        metrics = here.metrics()
        print({name: value for name, value in metrics.items() if "rdma" in name})
        assert metrics["rdma_write_bytes_total"] == metrics["rdma_read_bytes_total"] == SIZE
    print("all bytes came by RDMA")


if __name__ == "__main__":
    main()
