"""MoonpoolTransferEngine between two real processes, and alone."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from moonpool.connectors.sglang.transfer import engine as engine_module
from moonpool.connectors.sglang.transfer.engine import MoonpoolTransferEngine
from moonpool.connectors.sglang.transfer.memory import NotRegistered, Registrations
from moonpool.connectors.sglang.transfer.settings import LISTEN, TRANSPORTS, Settings
from moonpool.core.errors import ConfigError, InvalidArgument
from tests.core.store_bed import until
from tests.soft_card import COMPILER, compile_library, soft_card, watch_questions

ROOT = Path(__file__).parents[4]
BYTES = 1 << 20


class Peer:
    """peer.py in a process."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.connectors.sglang.transfer.peer", str(BYTES)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = json.loads(self._line())
        self.session, self.address = said["session"], said["address"]

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """Its exit status after it ended by itself."""
        self.process.communicate(timeout=30)
        return self.process.returncode


@contextmanager
def peer(**environment: str) -> Iterator[Peer]:
    one = Peer(**environment)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture
def engine() -> Iterator[MoonpoolTransferEngine]:
    one = MoonpoolTransferEngine("127.0.0.1")
    yield one
    one.close()


class Memory:
    """Bytes at an address that stays."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self._held = ctypes.c_char.from_buffer(self.content)
        self.address = ctypes.addressof(self._held)


@pytest.fixture
def memory(rng: random.Random) -> Memory:
    return Memory(rng.randbytes(BYTES))


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_a_batch_arrives_whole_in_one_native_call(
    transports: str, memory: Memory, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRANSPORTS, transports)
    engine = MoonpoolTransferEngine("127.0.0.1", gpu_id=1, ib_device="mlx5_0")
    with peer() as other:
        assert engine.batch_register([memory.address], [BYTES]) == 0
        piece = BYTES // 64
        order = rng.sample(range(64), 64)
        expected = bytearray(BYTES)
        for source, target in enumerate(order):
            expected[target * piece : (target + 1) * piece] = memory.content[source * piece :][:piece]
        code = engine.batch_transfer_sync(
            other.session,
            [*(memory.address + n * piece for n in range(64)), memory.address],
            [*(other.address + n * piece for n in order), other.address],
            [*([piece] * 64), 0],  # slices of nothing are left out
        )
        assert code == 0
        assert other.ask("digest") == hashlib.sha256(expected).hexdigest()
        assert engine.engine.metrics()["transfers_total"] == 1
        if transports == "tcp":
            assert engine.engine.metrics()["tcp_write_bytes_total"] == BYTES
        assert engine.transfer_sync(other.session, memory.address, other.address, BYTES) == 0
        assert other.ask("digest") == hashlib.sha256(memory.content).hexdigest()
        assert engine.batch_transfer_sync(other.session, [memory.address], [other.address], [0]) == 0
        assert other.end() == 0  # without close()
    engine.close()


def test_who_it_is(engine: MoonpoolTransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _, port = engine.get_session_id().rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert engine.get_engine() is engine.engine
    assert engine.get_ib_device() is None
    monkeypatch.setenv("MC_FORCE_TCP", "1")  # as SGLang sets it for mooncake_tcp
    other = MoonpoolTransferEngine("::1", ib_device="mlx5_0")
    assert other.get_ib_device() == ""
    assert other.session_id.startswith("[::1]:")
    assert engine.send_probe(other.session_id) == 0
    other.close()
    other.close()


def test_a_dead_peer_is_a_code_and_one_sentence(
    engine: MoonpoolTransferEngine, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    engine.register(memory.address, BYTES)
    with peer() as other:
        assert engine.send_probe(other.session) == 0
        other.kill()
        started_s = time.monotonic()
        with caplog.at_level(logging.ERROR):
            codes = [
                engine.transfer_sync(other.session, memory.address, other.address, BYTES) for _ in range(20)
            ]
        assert all(code < 0 for code in codes)
        assert engine.send_probe(other.session) < 0
        assert time.monotonic() - started_s < 10
        said = [record.message for record in caplog.records if "transfer to" in record.message]
        assert 1 <= len(said) <= 6, said
        assert all(other.session in sentence for sentence in said)


def test_another_peer_at_the_same_address_is_reached_and_not_taken_for_the_first(
    engine: MoonpoolTransferEngine, memory: Memory, free_port: int
) -> None:
    engine.register(memory.address, BYTES)
    listen = f":{free_port}"
    zeros = hashlib.sha256(bytes(BYTES)).hexdigest()
    with peer(**{LISTEN: listen}) as first:
        assert engine.transfer_sync(first.session, memory.address, first.address, BYTES) == 0
    with peer(**{LISTEN: listen}) as second:
        assert second.session == first.session
        # The first call may find out; nothing of it is written to a process that did not ask for it.
        if engine.transfer_sync(second.session, memory.address, second.address, BYTES) < 0:
            assert second.ask("digest") == zeros
            assert engine.send_probe(second.session) == 0
            assert engine.transfer_sync(second.session, memory.address, second.address, BYTES) == 0
        assert second.ask("digest") == hashlib.sha256(memory.content).hexdigest()


def test_a_peer_with_another_token_is_no_peer(
    engine: MoonpoolTransferEngine, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    engine.register(memory.address, BYTES)
    with peer(MOONPOOL_CLUSTER_TOKEN="another token than this test's") as other:
        assert engine.transfer_sync(other.session, memory.address, other.address, BYTES) < 0
        assert engine.send_probe(other.session) < 0
        assert "token" in caplog.text
        assert other.ask("digest") == hashlib.sha256(bytes(BYTES)).hexdigest()


def test_a_peer_that_stands_still_holds_nobody_up(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to work is tried until it does: any peer may stand still for half a second."""
    monkeypatch.setenv(TRANSPORTS, "tcp")
    monkeypatch.setattr(engine_module, "TIMEOUT_S", 0.5)
    engine = MoonpoolTransferEngine("127.0.0.1")
    engine.register(memory.address, BYTES)

    def answers(one: Peer) -> bool:
        return engine.send_probe(one.session) == 0

    def is_written(one: Peer) -> bool:
        return engine.transfer_sync(one.session, memory.address, one.address, BYTES) == 0

    with peer() as other, peer() as another:
        until(lambda: answers(other))
        other.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.process.pid, os.WSTOPPED | os.WNOWAIT)  # a signal takes its time
        started_s = time.monotonic()
        assert not is_written(other)
        assert not answers(other)
        assert time.monotonic() - started_s < 10
        until(lambda: is_written(another))
        other.process.send_signal(signal.SIGCONT)
        assert other.ask("digest")  # it goes on
        until(lambda: answers(other))
        until(lambda: is_written(other))
        assert other.ask("digest") == hashlib.sha256(memory.content).hexdigest()
    engine.close()


def test_what_a_peer_took_back_is_written_no_more(
    engine: MoonpoolTransferEngine, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    engine.register(memory.address, BYTES)
    with peer() as other:
        assert other.ask("deregister") == "done"
        assert engine.transfer_sync(other.session, memory.address, other.address, BYTES) < 0
        assert "transfer to" in caplog.text
        assert other.ask("digest") == hashlib.sha256(bytes(BYTES)).hexdigest()
        assert engine.send_probe(other.session) == 0  # the peer itself lives


def test_bad_input_is_a_code(engine: MoonpoolTransferEngine, memory: Memory) -> None:
    with peer() as other:
        assert engine.transfer_sync(other.session, memory.address, other.address, 8) < 0  # not registered
        engine.register(memory.address, BYTES)
        assert engine.batch_transfer_sync(other.session, [memory.address], [], [8]) < 0
        assert engine.batch_transfer_sync(other.session, [memory.address], [], [8, 0]) < 0
        assert engine.transfer_sync("nobody", memory.address, other.address, 8) < 0
        assert engine.send_probe("127.0.0.1:1") < 0
        assert engine.transfer_sync(other.session, memory.address, 4096, 8) < 0  # no memory of the peer
        assert engine.transfer_sync(other.session, memory.address, other.address, 8) == 0
    with pytest.raises(RuntimeError, match="cannot deregister"):
        engine.deregister(1)
    assert engine.batch_register([1, 2], [3]) < 0
    assert engine.batch_register([memory.address + 8], [BYTES]) < 0  # overlaps in part
    assert engine.batch_deregister([1, memory.address]) < 0
    with pytest.raises(RuntimeError, match="cannot deregister"):
        engine.deregister(memory.address)  # the call before took it back nevertheless
    engine.close()
    assert engine.batch_register([memory.address], [8]) < 0
    assert engine.transfer_sync("127.0.0.1:1", memory.address, 8, 8) < 0
    with pytest.raises(RuntimeError):
        engine.register(memory.address, 8)


def test_many_threads_share_a_peer(engine: MoonpoolTransferEngine, memory: Memory) -> None:
    engine.register(memory.address, BYTES)
    piece = BYTES // 8
    codes: list[int] = []
    with peer() as other:

        def send(number: int) -> None:
            for _ in range(20):
                at = number * piece
                codes.append(
                    engine.transfer_sync(other.session, memory.address + at, other.address + at, piece)
                )

        threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert codes == [0] * 160
        assert other.ask("digest") == hashlib.sha256(memory.content).hexdigest()


def test_two_engines_in_one_process_register_the_same_memory(memory: Memory) -> None:
    one, two = MoonpoolTransferEngine("127.0.0.1"), MoonpoolTransferEngine("127.0.0.1")
    half = BYTES // 2
    for engine in (one, two):
        assert engine.batch_register([memory.address, memory.address + half], [half, half]) == 0
    one.close()
    three = MoonpoolTransferEngine("127.0.0.1")
    three.register(memory.address, half)
    first = bytes(memory.content[:half])
    assert three.transfer_sync(two.session_id, memory.address, memory.address + half, half) == 0
    assert bytes(memory.content[half:]) == first
    for engine in (two, three):
        engine.close()


def test_a_range_stays_registered_until_its_last_user(engine: MoonpoolTransferEngine, memory: Memory) -> None:
    table = Registrations(engine.engine)
    start = memory.address
    table.add(start, 4096)
    table.add(start, 4096)
    table.add(start + 1024, 512)  # inside
    table.add(start + 8192, 4096)
    assert len(table) == 2
    for overlapping in ((start + 2048, 4096), (start, 8192), (start + 6144, 4096)):
        with pytest.raises(InvalidArgument, match="overlap"):
            table.add(*overlapping)
    for address in (start, start + 1024, start):
        assert len(table) == 2
        table.remove(address)
    assert len(table) == 1
    with pytest.raises(InvalidArgument, match="nothing is registered"):
        table.remove(start)
    with pytest.raises(InvalidArgument, match="overlap"):
        table.add_all([start, start + 10_000], [4096, 4096])
    assert len(table) == 1  # all or none
    table.add(start, 12_288 - 4096)
    table.remove(start)
    table.remove(start + 8192)
    assert len(table) == 0


def test_memory_that_the_cpu_cannot_read_stops_the_start(
    engine: MoonpoolTransferEngine, memory: Memory
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    reserved = libc.mmap(None, 8192, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # as a GPU's is
    with pytest.raises(RuntimeError, match="mapped without access"):
        engine.batch_register([memory.address, reserved], [BYTES, 8192])
    with pytest.raises(RuntimeError, match="mapped without access"):
        engine.register(reserved, 8192)
    with pytest.raises(NotRegistered):
        Registrations(engine.engine).add(reserved + 4096, 16)
    engine.register(memory.address, BYTES)  # all or none: it was taken back
    libc.munmap(ctypes.c_void_p(reserved), 8192)


def test_another_host_needs_a_token_and_an_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="needs a cluster token"):
        MoonpoolTransferEngine("10.255.255.1")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "a token of this test alone")
    with pytest.raises(ConfigError, match=LISTEN):
        MoonpoolTransferEngine("10.255.255.1")
    monkeypatch.setenv(LISTEN, "0.0.0.0")
    engine = MoonpoolTransferEngine("10.255.255.1")
    assert engine.session_id.startswith("10.255.255.1:")
    engine.close()


def test_it_takes_the_first_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv(LISTEN, f":{port}")
        with pytest.raises(ConfigError, match="in use"):
            MoonpoolTransferEngine("127.0.0.1")
        monkeypatch.setenv(LISTEN, f":{port}-{min(port + 20, 65_535)}")
        engine = MoonpoolTransferEngine("127.0.0.1")
    assert port < int(engine.session_id.rpartition(":")[2]) <= port + 20
    engine.close()


@pytest.mark.parametrize(
    ("listen", "host", "ports"),
    [
        ("", "", range(1)),
        ("0.0.0.0", "0.0.0.0", range(1)),
        ("[::1]", "::1", range(1)),
        ("[::]:4100-4107", "::", range(4100, 4108)),
        (":4100", "", range(4100, 4101)),
        ("prefill-7:4100", "prefill-7", range(4100, 4101)),
    ],
)
def test_listen(listen: str, host: str, ports: range) -> None:
    assert Settings.read({LISTEN: listen}) == Settings(host, ports, None)


@pytest.mark.parametrize("listen", ["::1", "a:b", ":7-6", ":65536", ":1-", "1:2:3", "[::1"])
def test_listen_that_is_none(listen: str) -> None:
    with pytest.raises(ConfigError, match=LISTEN):
        Settings.read({LISTEN: listen})


def test_a_transport_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORTS, "pigeon")
    with pytest.raises((ConfigError, InvalidArgument), match="pigeon"):
        MoonpoolTransferEngine("127.0.0.1")


def test_sentences_are_kept_few(engine: MoonpoolTransferEngine, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(engine_module.SAID_MAX + 10):
        engine.batch_deregister([number + 1])
    assert len(engine._said) <= engine_module.SAID_MAX


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_memory_of_a_card_is_handed_over(tmp_path: Path) -> None:
    with soft_card(compile_library(tmp_path)) as card:
        mine, theirs = card.array((100_000,)), card.array((100_000,))
        mine.view[:] = np.arange(100_000)
        prefill, decode = MoonpoolTransferEngine("127.0.0.1"), MoonpoolTransferEngine("127.0.0.1")
        assert prefill.batch_register([mine.address], [mine.view.nbytes]) == 0
        assert decode.batch_register([theirs.address], [theirs.view.nbytes]) == 0
        pages = [4096 * page for page in range(90)]
        random.Random(7).shuffle(pages)
        code = prefill.batch_transfer_sync(
            decode.session_id,
            [mine.address + page for page in pages],
            [theirs.address + page for page in pages],
            [4096] * len(pages),
        )
        assert code == 0
        moved = 4096 * len(pages) // 4
        assert np.array_equal(theirs.view[:moved], mine.view[:moved])
        assert not theirs.view[moved:].any()
        for engine in (prefill, decode):
            engine.close()


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_transfer_that_failed_ends_when_the_card_makes_no_copies_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "TIMEOUT_S", 3.0)
    with soft_card(compile_library(tmp_path), "late") as card:
        mine, theirs = card.array((1000,)), np.zeros(1000, np.float32)
        prefill, decode = MoonpoolTransferEngine("127.0.0.1"), MoonpoolTransferEngine("127.0.0.1")
        assert prefill.batch_register([mine.address], [mine.view.nbytes]) == 0
        assert decode.batch_register([theirs.ctypes.data], [theirs.nbytes]) == 0
        codes: list[int] = []
        asked = watch_questions(prefill.engine)

        def transfer() -> None:
            codes.append(
                prefill.transfer_sync(decode.session_id, mine.address, theirs.ctypes.data, theirs.nbytes)
            )

        card.hang(1)
        thread = threading.Thread(target=transfer)
        thread.start()
        for _ in range(3):
            assert asked.acquire(timeout=20)
        assert codes == []
        card.unhang()
        thread.join(20)
        assert codes == [engine_module.FAILED]
        for engine in (prefill, decode):
            engine.close()
