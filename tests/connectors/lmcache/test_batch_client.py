"""moonpool._native.BatchClient, the data plane of two plug points, against a node in this process."""

from __future__ import annotations

import gc
import os
import random
import select
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import _native
from moonpool.core.config import paths
from moonpool.core.errors import InvalidArgument
from tests.connectors.own_node import TOKEN, Node
from tests.connectors.vllm.processes import Node as NodeProcess
from tests.descriptors import speaks

MIB = 1 << 20
SEED = 3


class Bed:
    """A client, and what it said."""

    def __init__(self, client: _native.BatchClient) -> None:
        self.client = client

    def ended(self, number: int, timeout_s: float = 10) -> tuple[bool, str, list[bool] | None]:
        """What became of the one batch that is under way."""
        ready = speaks(self.client.event_fd(), timeout_s)
        assert ready, f"nothing ended within {timeout_s} s"
        told: list[Any] = self.client.drain_completions()
        if not told:  # a piece of it ended
            return self.ended(number, timeout_s)
        ((got, ok, error, found),) = told
        assert got == number
        return ok, error, found


def connected(node: Node) -> _native.Client:
    client = _native.Client(str(node.socket), TOKEN, fingerprint=b"f", timeout_s=10)
    client.connect()
    return client


@pytest.fixture
def bed(node: Node) -> Iterator[Bed]:
    node.start()
    batches = _native.BatchClient(threads=3)
    batches.attach(connected(node))
    yield Bed(batches)
    batches.close()


def noise(count: int, size: int) -> list[bytes]:
    print(f"seed {SEED}")
    source = random.Random(SEED)
    return [source.randbytes(size) for _ in range(count)]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 1000), (7, 2 * MIB), (2, 5 * MIB)])
def test_what_was_set_is_there_and_comes_back(bed: Bed, count: int, size: int) -> None:
    keys, values = [f"m@{i}@ü" for i in range(count)], noise(count, size)
    assert bed.ended(bed.client.submit_batch_exists(keys)) == (True, "", [False] * count)
    assert bed.ended(bed.client.submit_batch_set(keys, values)) == (True, "", None)
    assert bed.ended(bed.client.submit_batch_exists([*keys, "other"])) == (True, "", [True] * count + [False])
    into = [bytearray(size) for _ in keys]
    assert bed.ended(bed.client.submit_batch_get(keys, [memoryview(one) for one in into])) == (
        True,
        "",
        [True] * count,
    )
    assert into == values
    assert bed.ended(bed.client.submit_batch_delete([*keys, "other"])) == (True, "", [True] * count + [False])
    assert bed.ended(bed.client.submit_batch_get(keys, into)) == (True, "", [False] * count)


def test_an_object_of_another_size_is_a_miss_and_no_one_elses(bed: Bed) -> None:
    values = noise(3, 3 * MIB)
    assert bed.ended(bed.client.submit_batch_set(["a", "b", "c"], values))[0]
    into = [bytearray(3 * MIB), bytearray(2 * MIB), bytearray(4 * MIB)]
    assert bed.ended(bed.client.submit_batch_get(["a", "b", "c"], into)) == (True, "", [True, False, False])
    assert into[0] == values[0]


def test_an_object_may_lie_in_parts(bed: Bed) -> None:
    head, body = b"head", bytes(range(256)) * 10
    assert bed.ended(bed.client.submit_batch_set(["k"], [[head, body]]))[0]
    into = [bytearray(4), bytearray(2560)]
    assert bed.ended(bed.client.submit_batch_get(["k"], [into])) == (True, "", [True])
    assert into == [head, body]


def test_the_eventfd_is_readable_until_all_is_told(bed: Bed) -> None:
    numbers = {bed.client.submit_batch_exists(["k"]) for _ in range(50)}
    while numbers:
        assert speaks(bed.client.event_fd(), 10)
        numbers -= {number for number, *_ in bed.client.drain_completions()}
    assert bed.client.drain_completions() == []
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bed.client.event_fd())


def test_an_empty_batch_ends(bed: Bed) -> None:
    assert bed.ended(bed.client.submit_batch_set([], [])) == (True, "", None)
    assert bed.ended(bed.client.submit_batch_exists([])) == (True, "", [])


def test_wrong_arguments_raise_and_leave_nothing_behind(bed: Bed) -> None:
    with pytest.raises(InvalidArgument, match="2 keys came with 1 buffers"):
        bed.client.submit_batch_set(["a", "b"], [b"x"])
    with pytest.raises(InvalidArgument, match="no writable"):
        bed.client.submit_batch_get(["a"], [b"read only"])
    assert bed.ended(bed.client.submit_batch_exists(["a"]))[2] == [False]


def test_a_full_pool_refuses_and_says_why(bed: Bed) -> None:
    ok, error, found = bed.ended(bed.client.submit_batch_set(["large"], [bytes(32 * MIB)]))
    assert (ok, found) == (False, None)
    assert "larger" in error or "arena" in error


def test_without_a_node_all_fails_at_once() -> None:
    bed = Bed(_native.BatchClient())
    assert not bed.client.attached
    into = bytearray(1)
    assert bed.ended(bed.client.submit_batch_set(["k"], [b"x"]))[:2] == (
        False,
        "there is no node to connect to",
    )
    assert bed.ended(bed.client.submit_batch_get(["k"], [into]))[2] == [False]
    assert bed.ended(bed.client.submit_batch_exists(["k"]))[0] is False
    bed.client.close()


def test_a_node_that_dies_and_comes_back(bed: Bed, node: Node) -> None:
    assert bed.ended(bed.client.submit_batch_set(["k"], [b"x"]))[0]
    assert bed.client.attached
    node.stop()
    ok, error, _ = bed.ended(bed.client.submit_batch_set(["l"], [b"x"]))
    assert not ok
    assert error
    assert not bed.client.attached
    assert bed.ended(bed.client.submit_batch_exists(["k"]))[2] == [False]
    node.start()
    ok, error, _ = bed.ended(bed.client.submit_batch_set(["l"], [b"y"]))
    assert (ok, error) == (False, "the pool did not answer; it is asked again by and by")
    bed.client.attach(connected(node))
    assert bed.ended(bed.client.submit_batch_set(["l"], [b"y"]))[0]
    assert bed.ended(bed.client.submit_batch_exists(["k", "l"]))[2] == [False, True]


def test_what_waits_behind_a_node_that_hangs_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waits for the node; what is queued fails with it, and nothing of it is asked."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:
        monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", path)
        monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN", raising=False)
        process = NodeProcess(Path(path)).start()
        try:
            socket = str(process.runtime / "node.sock")
            client = _native.Client(socket, paths.client_token(socket), timeout_s=1)
            client.connect()
            batches = _native.BatchClient(threads=1)
            batches.attach(client)
            process.pause()
            numbers = [batches.submit_batch_exists(["k"]) for _ in range(50)]
            errors: dict[int, str] = {}
            while len(errors) < len(numbers):
                assert speaks(batches.event_fd(), 10)
                errors |= {number: error for number, _, error, _ in batches.drain_completions()}
            first, *others = [errors[number] for number in numbers]
            assert "did not answer in time" in first
            assert set(others) == {"the pool did not answer; it is asked again by and by"}
            batches.close()
            client.close()
        finally:
            process.kill()


def test_what_is_detached_fails_and_what_is_attached_again_goes_on(bed: Bed, node: Node) -> None:
    bed.client.detach()
    assert not bed.client.attached
    assert bed.ended(bed.client.submit_batch_set(["k"], [b"x"]))[0] is False
    bed.client.attach(connected(node))
    assert bed.ended(bed.client.submit_batch_set(["k"], [b"x"]))[0] is True


def test_a_full_queue_fails_the_batch_not_the_caller(node: Node) -> None:
    node.start()
    batches = _native.BatchClient(threads=1, queue_max=1)
    batches.attach(connected(node))
    numbers = [batches.submit_batch_set(["k"], [bytes(MIB)]) for _ in range(50)]
    told: dict[int, tuple[bool, str]] = {}
    while len(told) < len(numbers):
        assert speaks(batches.event_fd(), 10)
        told |= {number: (ok, error) for number, ok, error, _ in batches.drain_completions()}
    assert sorted(told) == numbers
    assert any(ok for ok, _ in told.values())
    assert all(ok or "the limit" in error for ok, error in told.values())
    batches.close()


def test_after_close_all_fails(bed: Bed) -> None:
    bed.client.submit_batch_set(["k"], [bytes(MIB)])
    bed.client.close()
    assert bed.client.drain_completions() == []
    assert bed.ended(bed.client.submit_batch_exists(["k"]))[0] is False


def test_closing_twice_at_once(node: Node) -> None:
    node.start(128 * MIB)
    for _ in range(10):
        batches = _native.BatchClient(threads=2)
        batches.attach(connected(node))
        batches.submit_batch_set(["a", "b"], [bytes(8 * MIB)] * 2)
        closing = [threading.Thread(target=batches.close) for _ in range(4)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(10)
            assert not thread.is_alive()


def test_closing_while_answers_are_made(node: Node) -> None:
    """As a finalizer may, which runs whenever Python makes an object."""
    node.start()
    batches = _native.BatchClient(threads=1)
    batches.attach(connected(node))
    for _ in range(50):
        batches.submit_batch_exists(["k"])
    batches.submit_batch_exists(["last"])
    until_all = select.poll()
    until_all.register(batches.event_fd(), select.POLLIN)
    assert until_all.poll(10_000)
    gc.callbacks.append(close := lambda phase, info: batches.close())
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        batches.drain_completions()
    finally:
        gc.callbacks.remove(close)
        gc.set_threshold(*threshold)
    assert batches.drain_completions() == []
