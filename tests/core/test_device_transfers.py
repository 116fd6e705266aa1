"""The transfer engine with memory of a CUDA card, as Python hands it in: tensors of torch, arrays with CuPy's
interface, DLPack, addresses. The card is the software device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool import TransferEngine
from moonpool.core.errors import InvalidArgument
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


class Tensor:
    """What the engine asks of a tensor of torch."""

    def __init__(self, array: CardArray, *, contiguous: bool = True, device: str = "cuda") -> None:
        self.device = SimpleNamespace(type=device, index=0)
        self._array = array
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return self._array.address

    def numel(self) -> int:
        return int(self._array.view.size)

    def element_size(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return self._contiguous


class CupyArray:
    """What the engine asks of an array of CuPy."""

    def __init__(self, array: CardArray, strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": array.view.shape,
            "typestr": "<f4",
            "data": (array.address, False),
            "strides": strides,
            "version": 3,
        }


class DlpackArray:
    """An array that only DLPack describes, ``skip`` elements behind the start of its data."""

    def __init__(self, array: CardArray, skip: int = 0) -> None:
        from moonpool.core.transfer.device_memory import _Tensor

        count = array.view.size - skip
        self._shape = (ctypes.c_int64 * 1)(count)
        self._tensor = _Tensor(array.address, 2, 0, 1, 2, 32, 1, self._shape, None, 4 * skip)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, stream: object = None) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


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
