"""The store with memory of a CUDA card: tensors of torch, arrays with CuPy's interface, DLPack, addresses.
The card is the software device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moonpool
from moonpool.core.errors import InvalidArgument
from tests.core.card_arrays import CupyArray, DlpackArray, Tensor
from tests.core.store_bed import MIB
from tests.soft_card import COMPILER, CardArray, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FLOATS = 5_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("soft"))


@pytest.fixture(params=("late", "early", "shuffled"))
def card(request: pytest.FixtureRequest, library: Path) -> Iterator[SoftCard]:
    with soft_card(library, request.param, seed=24) as card:
        yield card


def filled(card: SoftCard, seed: int) -> CardArray:
    array = card.array((FLOATS,))
    array.view[:] = np.random.default_rng(seed).random(FLOATS, np.float32)
    return array


def test_each_form_of_a_cards_memory_is_put_and_got(card: SoftCard) -> None:
    with moonpool.Store(embedded=16 * MIB) as store:
        sources = [filled(card, seed) for seed in range(4)]
        keys = ["tensor", "cupy", "dlpack", "address"]
        forms = [
            Tensor(sources[0]),
            CupyArray(sources[1]),
            DlpackArray(sources[2]),
            (sources[3].address, 4 * FLOATS),
        ]
        assert all(store.put(keys, forms))
        for key, source in zip(keys, sources, strict=True):
            assert bytes(store.get(key)) == source.view.tobytes()
        targets = [card.array((FLOATS,)) for _ in range(4)]
        into = [
            DlpackArray(targets[0]),
            (targets[1].address, 4 * FLOATS),
            Tensor(targets[2]),
            CupyArray(targets[3]),
        ]
        assert store.get(keys, into) == [4 * FLOATS] * 4
        for source, target in zip(sources, targets, strict=True):
            assert np.array_equal(target.view, source.view)
        # A pinned read, of an object that is removed by now.
        found = store.longest_prefix(["tensor"])
        assert found.pin is not None
        store.remove("tensor")
        targets[0].view[:] = 0
        assert store.get("tensor", Tensor(targets[0]), pin=found.pin) == 4 * FLOATS
        assert np.array_equal(targets[0].view, sources[0].view)


def test_parts_of_cards_and_of_the_host_make_one_object(card: SoftCard) -> None:
    with moonpool.Store(embedded=16 * MIB) as store:
        source, target = filled(card, 5), card.array((FLOATS,))
        head = bytearray(4)
        store.put("mixed", [b"head", Tensor(source), np.arange(3, dtype=np.uint8)])
        assert bytes(store.get("mixed")) == b"head" + source.view.tobytes() + b"\0\1\2"
        assert store.get("mixed", [head, CupyArray(target), bytearray(3)]) == 4 * FLOATS + 7
        assert head == b"head"
        assert np.array_equal(target.view, source.view)


def test_asyncio(card: SoftCard) -> None:
    async def run() -> None:
        async with moonpool.AsyncStore(embedded=16 * MIB) as store:
            source, target = filled(card, 6), card.array((FLOATS,))
            assert await store.put("k", Tensor(source))
            assert await store.get("k", Tensor(target)) == 4 * FLOATS
            assert np.array_equal(target.view, source.view)

    asyncio.run(run())


def test_what_is_no_range_of_a_card_is_refused(card: SoftCard) -> None:
    with moonpool.Store(embedded=16 * MIB) as store:
        array, other = card.array((FLOATS,)), card.array((FLOATS,))
        first = min(array.address, other.address)
        beyond = abs(array.address - other.address) + 4 * FLOATS
        for wrong, why in (
            (Tensor(array, contiguous=False), "contiguous"),
            (Tensor(array, device="xpu"), "not CPU memory"),
            ((first, beyond), "different allocations"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                store.put("k", wrong)
            with pytest.raises(InvalidArgument, match=why):
                store.get("k", wrong)
        assert not store.exists("k")
