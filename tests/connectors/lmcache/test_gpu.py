"""LMCache on a GPU as the connectors' native parts see it: chunks lie in host memory that LMCache pins, or in
the part of the node's that is pinned for them, and LMCache's kernels copy between that and the GPU. The
software device pins and copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import _native
from moonpool.connectors.pinned_arena import ALL
from moonpool.core.config import paths
from moonpool.core.errors import Timeout, Unavailable
from tests.connectors.own_node import TOKEN, Node
from tests.connectors.vllm.processes import Node as OtherNode
from tests.core.store_bed import until
from tests.descriptors import speaks
from tests.soft_card import COMPILER, SoftCard, compile_library, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

CHUNKS, FLOATS = 3, 300_000  # above what one piece of a batch has
MIB = 1 << 20


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


def settled(client: _native.Client, part_bytes: int) -> _native.PinnedArena:
    """The whole arena, once the node has gathered its memory into huge pages, or knows that it cannot."""
    arena = _native.PinnedArena(0, client, part_bytes)
    until(lambda: "settled" not in arena.grow(ALL).why, 30)
    return arena


def test_a_card_reads_what_lies_in_one_pinned_part(card: SoftCard, node: Node, rng: random.Random) -> None:
    node.start()
    client = _native.Client(str(node.socket), TOKEN, timeout_s=10)
    client.connect()
    values = np.random.default_rng(rng.randrange(1 << 32)).random((8, FLOATS), np.float32)
    names = [f"chunk {number}" for number in range(len(values))]
    assert client.put(names, [chunk.tobytes() for chunk in values])[0] == bytes(len(names))
    assert settled(client, MIB).views([*names, "none"]) == [None] * 9  # each is longer than a part
    assert node.pinned() == 0
    arena = settled(client, 4 * MIB)
    views = arena.views([*names, "none"])
    lent = [i for i, view in enumerate(views) if view is not None]
    assert 0 < len(lent) < len(names)  # some lie in two parts
    until(lambda: node.pinned() == len(lent))
    assert client.remove(names)[0] == b"\1" * len(names)
    client.put([f"later {number}" for number in range(40)], [bytes(values[0].nbytes)] * 40)  # room for few
    for i in lent:
        target = card.array((FLOATS,))
        card.forward(target, np.frombuffer(views[i], np.float32))
        card.settle()
        np.testing.assert_array_equal(target.view, values[i])
    released = card.calls("cuMemHostUnregister")
    del arena
    assert card.calls("cuMemHostUnregister") == released
    del views
    assert card.calls("cuMemHostUnregister") == released + 16
    until(lambda: node.pinned() == 0)
    client.close()


@pytest.fixture
def other_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherNode]:
    """A node in a process of its own."""
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(tmp_path / "runtime"))
    node = OtherNode(tmp_path / "runtime", 64 << 20).start()
    yield node
    node.kill()


def test_a_slow_answer_does_not_end_the_pins_and_the_end_of_the_node_does(
    card: SoftCard, other_node: OtherNode
) -> None:
    socket = str(other_node.runtime / "node.sock")
    patient, hasty = (_native.Client(socket, paths.client_token(socket), timeout_s=s) for s in (10, 0.2))
    patient.put(["chunk"], [b"x" * 1000])
    until(lambda: answered(hasty.connect))
    arena = settled(hasty, 4 * MIB)
    (early,) = until(lambda: answered(lambda: arena.views(["chunk"])))
    other_node.pause()
    with pytest.raises((Timeout, Unavailable)):
        hasty.pin(["chunk"])
    assert arena.alive
    other_node.resume()
    (late,) = until(lambda: answered(lambda: arena.views(["chunk"])))
    # What was lent over the first connection keeps that, and so what the node pinned for the call given up.
    until(lambda: other_node.metrics()["pins"] == 3)
    patient.remove(["chunk"])
    assert bytes(early) == bytes(late) == b"x" * 1000
    del early
    until(lambda: other_node.metrics()["pins"] == 1)
    del late
    until(lambda: other_node.metrics()["pins"] == 0)
    assert card.calls("cuMemHostUnregister") == 0
    assert arena.alive
    other_node.kill()
    assert not arena.alive
    for client in (patient, hasty):
        client.close()


def answered(call: Callable[[], Any]) -> Any:
    """What the call returns, or True; None when the node did not answer in time."""
    with suppress(Timeout, Unavailable):
        return call() or True
    return None
