"""The doctor's look at a peer: real engines, nodes and masters, and ports at which something is wrong."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool import PeerPath, Segment, TransferEngine, _native
from moonpool.cli import run
from moonpool.cli.doctor import lines
from moonpool.core.config.config import load
from moonpool.core.config.native_settings import master_settings
from moonpool.core.doctor import Finding, Report, State
from moonpool.core.doctor import peer as doctor_peer
from moonpool.core.doctor.peer import Peer, Rate, examine_peer
from moonpool.core.service.control_tls import control_server

from .engine_bed import Peer as EnginePeer
from .pool_bed import Pool, pool
from .store_bed import MIB, TOKEN
from .tls_bed import control, made, pem, variables

__all__ = ["control", "pem", "pool"]

LATE_S = 10.0  # some 2 s are promised: far below what an unbounded wait takes


@pytest.fixture(autouse=True)
def _token(runtime: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", TOKEN.decode())


def look(address: str, *, has_card: bool = False) -> Peer:
    began_s = time.monotonic()
    peer = examine_peer(address, load(), has_card=has_card)
    took_s = time.monotonic() - began_s
    print(f"{address}: {took_s:.2f} s, {peer}")
    assert took_s < LATE_S
    return peer


def fault(peer: Peer) -> Finding:
    (found,) = [finding for finding in peer.findings if finding.state is not State.WORKS]
    assert found.remedy
    return found


@contextmanager
def answering(said: bytes, *, then_close: bool) -> Iterator[str]:
    """A port that greets each caller with these bytes, and then says nothing or hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        callers: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return
                caller.sendall(said)
                if then_close:
                    caller.close()
                else:
                    callers.append(caller)

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for caller in callers:
            caller.close()


# ---- faults


def test_a_port_where_nothing_listens(free_port: int) -> None:
    found = fault(look(f"127.0.0.1:{free_port}"))
    assert (found.check, found.state) == ("port", State.BROKEN)
    assert f"nothing listens at port {free_port}" in found.what
    assert "0.0.0.0, not 127.0.0.1" in found.remedy


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "127.0.0.1:port", ":7", "127.0.0.1:99999"])
def test_what_is_no_address(address: str) -> None:
    found = fault(look(address))
    assert (found.check, found.state) == ("address", State.BROKEN)
    assert "host:port" in found.remedy


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 300])
def test_a_name_that_is_not_resolved(host: str) -> None:
    found = fault(look(f"{host}:7720"))
    assert (found.check, found.state) == ("name", State.BROKEN)
    assert "/etc/resolv.conf" in found.remedy


def test_a_resolver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(30) and [])
    try:
        found = fault(look("slow.example:7720"))
    finally:
        released.set()
    assert "not resolved within" in found.what


def test_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransferEngine("a", token=b"one that the doctor does not know") as engine:
        found = fault(look(engine.addresses[0]))
    assert (found.check, found.state) == ("token", State.BROKEN)
    assert "MOONPOOL_CLUSTER_TOKEN_FILE" in found.remedy


def test_another_tenant() -> None:
    with TransferEngine("a", token=TOKEN, tenant="other") as engine:
        found = fault(look(engine.addresses[0]))
    assert (found.check, found.state) == ("tenant", State.BROKEN)


def test_a_process_that_hangs() -> None:
    with answering(b"", then_close=False) as address:
        found = fault(look(address))
    assert (found.check, found.state) == ("handshake", State.BROKEN)
    assert "hangs, or it is not Moonpool" in found.what


@pytest.mark.parametrize("then_close", [False, True])
@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100, b"\0" * 200], ids=["http", "zeros"]
)
def test_what_is_not_moonpool(said: bytes, then_close: bool) -> None:
    with answering(said, then_close=then_close) as address:
        found = fault(look(address))
    assert (found.check, found.state) == ("handshake", State.BROKEN)


def test_a_peer_that_hangs_up() -> None:
    with answering(b"", then_close=True) as address:
        assert fault(look(address)).check == "handshake"


def test_no_token_that_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN_FILE", f"{tmp_path}/none")
    with TransferEngine("a", token=TOKEN) as engine:
        found = fault(look(engine.addresses[0]))
    assert "cannot read the cluster token file" in found.what
    assert found.check == "token"


# ---- peers


@pytest.mark.parametrize("kind", ["host_arena", "host"])
def test_an_engine_in_another_process(kind: str) -> None:
    other = EnginePeer(kind, 2 * MIB)
    try:
        before = other.peek(0, 64)
        peer = look(other.address)
        assert other.peek(0, 64) == before
    finally:
        other.close()
    assert (peer.kind, peer.name) == ("engine", "peer")
    assert [finding.state for finding in peer.findings] == [State.WORKS] * 2
    assert peer.chosen == {"host": "shm"}
    (rate,) = peer.rates
    assert (rate.memory, rate.transport) == ("host", "shm")
    assert 0 < rate.bytes <= doctor_peer.BYTES_MAX
    assert rate.gb_per_s > 0
    reasons = {path.transport: path.why for path in peer.paths}
    assert "not in this process" in reasons["loopback"]
    assert reasons["tcp"] == ""


def test_a_region_smaller_than_a_piece_and_no_region_at_all() -> None:
    with TransferEngine("a", token=TOKEN) as engine:
        peer = look(engine.addresses[0], has_card=True)
        assert peer.rates == []
        assert "no memory" in peer.findings[-1].what
        assert peer.chosen["host"] == "loopback"
        assert "device" in peer.chosen
        engine.allocate(100)
        (rate,) = look(engine.addresses[0]).rates
        assert rate.bytes % 100 == 0


def test_an_engine_inside_tls(pem: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {
        "tls_data": "on",
        "tls_cert": pem("master"),
        "tls_key": pem("test-key"),
        "tls_ca": pem("authority"),
    }
    for name, value in variables(cluster).items():
        monkeypatch.setenv(name, value)
    with TransferEngine("a", token=TOKEN) as engine:
        peer = look(engine.addresses[0])
        assert (peer.kind, peer.name) == ("engine", "a")
        for name in variables(cluster):
            monkeypatch.delenv(name)
        found = fault(look(engine.addresses[0]))
    assert found.check == "TLS"
    assert "this port speaks TLS only" in found.what


def test_a_node_and_its_master(pool: Pool) -> None:
    node = pool.node("a")
    (address,) = node.addresses
    peer = look(address)
    assert (peer.kind, peer.chosen) == ("node", {"host": "tcp"})
    (rate,) = peer.rates
    assert rate.bytes % MIB == 0
    assert rate.bytes > 0
    assert node.metrics()["objects"] == 0  # its object is gone
    (master,) = pool.master.addresses
    peer = look(master)
    assert peer.kind == "master"
    assert "master of 1 nodes" in peer.findings[-1].what


def test_a_node_that_takes_no_object(pool: Pool) -> None:
    (address,) = pool.node("a", 1).addresses  # an object has at most a quarter of the arena
    peer = look(address)
    assert (fault(peer).check, fault(peer).state) == ("rate", State.WEAK)
    assert "did not take an object" in fault(peer).what


def test_a_master_inside_tls(
    control: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = _native.MasterServer(
        ["127.0.0.1:0"], TOKEN, master_settings(), tls=control_server(made(control))
    )
    master.start()
    try:
        (address,) = master.addresses
        found = fault(look(address))
        assert (found.check, found.state) == ("TLS", State.BROKEN)
        assert "cluster.tls_control" in found.remedy
        for name, value in variables(control).items():
            monkeypatch.setenv(name, value)
        peer = look(address)
        assert peer.kind == "master"
    finally:
        master.stop()


def test_a_peer_that_stops_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has shown its regions: the reads over TCP end at their deadline, and nothing waits longer."""
    other = EnginePeer("host", MIB, transports=["tcp"])
    paths = TransferEngine.paths

    def stop_first(engine: TransferEngine, segment: Segment) -> list[PeerPath]:
        other.stop()
        return paths(engine, segment)

    monkeypatch.setattr(TransferEngine, "paths", stop_first)
    try:
        found = fault(look(other.address))
    finally:
        other.resume()
        other.close()
    assert (found.check, found.state) == ("rate", State.BROKEN)
    assert "nothing moved" in found.what


# ---- the command


def test_the_command_with_a_peer(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    other = EnginePeer("host_arena", MIB)
    try:
        code = run(["doctor", other.address])
        text = capsys.readouterr().out
        assert code in (0, 1)  # as this machine is
        assert f"peer {other.address}, transfer engine" in text
        assert "GB/s read by shm" in text
        run(["doctor", other.address, "--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["peer"]["rates"][0]["transport"] == "shm"
        assert {"shm", "tcp"} <= {path["transport"] for path in report["peer"]["paths"] if path["path"]}
    finally:
        other.close()
    assert run(["doctor", f"127.0.0.1:{free_port}"]) == 3
    assert "broken  port:" in capsys.readouterr().out


def test_a_name_that_would_move_the_cursor() -> None:
    peer = Peer("x:1", "engine", "a\x1b[2J", [Finding("port", State.BROKEN, "a\x1b[2J", "b\n")])
    peer.rates = [Rate("host", "tcp", 1.5, 12.0, 10**6)]
    text = [line.plain for line in lines(Report([], peer, 0.1))]
    assert not any("\x1b" in line or "\n" in line for line in text)
    assert any("1.50 GB/s read by tcp, 12 us at least, 1 MB measured" in line for line in text)
