"""One end of LMCache's P2P channel ``mooncake_te``, unchanged, over the drop-in: ``p2p.py serve|read PORT
PEER``.

Each end has a region of 4 MiB. The reader reads all of the server's in 64 pieces, in another order.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel import initialize_transfer_channel_context

SIZE, PIECES = 4 << 20, 64
TIMEOUT_S = 60


def main() -> None:
    role, port, peer = sys.argv[1:]
    region = torch.zeros(SIZE, dtype=torch.uint8)
    if role == "serve":
        region.copy_(torch.randint(256, (SIZE,), generator=torch.Generator().manual_seed(4)).to(torch.uint8))
    own = f"127.0.0.1:{port}"
    memory = L1MemoryDesc(region.data_ptr(), SIZE, 4096)
    context = initialize_transfer_channel_context("mooncake_te", memory, own, own)
    if role == "read":
        client = context.get_transfer_channel_client(f"127.0.0.1:{peer}")
        piece = SIZE // PIECES
        there = context.get_transfer_channel_address([(i * piece, piece) for i in range(PIECES)])
        task = client.submit_read(there[::-1], there)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (result := client.query_read_status(task)).is_finished():
            assert time.monotonic() < deadline_s
        assert result.succeeded_mask == [True] * PIECES
        region = region.view(PIECES, piece).flip(0).flatten()
    print(hashlib.sha256(region.numpy().tobytes()).hexdigest(), flush=True)
    sys.stdin.read()
    context.close()


if __name__ == "__main__":
    main()
