"""A node that is killed in the middle of a store or a retrieve, or that hangs, for each plug point: an answer
soon, right bytes or a miss, and the pool is used again when the node is back.
"""

from __future__ import annotations

import concurrent.futures
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.connectors import node_connection
from tests.connectors.lmcache.real.beds import Backend
from tests.connectors.lmcache.real.l2 import BY_NAME, L2, NATIVE
from tests.connectors.vllm.processes import Node
from tests.core.store_bed import until

ANSWER_S = 8.0  # LMCache itself gives up after 10
HASTE_S = 0.5


class Remote:
    """The remote connector, with the calls of an L2."""

    def __init__(self, timeout_s: float) -> None:
        self.backend = Backend(chunk_size=64, remote_url=f"moonpool://?timeout_s={timeout_s}")

    def store(self, numbers: Sequence[int]) -> None:
        self.backend.put(numbers)

    def lookup(self, numbers: Sequence[int]) -> list[bool]:
        found = self.backend.contains(numbers)
        return [i < found for i in range(len(numbers))]

    def load(self, numbers: Sequence[int]) -> list[bool]:
        """Looks at the bytes of what came."""
        return [tokens is not None for tokens in self.backend.get(numbers)]

    def close(self) -> None:
        self.backend.close()


def lookup_and_load(l2: L2, numbers: Sequence[int]) -> list[bool]:
    """As LMCache's server does."""
    l2.lookup(numbers)
    loaded = l2.load(numbers)
    l2.unlock(numbers)
    return loaded


PLUGS: dict[str, Callable[[float], Any]] = {
    "remote": Remote,
    "moonpool": lambda timeout_s: L2({**BY_NAME, "timeout_s": timeout_s}),
    "native_plugin": lambda timeout_s: L2(
        {**NATIVE, "adapter_params": {**NATIVE["adapter_params"], "timeout_s": timeout_s}}
    ),
}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:
        monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", path)
        monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN", raising=False)
        node = Node(Path(path)).start()
        yield node
        node.kill()


@pytest.fixture(params=PLUGS)
def plug(request: pytest.FixtureRequest, node: Node) -> Iterator[Any]:
    plug = PLUGS[request.param](2)
    yield plug
    plug.close()


@pytest.fixture(params=PLUGS)
def hasty(request: pytest.FixtureRequest, node: Node) -> Iterator[Any]:
    """One that waits for HASTE_S only."""
    plug = PLUGS[request.param](HASTE_S)
    yield plug
    plug.close()


def store(plug: Any, numbers: Sequence[int]) -> None:
    plug.store(numbers)


def retrieve(plug: Any, numbers: Sequence[int]) -> None:
    if isinstance(plug, L2):
        lookup_and_load(plug, numbers)
    else:
        plug.load(numbers)


CHUNKS = range(200)


@pytest.mark.parametrize("work", [store, retrieve])
@pytest.mark.parametrize("moment", ["held", "at any time"])
def test_a_node_killed_in_the_middle(
    work: Callable[[Any, Sequence[int]], None], moment: str, plug: Any, node: Node, rng: random.Random
) -> None:
    plug.store(CHUNKS)
    started_s = time.monotonic()
    assert plug.load(CHUNKS) == [True] * len(CHUNKS)
    usual_s = time.monotonic() - started_s
    # The second half is not there: what is there may come from shared memory, without the node.
    first = len(CHUNKS) // 2 if work is retrieve else 1000
    numbers = range(first, first + len(CHUNKS))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        if moment == "held":  # it waits for the node when that is killed
            node.pause()
            working = pool.submit(work, plug, numbers)
            assert not concurrent.futures.wait([working], 0.1).done
        else:
            working = pool.submit(work, plug, numbers)
            concurrent.futures.wait([working], rng.random() * usual_s)
        node.kill()
        working.result(ANSWER_S)
    retrieve(plug, numbers)  # what is there now: looks at the bytes, too
    node.start()

    def stored() -> bool:
        plug.store([5000])
        return plug.load([5000]) == [True]

    assert until(stored)
    assert plug.load([0]) == [False]  # its memory went with it


def has_stored(plug: Any) -> bool:
    """Whether it has, and finds it: not when this machine stood still for HASTE_S meanwhile."""
    plug.store([1])
    return bool(plug.lookup([1]) == [True])


def test_a_node_that_hangs_is_waited_for_once(
    hasty: Any, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: has_stored(hasty))
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 600.0)
    node.pause()
    assert hasty.lookup([1, 9]) == [False, False]  # this one waits
    node.resume()
    for _ in range(50):  # though it would answer
        assert hasty.lookup([1]) == hasty.load([1]) == [False]
        hasty.store([2])
    assert node.metrics()["objects"] == 1


def test_a_node_that_hung_is_used_again(hasty: Any, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.02)
    until(lambda: has_stored(hasty))
    node.pause()
    assert hasty.lookup([1, 9]) == [False, False]
    node.resume()
    until(lambda: hasty.lookup([1]) == hasty.load([1]) == [True])
