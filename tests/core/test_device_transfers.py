"""The transfer engine with memory of a CUDA card, as Python hands it in: tensors of torch, arrays with CuPy's
interface, DLPack, addresses. The card is the software device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool import TransferEngine
from moonpool.core.errors import InvalidArgument
from tests.core.card_arrays import CupyArray, DlpackArray, Tensor
from tests.soft_card import COMPILER, CardArray, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

TOKEN = b"token of the device tests"
FLOATS = 300_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("soft"))


@pytest.fixture(params=("late", "shuffled"))
def card(request: pytest.FixtureRequest, library: Path) -> Iterator[SoftCard]:
    with soft_card(library, request.param) as card:
        yield card


def wrapped(form: str, array: CardArray) -> Any:
    if form == "torch":
        return Tensor(array)
    if form == "cupy":
        return CupyArray(array)
    if form == "dlpack":
        return DlpackArray(array)
    return array.address, array.view.nbytes


@pytest.mark.parametrize("form", ["torch", "cupy", "dlpack", "address"])
@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_memory_of_cards_moves_between_engines(card: SoftCard, transport: str, form: str) -> None:
    mine, theirs = card.array((FLOATS,)), card.array((FLOATS,))
    mine.view[:] = np.arange(FLOATS)
    local, remote = wrapped(form, mine), wrapped(form, theirs)
    host = np.zeros(FLOATS, np.float32)
    with (
        TransferEngine("here", token=TOKEN, transports=[transport]) as here,
        TransferEngine("there", token=TOKEN) as there,
    ):
        region = here.register(local)
        assert region.location == "cuda:0"
        assert len(region) == 4 * FLOATS
        there.register(remote)
        here.register(host)
        peer = here.open(there.addresses[0])
        assert [(row.kind, row.location) for row in peer.regions] == [("device", "cuda:0")]
        assert here.write(peer, region, theirs.address) == 4 * FLOATS
        assert np.array_equal(theirs.view, mine.view)  # done: the bytes are there
        theirs.view[:] = np.arange(FLOATS)[::-1]
        if form != "address":  # an object stands for all of its range
            assert here.read(peer, local, theirs.address) == 4 * FLOATS
            assert np.array_equal(mine.view, theirs.view)
        assert here.read(peer, host, theirs.address) == 4 * FLOATS
        assert np.array_equal(host, theirs.view)
        transfer = here.submit(
            [SimpleNamespace(op="write", segment=peer, local=region.at(0), remote=theirs.address, length=64)]
        )
        transfer.wait(10)


def test_what_is_no_one_range_of_a_card_is_refused(card: SoftCard) -> None:
    array = card.array((10, 100))
    with TransferEngine("here", token=TOKEN) as engine:
        for item in (Tensor(array, contiguous=False), CupyArray(array, strides=(800, 4))):
            with pytest.raises(InvalidArgument, match="not contiguous"):
                engine.register(item)
        with pytest.raises(InvalidArgument, match="of no bytes"):
            engine.register(CupyArray(CardArray(array.address, np.empty((0, 4), np.float32))))
        with pytest.raises(InvalidArgument, match="is not registered"):
            engine.register((array.address, 1 << 40))
        region = engine.register(CupyArray(array, strides=(400, 4)))
        assert region.address == array.address
        region.close()
        region = engine.register(DlpackArray(array, skip=10))
        assert (region.address, region.length) == (array.address + 40, 990 * 4)
