"""HiCache on a GPU as the backend sees it: SGLang copies between the GPU and host memory that it pins, and
that is the memory which the backend registers. The software device pins it and copies."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.connectors.own_node import Node
from tests.connectors.sglang.conftest import Make
from tests.connectors.sglang.fakes import HostPool, MHATokenToKVPoolHost, MLATokenToKVPoolHost, page_keys
from tests.soft_card import COMPILER, CardArray, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SoftCard]:
    with soft_card(compile_library(tmp_path_factory.mktemp("soft")), "late") as card:
        yield card


class Gpu:
    """A server's KV cache on the card, and HiCache's host pool of the same size, pinned."""

    def __init__(self, card: SoftCard, pool: HostPool) -> None:
        self.pool = pool
        flat = pool.memory.reshape(-1).view(np.float32)
        self._host = card.pinned(flat)
        pool.memory = self._host.view(np.uint16).reshape(pool.memory.shape)
        self._card, self.kv = card, card.array(flat.shape)

    def compute(self, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        self._card.forward(self.kv, self._card.pinned(values))

    def offload(self) -> None:
        """As SGLang does it, which waits before it calls a storage backend."""
        self._card.offload(self._host, self.kv)
        self._card.settle()

    def onload(self) -> None:
        self._card.forward(self.kv, self._host)
        self._card.settle()


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
@pytest.mark.parametrize("kind", [MHATokenToKVPoolHost, MLATokenToKVPoolHost])
def test_pages_go_from_one_gpu_to_another(
    card: SoftCard, make: Make, node: Node, rng: random.Random, kind: type[HostPool], layout: str
) -> None:
    node.start()
    first, second = Gpu(card, kind(layout, dim=6)), Gpu(card, kind(layout, dim=6))
    writer, reader = make(first.pool), make(second.pool)
    first.compute(np.random.default_rng(rng.randrange(1 << 32)).random(first.kv.view.shape, np.float32))
    first.offload()
    keys, pages = page_keys(3), (7, 2, 5)
    assert writer.batch_set_v1(keys, first.pool.slots(*pages)) == [True] * 3
    assert reader.batch_get_v1(keys, second.pool.slots(*pages)) == [True] * 3
    second.onload()
    shown = shown_on(second.kv, second.pool)
    for page in pages:
        np.testing.assert_array_equal(shown.view()[page], shown_on(first.kv, first.pool).view()[page])
        assert shown.view()[page].any()


def shown_on(kv: CardArray, like: HostPool) -> HostPool:
    """What the card has, as a host pool."""
    pool = type(like)(like.layout, dim=like.dim)
    pool.memory = kv.view.view(np.uint16).reshape(like.memory.shape)
    return pool
