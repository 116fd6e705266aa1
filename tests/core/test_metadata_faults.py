"""Stores of names that are dead, slow, empty, wrong: peers that are known go on, and names come back.

All over a real master, etcd and Redis; a server of the test answers where these never would.
"""

from __future__ import annotations

import io
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from moonpool import AuthError, ConfigError, Error, ProtocolError, Timeout, TransferEngine, Unavailable
from moonpool.core.transfer.metadata import Metadata, NameTaken
from moonpool.core.transfer.metadata.connection_string import metadata_of
from moonpool.core.transfer.metadata.publication import Publication
from moonpool.core.transfer.metadata.record import decode, key_of
from moonpool.core.transfer.metadata.redis_metadata import RedisError, _reply

from .master_bed import MasterProcess
from .metadata_bed import (
    KINDS,
    LEASE_S,
    PASSWORD,
    Liar,
    NamedPeer,
    engine,
    first_byte,
    record,
    running,
)
from .store_bed import TOKEN, until

SHIM = Path(__file__).parents[1] / "cluster" / "clock_shim.c"


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running(request.param, tmp_path_factory.mktemp("store")) as made:
        yield made


@contextmanager
def pair(server: Any, name: str, **options: Any) -> Iterator[tuple[TransferEngine, TransferEngine, Any]]:
    """(gives, takes, the segment of gives by its name)."""
    with engine(server.store(**options), name) as gives, engine(server.store(**options)) as takes:
        gives.allocate(4096).view[0] = 42
        yield gives, takes, takes.open(name)


def told(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if word in one.getMessage()]


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_known_peers_go_on_without_the_store(
    server: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once for each engine, tried again, and told when the name is back."""
    with pair(server, f"goes on {fault}", timeout_s=0.5) as (gives, takes, peer):
        getattr(server, fault)()
        until(lambda: gives.metrics()["metadata_failures_total"] >= 3, 30)
        assert len(told(caplog, f"the name {gives.name} is not published: ")) == 1
        assert gives.metrics()["metadata_published"] == 0
        assert (
            "did not answer" in gives.publication_problem or "cannot be reached" in gives.publication_problem
        )
        assert first_byte(takes, peer) == 42
        assert takes.open(gives.name).id == gives.segment_id  # by what it knew
        assert takes.open(gives.addresses[0]).id == gives.segment_id
        peer.refresh()
        began_s = time.monotonic()
        with pytest.raises((Unavailable, Timeout), match=server.store().shown.split()[0]):
            takes.open("never known")
        print(f"an unknown name was refused after {time.monotonic() - began_s:.2f} s")
        with engine(
            server.store(timeout_s=0.5), "starts alone"
        ) as alone:  # it does not need the store to start
            assert alone.publication_problem
            server.start() if fault == "kill" else server.resume()
            for one in (gives, takes, alone):
                until(lambda e=one: e.publication_problem == "", 30)
            assert takes.open("starts alone").id == alone.segment_id
    for name in (gives.name, "starts alone"):
        assert told(caplog, f"the name {name} is published again")


def test_a_store_that_lost_its_data_gets_the_names_again(server: Any) -> None:
    with pair(server, "wiped") as (gives, takes, peer):
        server.wipe()
        assert takes.open("wiped").id == gives.segment_id  # found, or known
        until(lambda: server.store().resolve("default", "wiped") is not None, 30)
        until(lambda: gives.publication_problem == "", 30)
        assert first_byte(takes, peer) == 42


def test_an_entry_that_was_removed_is_written_again(server: Any) -> None:
    """Its lease may be alive, as in etcd: each renewal looks at the entry, too."""
    with engine(server.store(), "removed") as one:
        server.delete(key_of("default", "removed"))
        until(lambda: server.store().resolve("default", "removed") is not None, 30)
        assert one.publication_problem == ""


EXITS = """
import sys
from moonpool import TransferEngine
engine = TransferEngine("exits", token=sys.argv[2].encode(), metadata=sys.argv[1])
"""


def test_a_program_that_ends_without_close_withdraws_its_name(server: Any) -> None:
    subprocess.run([sys.executable, "-c", EXITS, server.url, TOKEN.decode()], check=True, timeout=60)
    assert server.store().resolve("default", "exits") is None


def test_an_engine_that_lost_its_name_says_so_and_takes_it_when_it_is_free(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The process was stopped for long, and another engine took the name meanwhile."""
    with ExitStack() as stack:
        slept = NamedPeer(server.url, "contested")
        stack.callback(slept.close)
        slept.stop()
        with engine(server.store(), "contested") as second:
            slept.resume()
            until(lambda: "is held by the engine" in slept.ask("problem"), 30)
            assert second.publication_problem == ""
            assert server.store().resolve("default", "contested").id == second.segment_id.hex()
        until(lambda: slept.ask("problem") == "", 30)
        assert server.store().resolve("default", "contested").id == slept.id


def test_another_engine_at_the_address_is_not_taken_for_the_peer(server: Any, free_port: int) -> None:
    store = server.store()
    with engine("", "stranger", listen=f"127.0.0.1:{free_port}") as stranger, engine(store) as takes:
        told_wrong = record("lost", "a", addresses=(stranger.addresses[0],))
        store.publish(told_wrong)
        with pytest.raises(Unavailable, match="is another engine than the one that published lost"):
            takes.open("lost")
        store.withdraw(told_wrong)
        several = record("lost", "b", addresses=("127.0.0.1:1", stranger.addresses[0]))
        store.publish(several)
        with pytest.raises(Unavailable):
            takes.open("lost")
        store.withdraw(several)


def test_the_end_of_an_engine_waits_for_no_store(server: Any) -> None:
    one = engine(server.store(timeout_s=0.5), "ends")
    server.pause()
    try:
        until(lambda: one.publication_problem != "", 30)
        began_s = time.monotonic()
        one.close()
        print(f"close() returned after {time.monotonic() - began_s:.2f} s")
        one.close()
    finally:
        server.resume()
    assert not [thread for thread in threading.enumerate() if thread.name == "moonpool-metadata"]
    until(lambda: server.store().resolve("default", "ends") is None, 30)


def test_a_child_of_fork_keeps_its_parent_s_name(server: Any) -> None:
    with engine(server.store(), "parent") as parent:
        child = os.fork()
        if child == 0:
            parent.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert server.store().resolve("default", "parent").id == parent.segment_id.hex()


@pytest.mark.parametrize("kind", ["etcd", "redis"])
def test_a_wrong_password(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that starts is told; one that runs goes on. The password stands in no log and no error."""
    caplog.set_level(logging.DEBUG)
    with running(kind, tmp_path) as server:
        open_store = server.store()
        with engine(open_store, "runs") as runs:
            server.demand_password()
            until(lambda: "refuses this engine" in runs.publication_problem, 30)
            with engine(server.store(), "knows") as knows:
                assert knows.publication_problem == ""
                assert open_store.shown in server.store().shown
                wrong = server.url.replace(PASSWORD, "a-wrong-secret")
                with pytest.raises(AuthError, match="refuses this engine") as error:
                    engine(wrong, "starts")
                said = f"{error.value!r} {runs.publication_problem} {caplog.text}"
                assert PASSWORD not in said
                assert "a-wrong-secret" not in said
                (none,) = (one for one in (metadata_of(f"{kind}://127.0.0.1:{server.port}", TOKEN),) if one)
                with pytest.raises(AuthError):
                    none.resolve("default", "runs")


def test_the_password_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("redis", tmp_path) as server:
        url = server.url
        server.demand_password()
        monkeypatch.setenv("MOONPOOL_CLUSTER_METADATA", url)
        monkeypatch.setenv("MOONPOOL_CLUSTER_METADATA_PASSWORD", PASSWORD)
        with TransferEngine("by the variable", token=TOKEN):
            assert server.store().resolve("default", "by the variable") is not None


def test_the_page_of_a_master_of_another_cluster(tmp_path: Path) -> None:
    with running("http", tmp_path) as server:
        with pytest.raises(AuthError, match="another cluster token"):
            TransferEngine("stranger", token=b"another token of a cluster", metadata=server.url)
        stranger = metadata_of(server.url, b"another token of a cluster")
        assert stranger is not None
        with pytest.raises(AuthError):
            stranger.resolve("default", "x")


def test_a_master_s_page_by_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent / "certificates"
    key = shutil.copy(folder / "test-key.pem", tmp_path / "key.pem")
    Path(key).chmod(0o600)
    certificate = folder / "test-cert.pem"
    env = {"MOONPOOL_CLUSTER_TLS_CERT": str(certificate), "MOONPOOL_CLUSTER_TLS_KEY": str(key)}
    master = MasterProcess(env=env)
    try:
        url = master.http.replace("127.0.0.1", "localhost")
        with engine(url, "untrusted") as one:
            assert "cannot be reached" in one.publication_problem
        monkeypatch.setenv("MOONPOOL_CLUSTER_TLS_CA", str(certificate))
        with engine(url, "trusted") as one, engine(url) as takes:
            assert takes.open("trusted").id == one.segment_id
        monkeypatch.setenv("MOONPOOL_CLUSTER_TLS_CA", "/nowhere")
        with pytest.raises(ConfigError, match=r"cluster\.tls_ca = /nowhere cannot be used"):
            engine(url, "x")
    finally:
        master.close()


def test_what_others_wrote_under_a_name(tmp_path: Path) -> None:
    for kind in ("etcd", "redis"):
        (tmp_path / kind).mkdir()
        with running(kind, tmp_path / kind) as server:
            store = server.store()
            for text in ("garbage", "{}", '{"id":"x"}', "[" * 5000, "x" * 20_000):
                server.put(key_of("default", "odd"), text.encode())
                with pytest.raises(ProtocolError, match="is no record of a segment"):
                    store.resolve("default", "odd")
            with engine(store, "odd") as one:  # what has no lease is no living engine's
                assert store.resolve("default", "odd").id == one.segment_id.hex()


HTTP_OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"
LONG = b'{"x":"' + b"y" * (2 << 20) + b'"}'
ANSWERS = {
    "nothing": (b"", 1, 0.0),
    "garbage": (b"\x00\xff\r\n\r\n" * 50, 1 << 20, 0.0),
    "a byte a second": (HTTP_OK % (60, b"{}" * 30), 1, 1.0),
    "2 MiB": (HTTP_OK % (len(LONG), LONG), 1 << 20, 0.0),
    "2 MiB of RESP": (b"$%d\r\n%s\r\n" % (len(LONG), LONG), 1 << 20, 0.0),
    "many lists": (b"*64\r\n" * 100_000, 1 << 20, 0.0),
    "a list of a billion": (b"*1000000000\r\n", 1 << 20, 0.0),
    "a number that is none": (b":x\r\n", 1 << 20, 0.0),
    "an empty answer": (HTTP_OK % (0, b""), 1 << 20, 0.0),
    "JSON of other types": (HTTP_OK % (26, b'{"kvs":[1],"ID":"x","a":1}'), 1 << 20, 0.0),
    "deep JSON": (HTTP_OK % (50_000, b"[" * 50_000), 1 << 20, 0.0),
    "a status that is none": (b"HTTP/1.1 abc\r\n\r\n", 1 << 20, 0.0),
    "500": (b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno", 1 << 20, 0.0),
    "a redirection": (
        b"HTTP/1.1 302 F\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        1 << 20,
        0.0,
    ),
    "LOADING": (b"-LOADING Redis is loading the dataset in memory\r\n", 1 << 20, 0.0),
    "MOVED": (b"-MOVED 1 10.0.0.9:6379\r\n", 1 << 20, 0.0),
    "half a line": (b"+OK", 1 << 20, 0.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_store_that_answers_anything(kind: str, answer: str) -> None:
    """Each call ends by its deadline with an error of ours; an engine starts and ends beside it."""
    liar = Liar(*ANSWERS[answer])
    try:
        store = metadata_of(f"{kind}://127.0.0.1:{liar.port}", TOKEN)
        assert store is not None
        store._timeout_s = 0.5  # type: ignore[attr-defined]
        began_s = time.monotonic()
        for act in (
            lambda: store.publish(record("x", "a")),
            lambda: store.withdraw(record("x", "a")),
            lambda: store.resolve("default", "x"),
        ):
            said = ""
            try:
                act()
            except Error as error:
                said = str(error)
            assert "\n" not in said
            assert len(said) < 1000
        if answer == "2 MiB" and kind != "redis":
            assert "the answer has more than 1048576 bytes" in said
        with engine(store, "beside") as one:
            assert one.publication_problem
        print(f"{answer}: {time.monotonic() - began_s:.2f} s for five calls of 0.5 s")
    finally:
        liar.close()


def test_a_server_that_keeps_no_leases_is_not_used() -> None:
    liar = Liar(HTTP_OK % (16, b"metadata updated"))
    try:
        store = metadata_of(f"http://127.0.0.1:{liar.port}", TOKEN)
        assert store is not None
        with pytest.raises(Unavailable, match="keeps no leases; use the page of `moonpool master`"):
            store.publish(record("x", "a"))
    finally:
        liar.close()


def test_another_member_of_etcd_is_asked(tmp_path: Path) -> None:
    silent = Liar(b"")
    try:
        with running("etcd", tmp_path) as server:
            members = f"127.0.0.1:1,127.0.0.1:{silent.port},127.0.0.1:{server.port}"
            store = metadata_of(f"etcd://{members}", TOKEN)
            assert store is not None
            store.publish(record("x", "a"))
            began_s = time.monotonic()
            for _ in range(5):  # the one that answered is the first from now on
                assert store.resolve("default", "x") is not None
            print(f"five look-ups took {time.monotonic() - began_s:.2f} s")
            assert store._etcd._urls[0].endswith(str(server.port))  # type: ignore[attr-defined]
    finally:
        silent.close()


def test_a_resolver_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: ended.wait(60) and [])
    store = metadata_of("redis://host.example", TOKEN)
    assert store is not None
    store._timeout_s = 0.2  # type: ignore[attr-defined]
    with pytest.raises(Timeout):
        store.resolve("default", "x")
    ended.set()


@pytest.fixture(scope="module")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    out = tmp_path_factory.mktemp("shim") / "clock_shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", out, SHIM, "-ldl"], check=True)
    return out


@pytest.mark.parametrize("jump_s", [3600, -3600, 10 * 365 * 86400])
def test_the_clock_of_redis_jumps(jump_s: int, clock_library: Path, tmp_path: Path) -> None:
    """Living names are there within a renewal; a dead one neither stays nor blocks its successor."""
    with running("redis", tmp_path) as server, ExitStack() as stack:
        server.kill()
        clock = tmp_path / "clock"
        clock.write_bytes(struct.pack("<q", 0))
        server.start(env={**os.environ, "LD_PRELOAD": str(clock_library), "CLOCK_SHIM": str(clock)})
        lives = stack.enter_context(engine(server.store(), "lives"))
        dies = NamedPeer(server.url, "dies")
        stack.callback(dies.close)
        dies.kill()
        assert server.store().resolve("default", "dies") is not None
        with clock.open("r+b") as file:  # Redis has the file mapped
            file.write(struct.pack("<q", jump_s))
        until(lambda: server.store().resolve("default", "lives") is not None, 30)
        assert until(lambda: lives.publication_problem == "", 30)
        until(lambda: server.store().resolve("default", "dies") is None, 30)
        successor = stack.enter_context(engine(server.store(), "dies"))
        assert server.store().resolve("default", "dies").id == successor.segment_id.hex()


def test_the_clock_of_an_engine_jumps(
    clock_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("redis", tmp_path) as server, ExitStack() as stack:
        clock = tmp_path / "clock"
        clock.write_bytes(struct.pack("<q", 0))
        monkeypatch.setenv("LD_PRELOAD", str(clock_library))
        monkeypatch.setenv("CLOCK_SHIM", str(clock))
        peer = NamedPeer(server.url, "jumps")
        stack.callback(peer.close)
        for jump_s in (86400, -86400):
            with clock.open("r+b") as file:
                file.write(struct.pack("<q", jump_s))
            give_up_s = time.monotonic() + LEASE_S * 1.5
            while time.monotonic() < give_up_s:  # longer than a lease
                assert server.store().resolve("default", "jumps").id == peer.id
        assert peer.ask("problem") == ""


def test_records_that_are_none(rng: random.Random) -> None:
    """Whatever the bytes, a record or a ProtocolError."""
    good = record("x", "a").encode()
    for _ in range(3000):
        text = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(text))
            match rng.randrange(3):
                case 0:
                    text[place] = rng.randrange(256)
                case 1:
                    del text[place:]
                case _:
                    text[place:place] = rng.randbytes(rng.randrange(1, 8))
            if not text:
                break
        said = ""
        try:
            decode(bytes(text), "the test")
        except ProtocolError as error:
            said = str(error)
        assert said.isprintable()


def test_replies_that_are_none(rng: random.Random) -> None:
    """Whatever the bytes, a value or an error that requests expect."""
    good = b"*2\r\n:7990\r\n$12\r\n" + b'{"id":"aaaa"}'[:12] + b"\r\n+OK\r\n-ERR no\r\n*0\r\n$-1\r\n"
    for _ in range(5000):
        text = bytearray(good)
        for _ in range(rng.randrange(4)):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(3)] = rng.choice(
                (rng.randbytes(rng.randrange(4)), b"*9\r\n", b"$99\r\n", b"\r\n", b"-", b"9" * 30)
            )
        reader = io.BufferedReader(io.BytesIO(bytes(text)))  # type: ignore[arg-type]
        with suppress(ValueError, ConnectionError, RedisError):
            for _ in range(6):
                _reply(reader, 1 << 20)


class SlowOnce:
    """A native engine whose peer is silent for one question."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.silent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def segment(self, handle: int) -> Any:
        if self.silent:
            self.silent -= 1
            raise Timeout("silent")
        return self._native.segment(handle)


def test_a_peer_that_was_slow_keeps_its_handle() -> None:
    """Another one would end the transfers that are under way with it."""
    store = Plain()
    with engine(store, "slow") as gives, engine(store) as takes:
        gives.allocate(4096)
        peer = takes.open("slow")
        before = peer.handle
        peer._native = SlowOnce(peer._native)
        peer._native.silent = 1
        peer.refresh()
        assert peer.handle == before
        peer._native.silent = 2
        peer.refresh()
        assert peer.handle != before
        assert first_byte(takes, peer) == 0


class Plain(Metadata):
    """A store of a caller's own."""

    def __init__(self) -> None:
        from moonpool.core.service.addresses import Address

        self.shown, self.towards, self.lease_s = "a dict", Address("127.0.0.1", 1), 1.0
        self.rows: dict[tuple[str, str], Any] = {}

    def publish(self, one: Any, *, dead: str = "") -> None:
        self.rows[one.tenant, one.name] = one

    def withdraw(self, one: Any) -> None:
        self.rows.pop((one.tenant, one.name), None)

    def resolve(self, tenant: str, name: str) -> Any:
        return self.rows.get((tenant, name))


class Scripted(Plain):
    """Refuses the name as often as ``left_s`` has rows."""

    def __init__(self, *left_s: float) -> None:
        super().__init__()
        self.lease_s = 8.0
        self.left_s = list(left_s)

    def publish(self, one: Any, *, dead: str = "") -> None:
        if self.left_s:
            raise NameTaken("taken", held=record("x", "b"), left_s=self.left_s.pop(0))
        super().publish(one)


def test_whether_the_holder_of_a_name_lives() -> None:
    """A lease of which more is left than before was renewed."""
    lives = Scripted(7.0, 6.9, 8.0, 7.9)
    with pytest.raises(NameTaken):
        Publication(lives, record("x", "a")).claim()
    assert lives.left_s == [7.9]
    ends = Scripted(0.7, 0.4, 0.4, 0.1)
    Publication(ends, record("x", "a")).claim()
    assert ends.rows


class Broken(Plain):
    """Its author forgot an error once."""

    asked = 0

    def publish(self, one: Any, *, dead: str = "") -> None:
        self.asked += 1
        if self.asked == 2:
            raise KeyError
        super().publish(one)


def test_no_error_of_a_store_ends_the_renewals(caplog: pytest.LogCaptureFixture) -> None:
    store = Broken()
    with engine(store, "x") as one:
        until(lambda: store.asked >= 4, 30)
        assert one.publication_problem == ""
    assert told(caplog, "the name x is not published: ")


def test_a_name_that_other_hosts_cannot_use_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    store = Plain()
    with engine(store, "near"):
        assert not told(caplog, "cannot reach")
    store.towards = store.towards._replace(host="10.0.0.9")
    with engine(store, "far"), engine(store, "told", advertise="10.0.0.8"):
        assert len(told(caplog, "which engines of other hosts cannot reach")) == 1


def test_a_store_of_the_caller_s_own() -> None:
    store = Plain()
    with engine(store, "mine") as mine, engine(store, "takes") as takes:
        assert takes.open("mine").id == mine.segment_id
    assert store.rows == {}
    assert sys.getrefcount(store) < 10  # no thread keeps it
