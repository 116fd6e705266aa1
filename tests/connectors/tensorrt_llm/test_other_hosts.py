"""Blocks that another host has: two nodes with a host each and a master, an engine on each."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import _native
from moonpool.connectors.tensorrt_llm import fetch, worker
from moonpool.connectors.tensorrt_llm import pool as pools
from moonpool.core.config.native_settings import master_settings
from tests.connectors.tensorrt_llm.checks import PROMPT, check, counts
from tests.connectors.tensorrt_llm.conftest import Make, Node
from tests.connectors.tensorrt_llm.stub_engine import Engine
from tests.core.store_bed import TOKEN, NodeProcess, until

OBJECT = 3 * 2 * 4 * 4 * 2  # of a block and a head: layers, (K, V), tokens, numbers, bytes
BLOCK = 8 * OBJECT


class Hosts:
    """A master, and nodes that it knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
        self.master.start()
        self.nodes: dict[str, NodeProcess] = {}

    def start(self, name: str) -> NodeProcess:
        socket = self.folder / f"{name}.sock"
        socket.unlink(missing_ok=True)
        node = NodeProcess(
            socket,
            name=name,
            host_id=f"host-{name}",
            master=self.master.addresses[0],
            listen=["127.0.0.1:0"],
        )
        self.nodes[name] = node
        until(lambda: node.metric("master_joined"))
        return node

    def told(self) -> None:
        """Waits until the master knows of every object."""
        until(
            lambda: (
                self.master.metrics()["directory_rows"]
                == sum(node.metric("objects") for node in self.nodes.values())
            )
        )

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.master.stop()


@pytest.fixture
def hosts(node: Node, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", TOKEN.decode())
    monkeypatch.setattr(fetch, "FETCH_S", 10.0)  # what is slow is said by the test, not by the machine
    made = Hosts(folder)
    made.start("a")
    made.start("b")
    yield made
    made.close()


def on(hosts: Hosts, make: Make, name: str, options: dict[str, Any] | None = None, **more: Any) -> Engine:
    return make({"node": str(hosts.folder / f"{name}.sock")} | (options or {}), **more)


class Reads:
    """What engines of this process bring to their node and load. far: bytes of other hosts; ``hold``: those
    are brought when ``gate`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, hold: bool = False) -> None:
        self.gate = threading.Event()
        self.far: dict[int, int] = {}  # by the connection's id
        copy, descriptors = pools.Held.copy, pools.Held.descriptors

        def copied(held: pools.Held, which: Any, parents: Any) -> None:
            if hold:
                assert self.gate.wait(30)
            self._read(held, which)
            copy(held, which, parents)

        def loaded(held: pools.Held, which: Any) -> Any:
            self._read(held, which)
            return descriptors(held, which)

        monkeypatch.setattr(pools.Held, "copy", copied)
        monkeypatch.setattr(pools.Held, "descriptors", loaded)

    def _read(self, held: pools.Held, which: Any) -> None:
        size = sum(held.sizes[at] for at in which if held.far[at])
        self.far[id(held._client)] = self.far.get(id(held._client), 0) + size

    def of(self, rank: Any) -> int:
        connection = rank._link.engine.pool.client
        assert connection is not None
        return self.far.get(id(connection.client), 0)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_engine_takes_what_another_host_has(
    make: Make, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """Every rank reads its own columns, and nobody else's."""
    ranks = {"tp_size": tp_size}
    first, second = on(hosts, make, "a", args=ranks), on(hosts, make, "b", args=ranks)
    check(first, PROMPT, 0)
    hosts.told()
    reads = Reads(monkeypatch)
    check(second, PROMPT, 20)
    assert [reads.of(rank) for rank, _ in second.ranks] == [5 * BLOCK // tp_size] * tp_size


def test_a_question_does_not_wait_for_slow_bytes(
    make: Make, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It promises what is here, the engine computes the rest, and keeps it on its own host. What comes too
    late is dropped, and until it has come, nothing else is brought."""
    first, second = on(hosts, make, "a"), on(hosts, make, "b")
    check(first, PROMPT, 0)
    hosts.told()
    monkeypatch.setattr(fetch, "FETCH_S", 0.01)
    reads = Reads(monkeypatch, hold=True)
    try:
        request = second.start(PROMPT)  # returns while the bytes are held
        assert second.matched == 0
        second.step([request])
        assert second.answer(request) == second.expected(PROMPT)
        second.finish(request)
        second.flush()
        check(second, PROMPT, 20)  # it is here now
        check(first, [9] * 9, 0)
        hosts.told()
        check(second, [9] * 9, 0)  # not even asked for while the other comes
        assert reads.of(second.ranks[0][0]) == 0
    finally:
        reads.gate.set()
    assert counts(second)["too_far_blocks"] == 5 + 2


def test_a_question_brings_no_more_than_it_may(
    make: Make, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = on(hosts, make, "a"), on(hosts, make, "b", {"fetch": 3 * BLOCK + 1})
    none = on(hosts, make, "b", {"fetch": 0})
    check(first, PROMPT, 0)
    hosts.told()
    none.start(PROMPT)
    assert none.matched == 0
    check(second, PROMPT, 12)
    hosts.told()
    check(second, PROMPT, 20)  # what it computed is on its own host


def test_what_was_brought_is_there_for_the_next_engine(make: Make, hosts: Hosts) -> None:
    first, second, third = on(hosts, make, "a"), on(hosts, make, "b"), on(hosts, make, "b")
    check(first, PROMPT, 0)
    hosts.told()
    check(second, PROMPT, 20)
    hosts.nodes["a"].process.send_signal(signal.SIGKILL)
    check(third, PROMPT, 20)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_host_dies_after_the_promise(
    make: Make, hosts: Hosts, signal_number: signal.Signals
) -> None:
    """What was promised is here."""
    first, second = on(hosts, make, "a"), on(hosts, make, "b")
    check(first, PROMPT, 0)
    hosts.told()
    request = second.start(PROMPT)
    assert second.matched == 20
    hosts.nodes["a"].process.send_signal(signal_number)
    assert (second.step([], [request]) or until(lambda: second.poll([]))) == [request.request_id]
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)
    second.finish(request)


def test_a_promise_is_pinned_on_the_other_host(
    make: Make, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until every rank has read it: more ranks than the scheduler's read it themselves."""
    monkeypatch.setattr(worker, "LOAD_DEADLINE_S", 0.0)
    ranks = {"tp_size": 2}
    first, second = on(hosts, make, "a", args=ranks), on(hosts, make, "b", args=ranks)
    check(first, PROMPT, 0)
    hosts.told()
    request = second.start(PROMPT)
    assert second.matched == 20
    assert hosts.nodes["a"].metric("pins") == 1
    assert (second.step([], [request]) or until(lambda: second.poll([]))) == [request.request_id]
    second.step([request])
    assert second.answer(request) == second.expected(PROMPT)
    second.finish(request)
    until(lambda: hosts.nodes["a"].metric("pins") == 0)
