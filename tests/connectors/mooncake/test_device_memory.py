"""mooncake.engine with addresses of a CUDA card: the software device."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mooncake.engine import TransferEngine

import moonpool
from tests.soft_card import COMPILER, SoftCard, compile_library, soft_card, watch_questions

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


Rows = tuple[str, list[int], list[int], list[int]]


def looked_at(engine: TransferEngine, rows: Rows) -> int:
    batch = engine.batch_transfer_async_read(*rows)
    while (code := engine.transfer_check_status(batch)) == 0:
        os.sched_yield()
    return int(code)


FORMS: dict[str, Callable[[TransferEngine, Rows], int]] = {
    "one": lambda engine, rows: engine.transfer_sync_read(rows[0], rows[1][0], rows[2][0], rows[3][0]),
    "many": lambda engine, rows: engine.batch_transfer_sync_read(*rows),
    "looked at": looked_at,
    "waited for": lambda engine, rows: engine.get_batch_transfer_status(
        [engine.batch_transfer_async_read(*rows)]
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_transfer_that_failed_ends_when_the_card_makes_no_copies_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(moonpool, "TransferEngine", functools.partial(moonpool.TransferEngine, timeout_s=3.0))
    with soft_card(compile_library(tmp_path), "late") as card:
        mine, theirs = card.array((1000,)), np.zeros(1000, np.float32)
        here, there = TransferEngine(), TransferEngine()
        for engine in (here, there):
            assert engine.initialize(HOST, P2P, "tcp", "") == 0
        assert here.register_memory(mine.address, mine.view.nbytes) == 0
        assert there.register_memory(theirs.ctypes.data, theirs.nbytes) == 0
        session = f"{HOST}:{there.get_rpc_port()}"
        codes: list[int] = []
        asked = watch_questions(here._engine)
        move = FORMS[form]
        rows = (session, [mine.address], [theirs.ctypes.data], [theirs.nbytes])
        thread = threading.Thread(target=lambda: codes.append(move(here, rows)))
        card.hang(1)
        thread.start()
        for _ in range(3):
            assert asked.acquire(timeout=20)
        assert codes == []
        card.unhang()
        thread.join(20)
        assert codes
        assert codes[0] < 0
