"""mooncake.engine with addresses of a CUDA card: the software device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mooncake.engine import TransferEngine

from tests.soft_card import COMPILER, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

HOST, P2P = "127.0.0.1", "P2PHANDSHAKE"
FLOATS = 300_000


@pytest.fixture
def card(tmp_path: Path) -> Iterator[SoftCard]:
    with soft_card(compile_library(tmp_path)) as card:
        yield card
        gc.collect()  # the engines, which have no close()


def test_memory_of_a_card_is_registered_by_its_address_and_moved(card: SoftCard) -> None:
    mine, theirs = card.array((FLOATS,)), card.array((FLOATS,))
    mine.view[:] = np.arange(FLOATS)
    host = np.zeros(FLOATS, np.float32)
    here, there = TransferEngine(), TransferEngine()
    for engine in (here, there):
        assert engine.initialize(HOST, P2P, "tcp", "") == 0
    assert here.register_memory(mine.address, mine.view.nbytes) == 0
    assert here.register_memory(host.ctypes.data, host.nbytes) == 0
    assert there.register_memory(theirs.address, theirs.view.nbytes) == 0
    session = f"{HOST}:{there.get_rpc_port()}"
    assert here.transfer_sync_write(session, mine.address, theirs.address, mine.view.nbytes) == 0
    assert np.array_equal(theirs.view, mine.view)
    assert here.transfer_sync_read(session, host.ctypes.data, theirs.address, host.nbytes) == 0
    assert np.array_equal(host, theirs.view)
    assert here.unregister_memory(mine.address) == 0
    assert here.register_memory(mine.address, 1 << 40) != 0  # beyond its allocation
    assert here.unregister_memory(host.ctypes.data) == 0
    assert there.unregister_memory(theirs.address) == 0
