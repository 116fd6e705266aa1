"""LMCache's mooncakestore://, unchanged, over the drop-in ``mooncake``, when something is missing or is not
what it was: a miss, never other bytes, never a hang.

While there is no pool this connector of LMCache's promises every chunk: it takes an error of is_exist (-1)
for yes. What it then gets is nothing.
"""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.token_database import ChunkedTokenDatabase

from tests.connectors.lmcache.real.beds import Backend
from tests.core.master_bed import MasterProcess, environment
from tests.core.store_bed import until
from tests.ports import held_ports

ROOT = Path(__file__).resolve().parents[4]
ANSWER_S = 15.0  # some calls of this connector, each of at most transfer_timeout
CHUNKS = range(50)
HEAVY = pytest.mark.heavy
META = pytest.mark.parametrize("meta", [pytest.param(True, marks=HEAVY), False], ids=["meta", "zero-copy"])
Make = Callable[..., Backend]


class NodeOfTheMaster:
    """A node in a process of its own, which others' bytes lie in."""

    def __init__(self, master: str, folder: Path, mebibytes: int = 64) -> None:
        command = [sys.executable, "-m", "moonpool", "node", "--dram", f"{mebibytes}MiB", "--http", "off"]
        command += ["--socket", str(folder / "segment.sock"), "--listen", "127.0.0.1:0", "--master", master]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(autouse=True)
def _drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "connectors" / "mooncake"))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def master() -> Iterator[MasterProcess]:
    process = MasterProcess()
    yield process
    process.close()


@pytest.fixture
def start(master: MasterProcess, folder: Path) -> Iterator[Callable[..., NodeOfTheMaster]]:
    started: list[NodeOfTheMaster] = []

    def start(mebibytes: int = 64) -> NodeOfTheMaster:
        started.append(NodeOfTheMaster(master.address, folder, mebibytes))
        until(lambda: "alive" in master.states().values(), 60)
        return started[-1]

    yield start
    for node in started:
        node.kill()


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Backend] = []

    def make(address: str, meta: bool = True, **options: Any) -> Backend:
        """Without a segment of its own."""
        extra = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": address,
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": 1 << 20,
            "transfer_timeout": 5,
            "save_chunk_meta": meta,
        }
        made.append(Backend(remote_url=f"mooncakestore://{address}", extra_config=extra, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def stores(backend: Backend, number: int) -> bool:
    backend.put([number])
    return backend.get([number]) == [16]


@META
def test_restart_another_type_and_another_model(
    meta: bool, master: MasterProcess, start: Callable[..., NodeOfTheMaster], make: Make
) -> None:
    start()
    first = make(master.address, meta)
    until(lambda: stores(first, 1))
    first.put([2, 3])
    again = make(master.address, meta)
    assert again.contains([1, 2, 3, 4]) == 3
    assert again.get([1, 2, 3, 4]) == [16, 16, 16, None]
    for other in ({"dtype": torch.float16}, {"model": "org/other"}):
        stranger = make(master.address, meta, **other)
        assert stranger.contains([1]) == 0
        assert stranger.get([1]) == [None]


def test_chunk_sizes_have_no_key_in_common() -> None:
    """LMCache's keys hash the tokens of a chunk and of all before it, for every plug point."""
    keys: list[set[int]] = []
    for chunk_size in (16, 32, 48):
        backend = Backend(chunk_size=chunk_size)
        database = ChunkedTokenDatabase(backend.config, backend.metadata)
        keys.append({key.chunk_hash for _, _, key in database.process_tokens(list(range(480)))})
        backend.close()
    assert [len(found) for found in keys] == [30, 15, 10]
    assert len(set.union(*keys)) == 30 + 15 + 10


@HEAVY
def test_no_master_at_start_and_later(folder: Path, make: Make) -> None:
    with held_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        backend = make(address)
        backend.put([1])
        assert backend.get([1]) == [None]
    late = MasterProcess(listen=address)
    node = NodeOfTheMaster(address, folder)
    try:
        assert until(lambda: stores(backend, 2), 30)
    finally:
        node.kill()
        late.close()


@HEAVY
def test_no_node_at_start_and_later(
    master: MasterProcess, start: Callable[..., NodeOfTheMaster], make: Make
) -> None:
    backend = make(master.address)
    backend.put([1])
    assert backend.get([1]) == [None]
    start()
    assert until(lambda: stores(backend, 2))


@pytest.mark.parametrize("work", [pytest.param("store", marks=HEAVY), "retrieve"])
def test_a_node_killed_in_the_middle(
    work: str, master: MasterProcess, start: Callable[..., NodeOfTheMaster], make: Make
) -> None:
    node = start()
    backend = make(master.address)
    until(lambda: stores(backend, 1000))
    backend.put(CHUNKS)

    def run(numbers: Sequence[int]) -> None:
        backend.put(numbers) if work == "store" else backend.get(numbers)

    # Half of what is asked for is not there: what is there may come from shared memory, without the node.
    numbers = range(100, 150) if work == "store" else range(25, 75)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        node.pause()
        working = pool.submit(run, numbers)
        assert not concurrent.futures.wait([working], 0.1).done
        node.kill()
        working.result(ANSWER_S)
    backend.get(numbers)  # looks at the bytes
    start()
    assert until(lambda: stores(backend, 2000), 30)
    assert backend.get([0]) == [None]


@HEAVY
def test_a_full_pool(master: MasterProcess, start: Callable[..., NodeOfTheMaster], make: Make) -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    start(8)
    backend = make(master.address)
    until(lambda: stores(backend, 1))
    ballast = MooncakeDistributedStore()
    assert ballast.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master.address) == 0
    config = ReplicateConfig()
    config.with_hard_pin = True
    for size in (1 << 20, 64 << 10, 4 << 10):
        for number in range(1000):
            if ballast.put(f"ballast {size} {number}", bytes(size), config) != 0:
                break
    numbers = range(100, 400)  # more than what it had leased before it was full
    backend.put(numbers)
    held = [number for number in numbers if backend.contains([number])]
    assert len(held) < len(numbers)
    assert backend.get(held) == [16] * len(held)
    ballast.close()
    assert until(lambda: stores(backend, 2000))


@HEAVY
def test_a_wrong_token(
    master: MasterProcess, start: Callable[..., NodeOfTheMaster], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another token")
    backend = make(master.address)
    backend.put([1])
    assert backend.get([1]) == [None]
