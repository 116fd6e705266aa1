"""TLS of control connections, with the real commands: a cluster inside TLS, what a sniffer sees, who is
refused and in which words.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moonpool import Store, _native
from moonpool.core.config import paths
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.errors import (
    AuthError,
    ConfigError,
    Error,
    InvalidArgument,
    ProtocolError,
    Timeout,
    Unavailable,
)
from moonpool.core.service.cluster import Cluster, read_cluster
from moonpool.core.service.control_tls import (
    control_client,
    control_client_for,
    control_client_of,
    control_server,
    control_settings,
)
from moonpool.core.service.http_get import get_json
from moonpool.core.service.http_tls import own_child_context
from tests.descriptors import speaks

from ..launch.hosts import TWO_HOSTS
from ..launch.up_bed import Command
from .master_bed import MasterProcess, environment
from .store_bed import MIB, TOKEN, until
from .tls_bed import MAGIC, Sniffer, control, made, pem, variables

__all__ = ["control", "pem"]

START_S = 60.0


class NodeCommand:
    """`moonpool node` on free ports; its clients learn from it how to reach the master."""

    def __init__(self, name: str, master: str, cluster: dict[str, str]) -> None:
        command = [sys.executable, "-m", "moonpool", "node", "--name", name, "--master", master]
        command += ["--dram", "64MiB", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        env = environment() | variables(cluster) | {"MOONPOOL_NODE_HOST_ID": f"host-{name}"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
        assert self.process.stdout is not None
        assert speaks(self.process.stdout, START_S), "the node says nothing"
        line = self.process.stdout.readline()
        assert line.startswith("moonpool node "), line
        self.http = next(word for word in line.split(", ") if "/metrics" in word).removesuffix("/metrics")
        self.socket = paths.node_socket(name)

    def master(self) -> dict[str, Any]:
        def page() -> Any:  # its code is 503 while the node's loop does not answer within a second
            with suppress(Unavailable):
                return get_json(f"{self.http}/health", tls=own_child_context())
            return None

        state: dict[str, Any] = until(page, START_S)["master"]
        return state

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Any]


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    """start(MasterProcess | NodeCommand | Sniffer, ...): closed at the end."""
    running: list[Any] = []

    def make(kind: type, *arguments: Any, **keywords: Any) -> Any:
        running.append(kind(*arguments, **keywords))
        return running[-1]

    yield make
    for one in reversed(running):
        one.close()


def joined(node: NodeCommand) -> bool:
    return bool(node.master()["joined"])


def exchange(a: NodeCommand, b: NodeCommand) -> None:
    """What is put at one node is read at the other, by programs that know nothing but the socket."""
    data = os.urandom(100_000)
    with (
        Store(str(a.socket), token=TOKEN, namespace="space of names") as at_a,
        Store(str(b.socket), token=TOKEN, namespace="space of names") as at_b,
    ):
        assert at_a.put(["telling key"], [data])[0]
        assert bytes(until(lambda: at_b.get("telling key"))) == data
        assert at_a.put("second", data, replicas=2).replicas == 2
        assert at_b.remove(["telling key"]) == [True]


# ---- it works


def test_up_runs_a_whole_cluster_inside_tls(runtime_dir: Path, control: dict[str, str]) -> None:
    file = runtime_dir / "up.toml"
    file.write_text(
        TWO_HOSTS + "[cluster]\n" + "".join(f"{name} = {json.dumps(v)}\n" for name, v in control.items())
    )
    command = Command(file)
    try:
        command.until("all is up")
        with Store(str(runtime_dir / "node-a.sock")) as a, Store(str(runtime_dir / "node-b.sock")) as b:
            assert a.put("key", b"bytes")
            assert bytes(until(lambda: b.get("key"))) == b"bytes"
        for env, options in (({}, ["--config", str(file)]), (variables(control), [])):
            status = subprocess.run(
                [sys.executable, "-m", "moonpool", "status", "--json", *options],
                env=os.environ | env,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert status.returncode == 0, status.stderr
            assert [node["state"] for node in json.loads(status.stdout)["cluster"]["nodes"]] == ["alive"] * 2
    finally:
        command.kill()


@pytest.mark.parametrize("mode", ["off", "on", "mutual"])
def test_what_a_sniffer_sees_on_the_way_to_the_master(
    start: Start, control: dict[str, str], pem: Callable[[str], str], mode: str
) -> None:
    control["tls_control"] = mode
    master = start(MasterProcess, env=variables(control))
    sniffer = start(Sniffer, master.address)
    dials = control | {"tls_cert": pem("caller")} if mode == "mutual" else control
    if mode == "on":  # nothing to show is needed, and nothing is shown
        dials = control | {"tls_cert": "", "tls_key": ""}
    a, b = (start(NodeCommand, name, sniffer.address, dials) for name in ("first-node", "second-node"))
    until(lambda: joined(a) and joined(b), START_S)
    exchange(a, b)
    assert (
        len(read_cluster(sniffer.address, TOKEN, tls=control_client(made(dials)), timeout_s=5.0).nodes) == 2
    )
    seen = sniffer.passed
    telling = (MAGIC + b"\1", b"first-node", b"host-second-node", b"default", b"directory", b"member", TOKEN)
    if mode == "off":
        assert all(text in seen for text in telling[:-1])  # else this test would see nothing ever
        assert TOKEN not in seen
    else:
        assert len(seen) > 5000
        assert [text for text in telling if text in seen] == []
    assert b"telling key" not in seen
    told = [str(path.name) for path in a.socket.parent.glob("*.tls")]
    assert len(told) == (0 if mode == "off" else 2)
    assert all((a.socket.parent / name).stat().st_mode & 0o777 == 0o600 for name in told)
    a.process.terminate()
    a.process.wait(20)
    assert not paths.socket_tls(a.socket).exists()


def test_a_master_that_was_killed_is_joined_again_inside_tls(start: Start, control: dict[str, str]) -> None:
    master = start(MasterProcess, env=variables(control))
    a, b = (start(NodeCommand, name, master.address, control) for name in "ab")
    until(lambda: joined(a) and joined(b), START_S)
    master.kill()
    until(lambda: not joined(a) and not joined(b))
    start(MasterProcess, listen=master.address, env=variables(control))
    until(lambda: joined(a) and joined(b), START_S)
    exchange(a, b)


def test_files_that_a_node_cannot_use_are_logged_once(
    start: Start, control: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the next connection to the master, which is made with those from before."""
    authority = tmp_path / "own authority.pem"
    authority.write_bytes(Path(control["tls_ca"]).read_bytes())
    said = "the files from before are in use"
    err = ""

    def told() -> bool:
        nonlocal err
        err += capfd.readouterr().err
        return said in err

    master = start(MasterProcess, env=variables(control))
    node = start(NodeCommand, "a", master.address, control | {"tls_ca": str(authority)})
    until(lambda: joined(node), START_S)
    authority.write_text("no certificate\n")
    assert not told()
    for _ in range(2):
        master.kill()
        until(lambda: not joined(node))
        master = start(MasterProcess, listen=master.address, env=variables(control))
        until(lambda: joined(node), START_S)
        until(told)
    err += capfd.readouterr().err
    assert err.count(said) == 1, err
    assert str(authority) in err


def test_a_program_that_ends_or_forks_with_a_store_open(start: Start, control: dict[str, str]) -> None:
    master = start(MasterProcess, env=variables(control))
    node = start(NodeCommand, "a", master.address, control)
    until(lambda: joined(node), START_S)
    program = """
import os, sys
from moonpool import Store
from moonpool.core.errors import Forked
kept = Store(sys.argv[1])
kept.put("key", b"1")
assert kept.get("none of this host") is None
child = os.fork()
if child == 0:
    try:
        kept.get("key")
    except Forked:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert kept.get("nor this") is None
assert kept.stat()["objects"] == 1
globals()["again"] = kept.get("key")
sys.setprofile(lambda *_: kept)
"""
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(node.socket)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")


# ---- who is refused


def why(call: Callable[[], object], kind: type[Error]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def asks(address: str, cluster: dict[str, str]) -> Callable[[], Cluster]:
    tls = control_client(made(cluster))
    return lambda: read_cluster(address, TOKEN, tls=tls, timeout_s=5.0)


@pytest.mark.parametrize(
    ("server", "client", "kind", "sentence"),
    [
        ({}, {"tls_ca": "test-cert"}, AuthError, "is not trusted (unable to get local issuer certificate)"),
        ({}, {"tls_ca": ""}, AuthError, "set cluster.tls_ca to the authorities that vouch for it"),
        ({"tls_cert": "master-expired"}, {}, AuthError, "has expired; make a new one"),
        ({"tls_cert": "master-elsewhere"}, {}, AuthError, "is not for 127.0.0.1; dial it by a name"),
        (
            {"tls_cert": "master-elsewhere"},
            {"tls_name": "other.example"},
            AuthError,
            "is not for other.example",
        ),
        ({"tls_control": "mutual"}, {}, AuthError, 'set cluster.tls_control = "mutual" and cluster.tls_cert'),
        (
            {"tls_control": "mutual"},
            {"tls_control": "mutual", "tls_cert": "test-cert"},
            AuthError,
            "does not accept the certificate of this process (",
        ),
        ({}, {"tls_control": "off"}, ProtocolError, "this port speaks TLS only; set cluster.tls_control"),
        ({"tls_control": "off"}, {}, ProtocolError, "does not speak TLS, and this process must"),
    ],
)
def test_who_is_refused_learns_why_and_what_to_do(
    runtime_dir: Path,
    control: dict[str, str],
    pem: Callable[[str], str],
    server: dict[str, str],
    client: dict[str, str],
    kind: type[Error],
    sentence: str,
) -> None:
    def settings(change: dict[str, str]) -> dict[str, str]:
        files = {n: pem(v) if v and n in ("tls_cert", "tls_ca") else v for n, v in change.items()}
        return control | files

    master = _native.MasterServer(
        ["127.0.0.1:0"], TOKEN, master_settings(), tls=control_server(made(settings(server)))
    )
    master.start()
    address = master.addresses[0]
    try:
        assert sentence in why(asks(address, settings(client)), kind)
        # A node says the same on its page, and goes on serving its own host.
        path = str(runtime_dir / "node-a.sock")
        tls = control_client(made(settings(client)))
        node = _native.Server(path, [("default", 16 * MIB)], TOKEN, node_settings(), master=address, tls=tls)
        node.start()
        try:
            until(lambda: sentence in node.membership()[2])
            with Store(path, token=TOKEN) as store:
                assert store.put("key", b"1")
                assert bytes(store.get("key") or b"") == b"1"
        finally:
            node.stop()
        if "tls_cert" not in server:
            assert asks(address, settings(server))()

        def refused() -> bool:
            counted = master.metrics()
            return counted["auth_failures_total"] + counted["protocol_errors_total"] > 0

        until(refused)  # who refuses a certificate knows it before the master does
    finally:
        master.stop()


def test_who_is_set_to_tls_says_nothing_in_plain_to_whoever_asks_in_plain(control: dict[str, str]) -> None:
    """No downgrade: somebody in between challenges as a plain master would, and learns nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = bytearray()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    with caller, suppress(OSError):
                        header = MAGIC + bytes([1, 2, 0, 0]) + (48).to_bytes(4, "little") + bytes(12)
                        caller.sendall(header + bytes(48))
                        caller.settimeout(5)
                        while data := caller.recv(4096):
                            heard.extend(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        sentence = why(asks(f"127.0.0.1:{listener.getsockname()[1]}", control), ProtocolError)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert "does not speak TLS, and this process must" in sentence
    assert heard[:1] == b"\x16"
    assert MAGIC not in heard
    assert b"default" not in heard


def test_a_program_without_the_setting_is_told_so_and_keeps_its_own_host(
    start: Start, control: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start(MasterProcess, env=variables(control))
    node = start(NodeCommand, "a", master.address, control)
    until(lambda: joined(node), START_S)
    monkeypatch.setenv("MOONPOOL_CLUSTER_TLS_CONTROL", "off")
    with Store(str(node.socket), token=TOKEN) as store:
        assert store.put("key", b"1")
        assert bytes(store.get("key") or b"") == b"1"
        prefix = store.longest_prefix(["key", "none"])
        assert prefix.blocks == 1
        assert "this port speaks TLS only" in str(prefix.why)


# ---- settings


def test_without_the_setting_there_is_no_tls(pem: Callable[[str], str]) -> None:
    files = {"tls_cert": pem("master"), "tls_key": pem("test-key"), "tls_ca": pem("authority")}
    for cluster in ({}, files):
        assert control_server(made(cluster)) is None
        assert control_client(made(cluster)) is None
        assert control_settings(made(cluster)) == b""


@pytest.mark.parametrize(
    ("side", "change", "kind", "sentence"),
    [
        (
            "server",
            {"tls_cert": ""},
            ConfigError,
            "the master has no certificate to show; set cl",
        ),
        (
            "server",
            {"tls_key": ""},
            ConfigError,
            "the master has no certificate to show; set cl",
        ),
        ("server", {"tls_control": "mutual", "tls_ca": ""}, ConfigError, "cluster.tls_ca is empty; name the"),
        ("server", {"tls_cert": "/no/cert"}, InvalidArgument, "cluster.tls_cert = /no/cert cannot be used: "),
        (
            "server",
            {"tls_key": "/no/key"},
            ConfigError,
            "cannot read cluster.tls_key = /no/key: No",
        ),
        ("client", {"tls_ca": "/no/ca"}, InvalidArgument, "cluster.tls_ca = /no/ca cannot be used: "),
        (
            "client",
            {"tls_control": "mutual", "tls_cert": ""},
            ConfigError,
            "a process that connects to a master has no cert",
        ),
    ],
)
def test_settings_that_cannot_serve_are_one_sentence(
    control: dict[str, str], side: str, change: dict[str, str], kind: type[Error], sentence: str
) -> None:
    settings = made(control | change)
    assert sentence in why(lambda: (control_server if side == "server" else control_client)(settings), kind)


def test_a_key_that_others_can_read_is_refused(control: dict[str, str]) -> None:
    Path(control["tls_key"]).chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 0640\); run: chmod 600"):
        control_server(made(control))


def test_an_unknown_word_is_refused(control: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="tls_control"):
        made(control | {"tls_control": "maybe"})


def test_a_client_takes_the_environment_before_what_its_node_wrote(
    control: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, link = tmp_path / "node-a.sock", tmp_path / "node.sock"
    link.symlink_to(node.name)
    assert control_client_of(link) is None
    monkeypatch.chdir(tmp_path)  # relative paths are those of the node's folder, wherever its clients are
    relative = {name: os.path.relpath(v) if os.sep in v else v for name, v in control.items()}
    paths.write_private(paths.socket_tls(node), control_settings(made(relative)))
    monkeypatch.chdir("/")
    assert isinstance(control_client_of(link), _native.TlsClient)
    assert isinstance(control_client_for(made({}), str(link)), _native.TlsClient)
    assert control_client_for(made({"tls_control": "off"}), str(link)) is None
    for name, value in variables({"tls_control": "on", "tls_ca": "/no/ca"}).items():
        monkeypatch.setenv(name, value)
    assert "/no/ca" in why(lambda: control_client_of(link), InvalidArgument)
    monkeypatch.setenv("MOONPOOL_CLUSTER_TLS_CONTROL", "off")
    assert control_client_of(link) is None


def test_a_call_to_a_master_that_stalls_in_the_handshake_ends(control: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        tls = control_client(made(control))
        why(lambda: read_cluster(address, TOKEN, tls=tls, timeout_s=0.3), Timeout)
