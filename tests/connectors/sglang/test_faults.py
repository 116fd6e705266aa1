"""What goes wrong around the backend, against real nodes: a page that it reports as loaded is right, byte by
byte, what it cannot have is a miss within seconds, and it says why."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import Store, _native
from moonpool.connectors.blocking_worker import BlockingWorker
from moonpool.connectors.sglang import MoonpoolHiCache
from moonpool.connectors.sglang import pool as pools
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.errors import Closed, InvalidArgument
from tests.connectors.own_node import TOKEN, Node
from tests.connectors.sglang.conftest import Make
from tests.connectors.sglang.fakes import (
    Engine,
    HostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    Transfer,
    page_keys,
)
from tests.connectors.vllm import processes

HERE = Path(__file__).parent
PATIENCE_S = 30.0


def filled(seed: int, **shape: int) -> MHATokenToKVPoolHost:
    print(f"seed {seed}")
    pool = MHATokenToKVPoolHost(**shape)
    pool.memory[:] = np.random.default_rng(seed).integers(1, 1 << 16, pool.memory.shape, np.uint16)
    return pool


def right(got: Sequence[bool], target: HostPool, source: HostPool) -> int:
    """Checks the pages that were loaded, page i into i; -> how many."""
    for page in np.flatnonzero(got):
        np.testing.assert_array_equal(target.view()[page], source.view()[page])
    return sum(got)


def eventually(true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


@pytest.fixture
def process(folder: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[processes.Node]:
    """A node that can be stopped and killed, at the socket that ``make``'s backends use."""
    process = processes.Node(folder)
    monkeypatch.setattr(node, "socket", folder / "node.sock")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """SGLang's storage thread."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


def stuck_in(backend: MoonpoolHiCache, worker: str, call: Future[Any]) -> None:
    """Returns when ``call`` waits for the node in that worker."""
    pool = backend._pool
    assert pool is not None
    turn = getattr(pool.client_now(), worker)._turn
    eventually(lambda: turn.locked() or call.done(), "the call never reached the pool")


def test_a_node_killed_in_mid_load(
    make: Make, process: processes.Node, thread: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    source, target, keys = filled(1), MHATokenToKVPoolHost(), page_keys(8)
    backend = make(source)
    assert all(backend.batch_set_v1(keys, source.slots(*range(8))))
    loader = make(target)
    process.pause()
    call = thread.submit(loader.batch_get_v1, keys, target.slots(*range(8)))
    stuck_in(loader, "loads", call)
    process.kill()
    assert call.result(PATIENCE_S) == [False] * 8
    assert not target.memory.any()
    assert "does not answer" in caplog.text
    assert loader._tally.values["survived_errors"] == 0
    process.start()  # empty; the engine goes on with it by itself
    eventually(lambda: all(loader.batch_set_v1(keys, source.slots(*range(8)))), "the new node is not found")
    assert loader.batch_exists(keys) == 8


@pytest.mark.parametrize("seed", range(3))
def test_a_node_killed_while_loads_go_on(
    make: Make, process: processes.Node, thread: ThreadPoolExecutor, seed: int
) -> None:
    """The bytes lie in memory that this process has mapped, too: they may be there still, never others."""
    shape = {"layers": 4, "tokens": 16, "heads": 2, "dim": 64}
    source, target, keys = filled(seed, **shape), MHATokenToKVPoolHost(**shape), page_keys(12, seed)
    slots = source.slots(*range(12))
    assert all(make(source).batch_set_v1(keys, slots))
    backend, loads = make(target), 0

    def load_until_a_miss() -> None:
        nonlocal loads
        while True:
            target.memory[:] = 0
            if right(backend.batch_get_v1(keys, slots), target, source) < 12:
                return
            loads += 1

    call = thread.submit(load_until_a_miss)
    wanted = random.Random(seed).randrange(1, 50)
    eventually(lambda: loads >= wanted or call.done(), "nothing is loaded")
    assert not call.done()
    process.kill()
    call.result(PATIENCE_S)
    assert backend.batch_exists(keys) == 0
    assert backend._tally.values["survived_errors"] == 0


def test_a_node_killed_in_mid_save(
    make: Make, process: processes.Node, thread: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    source, keys = filled(3), page_keys(8)
    backend = make(source)
    process.pause()
    call = thread.submit(backend.batch_set_v1, keys, source.slots(*range(8)))
    stuck_in(backend, "saves", call)
    process.kill()
    assert call.result(PATIENCE_S) == [False] * 8
    assert "not all of 8 pages were saved" in caplog.text
    process.start()
    assert backend.batch_exists(keys) == 0
    eventually(lambda: all(backend.batch_set_v1(keys, source.slots(*range(8)))), "the new node is not found")


def test_a_node_that_hangs(make: Make, process: processes.Node, thread: ThreadPoolExecutor) -> None:
    """Every call ends by itself; when the node goes on, so does the pool."""
    source, keys = filled(4), page_keys(4)
    backend = make(source)
    assert all(backend.batch_set_v1(keys, source.slots(*range(4))))
    process.pause()
    started_s = time.monotonic()
    assert (
        thread.submit(backend.batch_get_v1, keys, source.slots(*range(4))).result(PATIENCE_S) == [False] * 4
    )
    assert not any(backend.batch_set_v1(page_keys(2, seed=9), source.slots(0, 1)))
    assert time.monotonic() - started_s < 4 * pools.TIMEOUT_S
    process.resume()
    eventually(lambda: backend.batch_exists(keys) == 4, "the pool does not come back")


def test_a_wrong_token(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One sentence that says which, and the engine serves; with the right token the pool is joined."""
    monkeypatch.setattr(pools, "RETRY_S", 0.0)
    node.start()
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another token")
    source, keys = filled(5), page_keys(2)
    backend = make(source)
    for _ in range(3):
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, source.slots(0, 1)) == [False] * 2
        assert backend.batch_set_v1(keys, source.slots(0, 1)) == [False] * 2
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) == 1, said
    assert "token" in said[0]
    assert "another token" not in said[0]
    assert backend._tally.values["survived_errors"] == 0
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", TOKEN.decode())
    assert backend.batch_set_v1(keys, source.slots(0, 1)) == [True] * 2


def test_two_deployments_of_one_model_in_two_types(make: Make, node: Node, engine: Engine) -> None:
    """bfloat16 and float16 have pages of the same size and keys: read as the other, they would be garbage."""
    node.start()
    keys = page_keys(3)
    pools_of = {"torch.bfloat16": filled(6), "torch.float16": filled(7)}
    backends = {}
    for dtype, pool in pools_of.items():
        pool.dtype = engine.dtype = dtype
        backends[dtype] = make(pool)
    first, second = backends.values()
    source, other = pools_of.values()
    assert first.batch_set_v1(keys, source.slots(0, 1, 2)) == [True] * 3
    before = other.memory.copy()
    assert second.batch_exists(keys) == 0
    assert second.batch_get_v1(keys, other.slots(0, 1, 2)) == [False] * 3
    np.testing.assert_array_equal(other.memory, before)
    assert second.batch_set_v1(keys, other.slots(0, 1, 2)) == [True] * 3
    for backend, pool in ((first, source), (second, other)):
        saved = pool.view().copy()
        pool.memory[:] = 0
        assert backend.batch_get_v1(keys, pool.slots(0, 1, 2)) == [True] * 3
        np.testing.assert_array_equal(pool.view()[:3], saved[:3])


def test_detached_with_calls_in_flight(
    make: Make, process: processes.Node, thread: ThreadPoolExecutor
) -> None:
    """SGLang ends its threads first, but not when one of them is stuck: close() waits for what is under
    way, and nothing is written to the engine's memory behind it."""
    source, target, keys = filled(8), MHATokenToKVPoolHost(), page_keys(8)
    assert all(make(source).batch_set_v1(keys, source.slots(*range(8))))
    backend = make(target)
    process.pause()
    load = thread.submit(backend.batch_get_v1, keys, target.slots(*range(8)))
    stuck_in(backend, "loads", load)
    closing = threading.Thread(target=backend.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() or load.done(), "the engine may use memory again that is still written to"
    process.resume()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    right(load.result(PATIENCE_S), target, source)
    target.memory[:] = 0
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, target.slots(*range(8))) == [False] * 8
    assert backend.batch_set_v1(keys, target.slots(*range(8))) == [False] * 8
    assert not target.memory.any()
    assert backend._tally.values["survived_errors"] == 0
    again = make(target)  # attached again
    assert right(again.batch_get_v1(keys, target.slots(*range(8))), target, source) == 8


def test_a_worker_without_threads(node: Node) -> None:
    """The caller's thread runs it: the answer is there when submit returns, and after close there is none."""
    node.start()
    client = _native.Client(str(node.socket), TOKEN, "default", "default", bytes(32), 2.0)
    client.connect()
    worker = _native.Worker(client, threads=0)
    first, second = (worker.submit_names("exists", [b"nobody"]) for _ in range(2))
    assert [ticket for ticket, _ in worker.poll()] == [first, second]
    assert worker.poll() == []
    with pytest.raises(InvalidArgument):
        worker.submit_save(b"name" * 2, 4, b"odd", _native.PartTable([[]]), [0, 0], [0, 0])
    with pytest.raises(InvalidArgument, match="group_bytes"):
        worker.submit_save(b"name" * 2, 4, b"", _native.PartTable([[]]), [0, 0], [0, 0], group_bytes=5)
    worker.close()
    with pytest.raises(Closed, match="this worker is closed"):
        worker.submit_names("exists", [b"nobody"])
    client.close()


@pytest.mark.parametrize("seed", range(3))
def test_detached_at_any_time(make: Make, node: Node, seed: int) -> None:
    """Loads, saves and lookups of three threads while the backend is closed under them."""
    print(f"seed {seed}")
    node.start()
    source, keys = filled(seed), page_keys(8)
    assert all(make(source).batch_set_v1(keys, source.slots(*range(8))))
    target = MHATokenToKVPoolHost()
    backend = make(target)
    calls: list[Callable[[], Any]] = [
        lambda: backend.batch_exists(keys),
        lambda: backend.batch_get_v1(keys, target.slots(*range(8))),
        lambda: backend.batch_set_v1(keys, source.slots(*range(8))),
    ]
    under_way = threading.Barrier(len(calls) + 1)
    ended = threading.Event()

    def call(what: Callable[[], Any]) -> None:
        what()
        under_way.wait()
        while not ended.is_set():
            what()

    with ThreadPoolExecutor(len(calls)) as executor:
        futures = [executor.submit(call, each) for each in calls]
        under_way.wait(PATIENCE_S)
        for _ in range(random.Random(seed).randrange(200)):
            backend.batch_exists(keys)
        backend.close()
        ended.set()
        for future in futures:
            future.result(PATIENCE_S)
    assert backend._tally.values["survived_errors"] == 0


def test_an_engine_restarted_with_a_warm_pool(make: Make, process: processes.Node) -> None:
    """The first engine dies without a word: its pins and its half-done saves are nobody's afterwards."""
    source, keys = filled(9), page_keys(8)
    first = make(source)
    assert all(first.batch_set_v1(keys, source.slots(*range(8))))
    assert first.batch_exists(keys) == 8
    saved = source.view().copy()
    source.memory[:] = 0  # a new process has new memory
    second = make(source)
    assert second.batch_exists([*keys, *page_keys(1, seed=1)]) == 8
    assert second.batch_get_v1(keys, source.slots(*range(8))) == [True] * 8
    np.testing.assert_array_equal(source.view()[:8], saved[:8])
    assert process.metrics()["integrity"]


def test_a_page_half_gone_between_lookup_and_load(make: Make, node: Node) -> None:
    """One of a page's two objects is removed after SGLang was told that the page is there."""
    node.start()
    source, target, keys = filled(10), MHATokenToKVPoolHost(), page_keys(6)
    backend = make(source)
    assert all(backend.batch_set_v1(keys, source.slots(*range(6))))
    loader = make(target)
    assert loader.batch_exists(keys) == 6
    with Store(str(node.socket), token=TOKEN, fingerprint=backend._mark) as store:
        names = sorted(entry.key for entry in store.list(bytes.fromhex(keys[3])))
        assert len(names) == 2
        assert store.remove(names[1])
    got = loader.batch_get_v1(keys, target.slots(*range(6)))
    assert got == [True] * 3 + [False] * 3
    right(got, target, source)
    assert not target.view()[3:].any()
    assert loader.batch_exists(keys) == 3
    assert backend.batch_set_v1(keys, source.slots(*range(6))) == [True] * 6  # it is made whole
    assert loader.batch_exists(keys) == 6


@pytest.mark.parametrize("gone", ["kv", "sidecar"])
def test_a_group_half_gone_between_lookup_and_load(make: Make, node: Node, gone: str) -> None:
    """KV and what hangs on it (an indexer's page): SGLang takes the pages that both loaded."""
    node.start()
    source, target, keys = filled(11), MHATokenToKVPoolHost(), page_keys(6)
    states, loaded = MambaPoolHost(), MambaPoolHost()
    states.temporal[:] = np.random.default_rng(11).random(states.temporal.shape)
    backend, loader = make(source), make(target)
    backend.register_mem_host_pool_v2(states, "indexer")
    loader.register_mem_host_pool_v2(loaded, "indexer")
    transfer = Transfer("indexer", keys, list(range(6)))
    assert backend.batch_set_v2([transfer]) == {"indexer": [True] * 6}
    assert all(backend.batch_set_v1(keys, source.slots(*range(6))))
    assert loader.batch_exists_v2(keys, [Transfer("indexer", None)]).kv_hit_pages == 6
    with Store(str(node.socket), token=TOKEN, fingerprint=backend._mark) as store:
        kv, sidecar = [], []
        for entry in store.list(bytes.fromhex(keys[4])):
            (sidecar if len(entry.key) == 48 else kv).append(entry.key)
        assert (len(kv), len(sidecar)) == (2, 1)
        assert store.remove(kv[0] if gone == "kv" else sidecar[0])
    pages = loader.batch_get_v1(keys, target.slots(*range(6)))
    beside = loader.batch_get_v2([transfer])["indexer"]
    both = [here and there for here, there in zip(pages, beside, strict=True)]
    leading = both.index(False)
    assert leading == 4
    assert right(pages, target, source) >= leading
    np.testing.assert_array_equal(loaded.temporal[:leading], states.temporal[:leading])
    assert loader.batch_exists_v2(keys, [Transfer("indexer", None)]).kv_hit_pages == 4


@pytest.mark.parametrize("seed", range(2))
def test_objects_that_vanish_while_they_are_loaded(make: Make, node: Node, seed: int) -> None:
    """Another thread removes objects and puts them back, all the time: every page that is reported is
    right. (SGLang takes those before the first that is not.)"""
    node.start()
    shape = {"layers": 4, "tokens": 16, "heads": 2, "dim": 64}
    source, target, keys = filled(seed, **shape), MHATokenToKVPoolHost(**shape), page_keys(12, seed)
    backend, loader = make(source), make(target)
    slots = source.slots(*range(12))
    assert all(backend.batch_set_v1(keys, slots))
    choose, ended = random.Random(seed), threading.Event()

    def vanish() -> None:
        with Store(str(node.socket), token=TOKEN, fingerprint=backend._mark) as store:
            names = [entry.key for entry in store.list()]
            while not ended.is_set():
                store.remove(choose.sample(names, 3))
                backend.batch_set_v1(keys, slots)

    counts = set()

    def load() -> bool:
        target.memory[:] = 0
        counts.add(right(loader.batch_get_v1(keys, slots), target, source))
        return len(counts) > 1

    vanishing = threading.Thread(target=vanish)
    vanishing.start()
    try:
        eventually(load, "nothing ever vanished")
        for _ in range(300):
            load()
    finally:
        ended.set()
        vanishing.join(PATIENCE_S)
    assert loader._tally.values["survived_errors"] == 0


def test_sidecars_are_evicted_from_the_end_of_a_chain(make: Make, node: Node) -> None:
    """As the KV is: what is left of a prefix is worth something, however much else is stored meanwhile."""
    node.start(4 << 20)
    states, pool = MambaPoolHost(), filled(12)
    states.temporal = np.ones((12, 32768), np.float32)  # 128 KiB a page
    backend, keys = make(pool), page_keys(8)
    backend.register_mem_host_pool_v2(states, "indexer")
    assert all(backend.batch_set_v1(keys, pool.slots(*range(8))))
    assert all(backend.batch_set_v2([Transfer("indexer", keys, list(range(8)))])["indexer"])
    with Store(str(node.socket), token=TOKEN, fingerprint=backend._mark) as store:
        left = [True] * 8
        for other in range(40):
            assert backend.batch_set_v2([Transfer("indexer", page_keys(1, seed=50 + other), [9])])["indexer"]
            left = [any(len(each.key) == 48 for each in store.list(bytes.fromhex(key))) for key in keys]
            assert left == sorted(left, reverse=True), left
    assert not all(left)


@pytest.mark.parametrize("when", ["at start", "later"])
def test_without_a_master(make: Make, node: Node, caplog: pytest.LogCaptureFixture, when: str) -> None:
    """A node of a cluster whose master is not there, or dies: what this host has is served all the time, and
    what it lacks is a miss at once."""
    master = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
    master.start()
    address = master.addresses[0]
    if when == "at start":
        master.stop()
    node.server = server = _native.Server(
        str(node.socket),
        [("default", 16 << 20)],
        TOKEN,
        node_settings(),
        listen=["127.0.0.1:0"],
        master=address,
    )
    server.start()
    if when == "later":
        eventually(lambda: server.metrics()["master_joined"] == 1, "the node does not join")
    source, target, keys = filled(13), MHATokenToKVPoolHost(), page_keys(8)
    backend, loader = make(source), make(target)
    assert all(backend.batch_set_v1(keys[:4], source.slots(*range(4))))
    if when == "later":
        master.stop()
    started_s = time.monotonic()
    assert all(backend.batch_set_v1(keys, source.slots(*range(8))))
    assert loader.batch_exists(keys) == 8
    assert right(loader.batch_get_v1(keys, target.slots(*range(8))), target, source) == 8
    for seed in range(20):
        assert loader.batch_exists(page_keys(4, seed=20 + seed)) == 0
        assert not any(loader.batch_get_v1(page_keys(4, seed=20 + seed), target.slots(*range(4))))
    assert loader.batch_exists(keys) == 8
    assert time.monotonic() - started_s < 10, "questions wait for the dead master"
    assert backend._tally.values["survived_errors"] == loader._tally.values["survived_errors"] == 0
    if when == "later":  # it is said once, and counted, why there is no hit
        assert caplog.text.count("answers in part only") == 1
        assert loader._tally.values["partly_answered"] == 40


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/run/moonpool/node.sock"), ValueError("half written")]
)
def test_a_socket_folder_that_may_not_be_read(
    make: Make,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """What lies beside the socket (its token, its certificate) is refused or broken, at start and later: no
    call raises, it is said once, and the pool is joined when it is mended."""
    node.start()
    monkeypatch.setattr(pools, "RETRY_S", 0.0)
    usual = pools.PoolClient.dial

    def refused(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(pools.PoolClient, "dial", refused)
    source, keys = filled(14), page_keys(2)
    backend = make(source)
    for _ in range(3):
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, source.slots(0, 1)) == [False] * 2
        assert backend.batch_set_v1(keys, source.slots(0, 1)) == [False] * 2
    assert caplog.text.count("no pool at") == 1
    assert backend._tally.values["survived_errors"] == 0
    monkeypatch.setattr(pools.PoolClient, "dial", usual)
    assert backend.batch_set_v1(keys, source.slots(0, 1)) == [True] * 2
    monkeypatch.setattr(pools.PoolClient, "dial", refused)
    with pytest.raises(type(error)):
        make(source, {"require_pool": True})


def test_an_engine_that_answers_otherwise(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer SGLang, whose configuration lacks what is asked for: the server starts, without the pool."""
    node.start()
    monkeypatch.delattr(Engine, "get_total_num_kv_heads")
    source = filled(15)
    assert make(source).batch_exists(page_keys(1)) == 0
    assert "serves without the pool: AttributeError: " in caplog.text
    with pytest.raises(AttributeError):
        make(source, {"require_pool": True})


def test_a_node_that_hangs_holds_a_request_up_once(
    make: Make, process: processes.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question waits for the node, those behind it do not: v2's others, loads, other requests."""
    source, keys = filled(16), page_keys(4)
    backend = make(source)
    for name in ("indexer", "other"):
        backend.register_mem_host_pool_v2(MambaPoolHost(), name)
        assert all(backend.batch_set_v2([Transfer(name, keys, list(range(4)))])[name])
    assert all(backend.batch_set_v1(keys, source.slots(*range(4))))
    both = [Transfer("indexer", None), Transfer("other", None)]
    assert backend.batch_exists_v2(keys, both).kv_hit_pages == 4
    process.pause()
    asked: list[BlockingWorker] = []
    run = BlockingWorker.run

    def watched(worker: BlockingWorker, submit: Any) -> Any:
        asked.append(worker)
        return run(worker, submit)

    monkeypatch.setattr(BlockingWorker, "run", watched)
    started_s = time.monotonic()
    for _ in range(5):
        assert backend.batch_exists_v2(keys, both).kv_hit_pages == 0
        assert backend.batch_get_v2([Transfer(each.name, keys, list(range(4))) for each in both]) == {
            "indexer": [False] * 4,
            "other": [False] * 4,
        }
        assert backend.batch_get_v1(keys, source.slots(*range(4))) == [False] * 4
        assert backend.batch_set_v1(keys, source.slots(*range(4))) == [False] * 4
    assert len(asked) == 1
    assert time.monotonic() - started_s < 4 * pools.TIMEOUT_S
    process.resume()
    eventually(lambda: backend.batch_exists_v2(keys, both).kv_hit_pages == 4, "the pool does not come back")


def test_a_full_pool_is_said_again(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.start()
    source, keys = filled(17), page_keys(1)
    backend = make(source)
    for _ in range(2):
        backend._refused(1, "it is full")
        backend._refused(1, "it is full")
        assert backend.batch_set_v1(keys, source.slots(0)) == [True]
    assert caplog.text.count("it is full") == 2


@pytest.fixture
def cluster() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """cluster(*arguments of cluster_process.py) -> (the process, where it serves)"""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "cluster_process.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("who", ["master", "holder"])
def test_another_host_that_stands_still(
    make: Make, node: Node, folder: Path, caplog: pytest.LogCaptureFixture, cluster: Any, who: str
) -> None:
    """The master, or the node of another host that has the pages, is stopped in the middle of everything:
    requests are held up once, it is said why there is no hit, and all is found again afterwards."""
    master, address = cluster("master")
    holder, socket = cluster("node", str(folder / "holder.sock"), address)
    node.server = server = _native.Server(
        str(node.socket),
        [("default", 16 << 20)],
        TOKEN,
        node_settings(),
        listen=["127.0.0.1:0"],
        master=address,
    )
    server.start()
    eventually(lambda: server.metrics()["master_joined"] == 1, "the node does not join")
    source, target = filled(18), MHATokenToKVPoolHost()
    near, far = page_keys(4, seed=1), [page_keys(4, seed=2 + each) for each in range(8)]
    assert all(make(source).batch_set_v1(near, source.slots(*range(4))))
    distant = make(source, {"node": socket})
    for keys in far:
        assert all(distant.batch_set_v1(keys, source.slots(*range(4))))
    loader = make(target)
    eventually(lambda: loader.batch_exists(far[0]) == 4, "the other host's pages are not found")
    stopped = {"master": master, "holder": holder}[who]
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)  # a signal takes its time
    started_s = time.monotonic()
    for keys in far:
        if who == "holder" or keys != far[0]:  # where those of far[0] are is known without the master
            assert loader.batch_exists(keys) == 0
        assert right(loader.batch_get_v1(keys, target.slots(*range(4))), target, source) in (0, 4)
    waited_s = time.monotonic() - started_s
    print(f"{waited_s:.2f} s")
    assert waited_s < 3 * pools.TIMEOUT_S
    assert caplog.text.count("answers in part only") == 1
    eventually(lambda: loader.batch_exists(near) == 4, "what this host has is not found")
    os.kill(stopped.pid, signal.SIGCONT)
    eventually(lambda: loader.batch_exists(far[1]) == 4, "the other host's pages are not found again")
    assert loader._tally.values["survived_errors"] == 0
