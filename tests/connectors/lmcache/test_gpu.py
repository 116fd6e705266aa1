"""LMCache on a GPU as the connectors' native parts see it: chunks lie in host memory that LMCache pins, and
its own kernels copy between that and the GPU. The software device pins it and copies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moonpool import _native
from tests.connectors.own_node import TOKEN, Node
from tests.descriptors import speaks
from tests.soft_card import COMPILER, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

CHUNKS, FLOATS = 3, 300_000  # above what one piece of a batch has


@pytest.fixture
def card(tmp_path: Path) -> Iterator[SoftCard]:
    with soft_card(compile_library(tmp_path), "late") as card:
        yield card


@pytest.fixture
def batches(node: Node) -> Iterator[_native.BatchClient]:
    node.start()
    client = _native.Client(str(node.socket), TOKEN, timeout_s=10)
    client.connect()
    batches = _native.BatchClient(threads=3)
    batches.attach(client)
    yield batches
    batches.close()


def ended(batches: _native.BatchClient) -> bool:
    """Whether the batch under way succeeded."""
    while True:
        assert speaks(batches.event_fd(), 10)
        for _, ok, error, _ in batches.drain_completions():
            assert error == ""
            return bool(ok)


def test_chunks_go_from_one_gpu_to_another(
    card: SoftCard, batches: _native.BatchClient, rng: random.Random
) -> None:
    """By address and length, as LMCache's memory objects are given to BatchClient."""
    values = np.random.default_rng(rng.randrange(1 << 32)).random((CHUNKS, FLOATS), np.float32)
    source, target = card.array(values.shape), card.array(values.shape)
    here, there = card.pinned(np.zeros_like(values)), card.pinned(np.zeros_like(values))
    names = [f"chunk {number}" for number in range(CHUNKS)]
    card.forward(source, card.pinned(values))
    card.offload(here, source)
    card.settle()
    batches.submit_batch_set(names, [(chunk.ctypes.data, chunk.nbytes) for chunk in here])
    assert ended(batches)
    batches.submit_batch_get(names, [(chunk.ctypes.data, chunk.nbytes) for chunk in there])
    assert ended(batches)
    card.forward(target, there)
    card.settle()
    np.testing.assert_array_equal(target.view, values)
