"""TLS of transfer engines' connections: what a sniffer sees, which peers are refused and how, cuts."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from moonpool import AsyncTransferEngine, Batch, TransferEngine
from moonpool.core.config.paths import socket_tls
from moonpool.core.errors import AuthError, ConfigError, Error, ProtocolError, Unavailable
from moonpool.core.service.control_tls import control_settings
from moonpool.core.service.data_tls import EngineTls, engine_tls
from tests.disagg_proxy.key_updates import Updater

from .store_bed import MIB, TOKEN, until
from .tls_bed import MAGIC, Sniffer, made, pem, variables

__all__ = ["pem"]

PATIENCE_S = 20.0


@pytest.fixture
def data(pem: Callable[[str], str]) -> dict[str, str]:
    """[cluster] of engines, without mutual proof."""
    return {
        "tls_data": "on",
        "tls_cert": pem("master"),
        "tls_key": pem("test-key"),
        "tls_ca": pem("authority"),
    }


@pytest.fixture
def engine() -> Iterator[Callable[..., TransferEngine]]:
    """engine(cluster, name): closed at the end. TCP alone, as between hosts."""
    with ExitStack() as stack:

        def make(cluster: dict[str, str], name: str = "here", **options: Any) -> TransferEngine:
            own: dict[str, Any] = {"token": TOKEN, "transports": ["tcp"], "metadata": ""}
            own |= {"timeout_s": PATIENCE_S, "tls": engine_tls(made(cluster))} | options
            return stack.enter_context(TransferEngine(name, **own))

        yield make


@pytest.mark.parametrize("mode", ["off", "on", "mutual"])
def test_what_a_sniffer_sees_between_two_engines(
    engine: Callable[..., TransferEngine], data: dict[str, str], mode: str
) -> None:
    data["tls_data"] = mode
    here, there = engine(data), engine(data, "there")
    telling = b"the bytes of a block " * 200
    sniffer = Sniffer(there.addresses[0])
    try:
        segment = here.open(sniffer.address)
        near, far = here.allocate(len(telling)), there.allocate(len(telling))
        near.view[: len(telling)] = telling
        here.write(segment, near.address, far.address, len(telling), notify=b"telling message")
        assert bytes(far.view[: len(telling)]) == telling
        near.view[: len(telling)] = bytes(len(telling))
        here.read(segment, near.address, far.address, len(telling))
        assert bytes(near.view[: len(telling)]) == telling
        assert [note.message for note in there.notifications(PATIENCE_S)] == [b"telling message"]
        seen = sniffer.passed
    finally:
        sniffer.close()
    texts = (MAGIC, telling[:40], b"telling message", b"there")
    assert [text in seen for text in texts] == [mode == "off"] * len(texts)
    assert TOKEN not in seen


def test_small_ranges_share_records(engine: Callable[..., TransferEngine], data: dict[str, str]) -> None:
    """A record costs more than the copy of a small range into it."""
    here, there = engine(data, connections_per_peer=1), engine(data, "there")
    near, far = here.allocate(MIB), there.allocate(MIB)
    near.view[:] = os.urandom(MIB)
    between = Sniffer(there.addresses[0])
    try:
        segment = here.open(between.address)
        before = len(between.up)
        count, size = 256, 64
        near_at = [near.address + i * 2 * size for i in range(count)]
        far_at = [far.address + i * 2 * size for i in range(count)]
        here.write(segment, near_at, far_at, [size] * count)
        for i in range(count):
            assert far.view[i * 128 : i * 128 + size] == near.view[i * 128 : i * 128 + size]
        sent, records = between.up[before:], 0
        while sent:
            assert sent[0] == 23  # application data
            sent = sent[5 + int.from_bytes(sent[3:5], "big") :]
            records += 1
        assert records < 20
    finally:
        between.close()


@contextmanager
def no_memory_files() -> Iterator[None]:
    """What TLS copies through cannot be had: as without free descriptors, of which sockets need some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_connection_that_could_not_copy_is_refused_when_it_is_made(
    engine: Callable[..., TransferEngine], data: dict[str, str]
) -> None:
    """On either side, in one sentence. What has its memory goes on, and a plain one needs none."""
    here, there, other = engine(data), engine(data, "there"), engine(data, "other")
    near, far = bytearray(os.urandom(MIB)), bytearray(MIB)
    near_at, far_at = here.register(near).address, other.register(far).address
    plain, plain_there = engine({}, "plain"), engine({}, "plain there")
    plain_near, plain_far = bytearray(os.urandom(MIB)), bytearray(MIB)
    plain_at, plain_far_at = plain.register(plain_near).address, plain_there.register(plain_far).address
    with no_memory_files():
        with pytest.raises(Error, match="no memory that TLS copies through can be had: File too large"):
            open_at(here, there.addresses[0])
        segment = open_at(plain, plain_there.addresses[0])
        for size in (64, 4096, MIB):
            plain.write(segment, plain_at, plain_far_at, size)
            plain.read(segment, plain_at, plain_far_at, size)
    assert plain_far == plain_near
    segment = open_at(here, other.addresses[0])
    with no_memory_files():
        with pytest.raises(Error, match="the peer refuses the connection: no memory that TLS copies"):
            open_at(here, there.addresses[0])
        for size in (64, 4096, MIB):
            here.write(segment, near_at, far_at, size)
            here.read(segment, near_at, far_at, size)
    assert far == near
    assert there.metrics()["connections_refused_total"] >= 1


def copied_through() -> set[str]:
    return {row for row in Path("/proc/self/maps").read_text().splitlines() if "moonpool-tls" in row}


def test_plain_engines_have_nothing_of_tls(engine: Callable[..., TransferEngine]) -> None:
    """No memory to copy through, no thread, no journal: small pieces of registered memory as before."""
    threads, mapped = set(threading.enumerate()), copied_through()
    here, there = engine({}), engine({}, "there")
    assert here._native.notes is None
    near, far = bytearray(os.urandom(MIB)), bytearray(MIB)
    near_at, far_at = here.register(near).address, there.register(far).address
    segment = here.open(there.addresses[0])
    for size in (64, 4096, MIB):
        here.write(segment, near_at, far_at, size)
        assert far[:size] == near[:size]
        near[:size] = bytes(size)
        here.read(segment, near_at, far_at, size)
        assert far[:size] == near[:size]
    assert copied_through() <= mapped
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("own", [True, False], ids=["allocated", "registered"])
def test_slices_of_every_size_pass_both_ways_by_many_threads(
    engine: Callable[..., TransferEngine], data: dict[str, str], rng: random.Random, own: bool
) -> None:
    """Also small ones, of which TLS holds some decrypted when the next are asked for."""
    here, there = engine(data), engine(data, "there")
    threads, nbytes = 4, 8 * MIB
    seeds = [rng.randrange(1 << 30) for _ in range(threads)]

    def memory(at: TransferEngine) -> tuple[int, memoryview]:
        if own:
            region = at.allocate(nbytes)
            return region.address, region.view
        held = bytearray(nbytes)
        return at.register(held).address, memoryview(held)

    def run(seed: int) -> None:
        rng = random.Random(seed)
        segment = here.open(there.addresses[0])
        (near, near_view), (far, far_view) = memory(here), memory(there)
        near_view[:] = rng.randbytes(nbytes)
        far_view[:] = rng.randbytes(nbytes)
        for _ in range(12):
            most = rng.choice([100, 5000, 70_000, 3 * MIB])
            at, rows = 0, []
            while at < nbytes and len(rows) < 400:
                size = min(rng.randrange(1, most + 1), nbytes - at)
                rows.append((at, size, rng.choice("rw")))
                at += size
            expected_near, expected_far = bytearray(near_view), bytearray(far_view)
            for begin, size, op in rows:
                part = slice(begin, begin + size)
                if op == "r":
                    expected_near[part] = far_view[part]
                else:
                    expected_far[part] = near_view[part]
            for op, verb in (("r", here.read), ("w", here.write)):
                chosen = [(begin, size) for begin, size, each in rows if each == op]
                if chosen:
                    verb(
                        segment,
                        [near + begin for begin, _ in chosen],
                        [far + begin for begin, _ in chosen],
                        [size for _, size in chosen],
                    )
            assert near_view == expected_near
            assert far_view == expected_far

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, seeds))
    assert there.metrics()["served_tcp_write_bytes_total"] > 0


def test_many_transfers_that_no_caller_waits_for(
    engine: Callable[..., TransferEngine], data: dict[str, str]
) -> None:
    """Driven by I/O threads, over several connections."""
    here, there = engine(data, connections_per_peer=4), engine(data, "there")
    segment = here.open(there.addresses[0])
    near, far = here.allocate(32 * MIB), there.allocate(32 * MIB)
    near.view[:] = os.urandom(32 * MIB)
    begins = range(0, 32 * MIB, MIB // 2)
    running = [
        here.submit(Batch("write", segment, [near.address + at], [far.address + at], [MIB // 2]))
        for at in begins
    ]
    for transfer in running:
        transfer.result(PATIENCE_S)
    assert bytes(far.view) == bytes(near.view)


@pytest.mark.parametrize(
    ("server", "client", "kind", "sentence"),
    [
        ({}, {"tls_ca": "caller"}, AuthError, "set cluster.tls_ca to the authorities that vouch for it"),
        ({"tls_cert": "master-expired"}, {}, AuthError, "has expired"),
        ({"tls_cert": "master-elsewhere"}, {}, AuthError, "or set cluster.tls_data_name to one"),
        (
            {"tls_data": "mutual"},
            {"tls_data": "on"},
            AuthError,
            'set cluster.tls_data = "mutual" and cluster.tls_cert',
        ),
        ({}, {"tls_data": "off"}, ProtocolError, "this port speaks TLS only; set cluster.tls_data"),
        (
            {"tls_data": "off"},
            {},
            ProtocolError,
            'does not speak TLS, and this process must; set cluster.tls_data there, or set it to "off" here',
        ),
    ],
)
def test_an_engine_that_is_refused_learns_why_and_what_to_do(
    engine: Callable[..., TransferEngine],
    data: dict[str, str],
    pem: Callable[[str], str],
    server: dict[str, str],
    client: dict[str, str],
    kind: type[Error],
    sentence: str,
) -> None:
    def settings(change: dict[str, str]) -> dict[str, str]:
        return data | {n: pem(v) if n in ("tls_cert", "tls_ca") else v for n, v in change.items()}

    there = engine(settings(server), "there")
    here = engine(settings(client))
    with pytest.raises(kind) as raised:
        open_at(here, there.addresses[0])
    assert sentence in str(raised.value)


def test_the_engine_that_refuses_says_so_too(
    engine: Callable[..., TransferEngine], data: dict[str, str], pem: Callable[[str], str], caplog: Any
) -> None:
    there = engine(data | {"tls_data": "mutual"}, "there")
    with caplog.at_level(logging.WARNING, "moonpool.transfer"):
        with pytest.raises(AuthError):
            open_at(engine(data), there.addresses[0])
        with pytest.raises(ProtocolError):
            open_at(engine({}), there.addresses[0])
        until(
            lambda: "its certificate is not trusted" in caplog.text or "TLS handshake failed" in caplog.text
        )
        until(lambda: "this port speaks TLS only; set cluster.tls_data" in caplog.text)
    assert there.metrics()["handshakes_refused_total"] >= 2


def open_at(engine: TransferEngine, address: str) -> Any:
    """Also on a machine that stands still before the first word, for which a port waits 250 ms."""
    while True:
        try:
            return engine.open(address)
        except Unavailable as error:
            if "gave up before it heard from here" not in str(error):
                raise


def test_a_name_for_all_engines(engine: Callable[..., TransferEngine], data: dict[str, str]) -> None:
    address = engine(data, "there").addresses[0]
    open_at(engine(data | {"tls_data_name": "localhost"}), address)
    with pytest.raises(AuthError, match=r"is not for other\.example"):
        open_at(engine(data | {"tls_data_name": "other.example"}), address)


def test_an_expired_certificate_is_replaced_without_a_restart(
    engine: Callable[..., TransferEngine], data: dict[str, str], pem: Callable[[str], str], tmp_path: Path
) -> None:
    followed = tmp_path / "followed.pem"
    shutil.copy(pem("master-expired"), followed)
    here, there = engine(data), engine(data | {"tls_cert": str(followed)}, "there")
    with pytest.raises(AuthError, match="has expired"):
        open_at(here, there.addresses[0])
    shutil.copy(pem("master"), tmp_path / "fresh.pem")
    os.replace(tmp_path / "fresh.pem", followed)
    near, far = here.allocate(4096), there.allocate(4096)
    near.view[:] = b"a" * 4096
    here.write(open_at(here, there.addresses[0]), near, far.address)
    assert bytes(far.view) == b"a" * 4096


def test_files_that_a_caller_cannot_use_are_told_in_the_log(
    engine: Callable[..., TransferEngine], data: dict[str, str], tmp_path: Path, caplog: Any
) -> None:
    followed = tmp_path / "followed.pem"
    shutil.copy(data["tls_ca"], followed)
    here, there = engine(data | {"tls_ca": str(followed)}, listen=None), engine(data, "there")
    (tmp_path / "broken.pem").write_text("no certificate")
    os.replace(tmp_path / "broken.pem", followed)
    with caplog.at_level(logging.WARNING, "moonpool.transfer"):
        open_at(here, there.addresses[0])
        until(lambda: "the files from before are in use" in caplog.text)
    assert str(followed) in caplog.text


def test_an_engine_that_is_dropped_unclosed_frees_its_port(data: dict[str, str]) -> None:
    """As one in plain: the thread that logs keeps none alive."""
    options: dict[str, Any] = {"token": TOKEN, "transports": ["tcp"], "metadata": ""}
    options |= {"tls": engine_tls(made(data))}

    async def drop() -> str:
        return (await AsyncTransferEngine.start("dropped", **options)).addresses[0]

    address = asyncio.run(drop())
    gc.collect()
    TransferEngine("next", listen=address, **options).close()


class Cutter(Sniffer):
    """Ends the first connection that has carried ``after`` bytes upwards."""

    def __init__(self, target: str, after: int) -> None:
        self.after, self.cut = after, False
        super().__init__(target)

    def change(self, seen: bytearray, piece: bytes) -> bytes:
        if seen is not self.up or self.cut or len(seen) < self.after:
            return piece
        self.cut = True
        for sock in self._sockets[1:]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return b""


class Changer(Cutter):
    """Changes one byte instead."""

    def change(self, seen: bytearray, piece: bytes) -> bytes:
        if seen is not self.up or self.cut or len(seen) < self.after:
            return piece
        self.cut = True
        middle = len(piece) // 2
        return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]


@pytest.mark.parametrize("harm", [Cutter, Changer])
def test_a_connection_that_is_cut_or_changed_brings_no_wrong_byte(
    engine: Callable[..., TransferEngine], data: dict[str, str], harm: type[Cutter]
) -> None:
    """What it had not moved goes over another one."""
    here, there = engine(data), engine(data, "there")
    between = harm(there.addresses[0], 3 * MIB)
    try:
        segment = here.open(between.address)
        near, far = here.allocate(16 * MIB), there.allocate(16 * MIB)
        near.view[:] = os.urandom(16 * MIB)
        here.write(segment, near, far.address)
        assert between.cut
        assert bytes(far.view) == bytes(near.view)
        assert here.metrics()["dials_total"] > 1
    finally:
        between.close()


def test_handshakes_that_do_not_end_cost_others_nothing(
    engine: Callable[..., TransferEngine], data: dict[str, str], rng: random.Random
) -> None:
    """More than the places for them, in the midst of a ClientHello or with bytes that are none; each ends."""
    here, there = engine(data), engine(data, "there")
    host, _, port = there.addresses[0].rpartition(":")
    near, far = here.allocate(100_000), there.allocate(100_000)
    with ExitStack() as stack:
        peers = []
        for _ in range(100):
            peer = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            peer.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + rng.randbytes(rng.randrange(1, 400)))
            peers.append(peer)
        for _ in range(5):
            near.view[:100_000] = os.urandom(100_000)
            segment = open_at(here, there.addresses[0])
            here.write(segment, near.address, far.address, 100_000)
            assert bytes(far.view[:100_000]) == bytes(near.view[:100_000])
            segment.close()
        for peer in peers:
            with suppress(ConnectionResetError):
                while peer.recv(4096):
                    pass


def test_a_stranger_that_floods_key_updates_is_ended(
    engine: Callable[..., TransferEngine], data: dict[str, str]
) -> None:
    here, there = engine(data), engine(data, "there")
    host, _, port = there.addresses[0].rpartition(":")
    with Updater(host, int(port)) as stranger:
        stranger.update(40)
        with suppress(ConnectionResetError):
            while stranger.receive():
                pass
    near, far = here.allocate(4096), there.allocate(4096)
    here.write(open_at(here, there.addresses[0]), near, far.address)


def test_a_plain_peer_is_told_in_plain(engine: Callable[..., TransferEngine], data: dict[str, str]) -> None:
    host, _, port = engine(data, "there").addresses[0].rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as peer:
        said = b""
        while piece := peer.recv(4096):
            said += piece
    assert b"this port speaks TLS only; set cluster.tls_data" in said


def test_memory_that_its_user_unmaps_in_the_middle_ends_no_process(data: dict[str, str]) -> None:
    """The kernel's EFAULT of a plain connection, in the copies of TLS as well."""
    script = Path(__file__).with_name("unmapped_engines.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(data)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *steps, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == 12
    for step, said, others in steps:
        if "write" in step and "own" not in step:
            assert "is registered but not mapped" in said, step
        else:
            assert said, step
        assert others, step
    assert last == ["in the middle", "", True]


def test_the_configuration_is_that_of_the_process(
    data: dict[str, str], monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    """Or that of the node beside it, which wrote it for its user's programs."""
    for name, value in variables(data).items():
        monkeypatch.setenv(name, value)
    there = TransferEngine("there", token=TOKEN)
    with there, TransferEngine("plain", token=TOKEN, listen=None, tls=EngineTls()) as plain:
        with pytest.raises(ProtocolError, match="this port speaks TLS only"):
            open_at(plain, there.addresses[0])
        for name in variables(data):
            monkeypatch.delenv(name)
        socket_tls(runtime_dir / "node.sock").write_bytes(control_settings(made(data)))
        with TransferEngine("here", token=TOKEN, listen=None) as here:
            assert open_at(here, there.addresses[0]).name == "there"


def test_the_configuration_may_be_a_file(
    data: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = "".join(f'{name} = "{value}"\n' for name, value in data.items())
    (tmp_path / "moonpool.toml").write_text(f"[cluster]\n{rows}")
    monkeypatch.setenv("MOONPOOL_CONFIG", str(tmp_path / "moonpool.toml"))

    async def meet() -> str:
        async with (
            AsyncTransferEngine("there", token=TOKEN) as there,
            AsyncTransferEngine("here", token=TOKEN, listen=None) as here,
            AsyncTransferEngine("plain", token=TOKEN, listen=None, tls=EngineTls()) as plain,
        ):
            with pytest.raises(ProtocolError, match="this port speaks TLS only"):
                await plain.open(there.addresses[0])
            return (await here.open(there.addresses[0])).name

    assert asyncio.run(meet()) == "there"


def test_an_engine_that_listens_needs_a_certificate(
    data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables({"tls_data": "on", "tls_ca": data["tls_ca"]}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"a transfer engine has no certificate to show; set cluster\.tls_cert"
    ):
        TransferEngine(token=TOKEN)
    TransferEngine(token=TOKEN, listen=None).close()
