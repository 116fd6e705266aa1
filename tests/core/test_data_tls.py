"""TLS of data connections: objects between hosts, what a sniffer sees, which callers are refused and how."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from moonpool import Store, _native
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.config.paths import socket_tls
from moonpool.core.errors import AuthError, ConfigError, Error, ProtocolError, Unavailable
from moonpool.core.service.control_tls import control_settings
from moonpool.core.service.data_tls import PoolTls, data_server, pool_tls, pool_tls_for, pool_tls_of

from .store_bed import MIB, TOKEN, until
from .tls_bed import MAGIC, Sniffer, made, pem

__all__ = ["pem"]

ARENA = 256 * MIB
PATIENCE_S = 20.0


@pytest.fixture
def data(pem: Callable[[str], str]) -> dict[str, str]:
    """[cluster] of a node and of its clients, without mutual proof."""
    return {
        "tls_data": "on",
        "tls_cert": pem("master"),
        "tls_key": pem("test-key"),
        "tls_ca": pem("authority"),
    }


class Node:
    """A node on a port of its own."""

    def __init__(self, path: Path, cluster: dict[str, str], **options: Any) -> None:
        self.server = _native.Server(
            str(path),
            [("default", ARENA)],
            TOKEN,
            node_settings(),
            listen=["127.0.0.1:0"],
            data_tls=data_server(made(cluster)),
            **options,
        )
        self.server.start()
        self.address: str = self.server.addresses[0]


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[Callable[..., Node]]:
    """node(cluster, name): stopped at the end."""
    running: list[Node] = []

    def make(cluster: dict[str, str], name: str = "a", **options: Any) -> Node:
        running.append(Node(runtime_dir / f"node-{name}.sock", cluster, name=name, **options))
        return running[-1]

    yield make
    for one in reversed(running):
        one.server.stop()


def store_at(address: str, cluster: dict[str, str], **options: Any) -> Store:
    """Also on a machine that stands still before the first word, for which a node waits 250 ms."""
    while True:
        try:
            return Store(
                f"tcp://{address}", token=TOKEN, tls=pool_tls(made(cluster)), timeout_s=PATIENCE_S, **options
            )
        except Unavailable as error:
            if "gave up before it heard from here" not in str(error):
                raise


@pytest.mark.parametrize("mode", ["off", "on", "mutual"])
def test_what_a_sniffer_sees_between_a_client_and_a_node(
    node: Callable[..., Node], data: dict[str, str], pem: Callable[[str], str], mode: str
) -> None:
    data["tls_data"] = mode
    sniffer = Sniffer(node(data).address)
    dials = data | ({"tls_cert": pem("caller")} if mode == "mutual" else {"tls_cert": "", "tls_key": ""})
    telling = b"the bytes of an object " * 100
    try:
        with store_at(sniffer.address, dials) as store:
            assert store.put("telling key", telling)
            assert bytes(store.get("telling key") or b"") == telling
            assert store.remove("telling key")
        seen = sniffer.passed
    finally:
        sniffer.close()
    texts = (MAGIC, b"telling key", telling[:40], b"default")
    assert [text in seen for text in texts] == [mode == "off"] * len(texts)
    assert TOKEN not in seen


@pytest.mark.parametrize("seed", range(3))
def test_objects_of_every_size_pass_both_ways_by_many_threads(
    node: Callable[..., Node], data: dict[str, str], seed: int
) -> None:
    """Also those in small pieces, of which TLS holds some decrypted when the next piece is asked for."""
    address = node(data).address
    sizes = [0, 1, 100, 4096, 16383, 16384, 16385, 50_000, 300_000, 3 * MIB + 7]
    print("seed", seed)

    def run(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        with store_at(address, data, namespace=f"space-{number}") as store:
            for turn in range(6):
                chosen = [rng.choice(sizes) + rng.randrange(2) for _ in range(rng.randrange(1, 60))]
                while sum(chosen) > 8 * MIB:
                    chosen.pop()
                objects = {f"{turn}-{i}": rng.randbytes(size) for i, size in enumerate(chosen)}
                results = store.put(list(objects), list(objects.values()))
                stored = [key for key, result in zip(objects, results, strict=True) if result]
                assert len(stored) > len(objects) // 2
                assert [bytes(view or b"") for view in store.get(stored)] == [objects[k] for k in stored]
                into = [bytearray(len(objects[key])) for key in stored]
                assert store.get(stored, into=into) == [len(objects[key]) for key in stored]
                assert into == [bytearray(objects[key]) for key in stored]
                assert all(store.remove(stored))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))


def test_nodes_of_one_pool_and_clients_of_one_read_at_the_other(
    node: Callable[..., Node], data: dict[str, str], runtime_dir: Path
) -> None:
    """A store at one node finds the other by the master, and speaks TLS as the node's file tells it to."""
    master = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
    master.start()
    try:
        a, b = (node(data, name, master=master.addresses[0], host_id=f"host-{name}") for name in ("a", "b"))
        until(lambda: a.server.membership()[0] and b.server.membership()[0])
        (runtime_dir / "node-a.sock.tls").write_bytes(control_settings(made(data)))
        content = os.urandom(5 * MIB)
        with Store(str(runtime_dir / "node-b.sock"), token=TOKEN, timeout_s=PATIENCE_S) as at_b:
            assert at_b.put("key", content)
        with Store(str(runtime_dir / "node-a.sock"), token=TOKEN, timeout_s=PATIENCE_S) as at_a:
            assert bytes(until(lambda: at_a.get("key"))) == content
            assert at_a.put("copied", content, replicas=2).replicas == 2
            assert at_a.remove("key") is True
        assert b.server.metrics()["tcp_sent_bytes_total"] >= len(content)
        assert b.server.metrics()["tcp_received_bytes_total"] >= len(content)
    finally:
        master.stop()


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
def test_who_is_refused_learns_why_and_what_to_do(
    node: Callable[..., Node],
    data: dict[str, str],
    pem: Callable[[str], str],
    runtime_dir: Path,
    server: dict[str, str],
    client: dict[str, str],
    kind: type[Error],
    sentence: str,
) -> None:
    def settings(change: dict[str, str]) -> dict[str, str]:
        return data | {n: pem(v) if n in ("tls_cert", "tls_ca") else v for n, v in change.items()}

    at = node(settings(server))
    with pytest.raises(kind) as raised:
        store_at(at.address, settings(client)).close()
    assert sentence in str(raised.value)
    with Store(str(runtime_dir / "node-a.sock"), token=TOKEN, tls=PoolTls()) as store:
        assert store.put("key", b"1")  # its own host is served


def test_a_name_for_all_nodes(node: Callable[..., Node], data: dict[str, str]) -> None:
    address = node(data).address
    with store_at(address, data | {"tls_data_name": "localhost"}) as store:
        assert store.put("key", b"1")
    with pytest.raises(AuthError, match=r"is not for other\.example"):
        store_at(address, data | {"tls_data_name": "other.example"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tls_cert": ""}, "the node has no certificate to show; set cluster.tls_cert and cluster.tls_key"),
        ({"tls_data": "mutual", "tls_ca": ""}, "name the authorities that vouch for clients"),
    ],
)
def test_settings_that_are_not_enough_are_refused(
    data: dict[str, str], change: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        data_server(made(data | change))


def test_connections_that_end_in_the_middle_cost_others_nothing(
    node: Callable[..., Node], data: dict[str, str]
) -> None:
    """In the handshake of TLS, behind it, and with records that are none."""
    at = node(data)
    host, _, port = at.address.rpartition(":")
    rng = random.Random(7)
    for _ in range(20):
        with ExitStack() as stack:
            for _ in range(4):
                peer = stack.enter_context(socket.create_connection((host, int(port)), 10))
                peer.sendall(b"\x16\x03\x01" + rng.randbytes(rng.randrange(1, 400)))
            with store_at(at.address, data) as store:
                content = os.urandom(100_000)
                assert store.put("key", content, replace=True)
                assert bytes(store.get("key") or b"") == content


def test_a_connection_that_is_changed_on_its_way_brings_no_byte(
    node: Callable[..., Node], data: dict[str, str]
) -> None:
    """TLS finds what a checksum that the changer makes anew would not."""
    at = node(data)
    content = os.urandom(2 * MIB)
    with store_at(at.address, data) as store:
        assert store.put("key", content)
    with Changer(at.address, after=1 * MIB) as changer, store_at(changer.address, data) as store:
        into = bytearray(len(content))
        with pytest.raises(Error):
            store.get("key", into=into)
        assert changer.changed
    with store_at(at.address, data) as store:
        assert bytes(store.get("key") or b"") == content


def test_what_is_broken_behind_good_bytes_is_no_wait(node: Callable[..., Node], data: dict[str, str]) -> None:
    content = os.urandom(40_000)
    at = node(data)
    with store_at(at.address, data) as store:
        assert store.put("key", content)
    with Breaker(at.address, len(content)) as breaker, store_at(breaker.address, data) as store:
        assert store.get("no key") is None
        breaker.armed = True
        with pytest.raises(ProtocolError, match=r"TLS with .* broke"):
            store.get("key", into=bytearray(len(content)))


def test_of_what_the_environment_does_not_name_the_nodes_file_is_heard(
    data: dict[str, str], runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that names tls_control alone, as before, speaks to nodes inside TLS as well."""
    node = runtime_dir / "node-a.sock"
    socket_tls(node).write_bytes(control_settings(made(data)))
    monkeypatch.setenv("MOONPOOL_CLUSTER_TLS_CONTROL", "on")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TLS_CA", data["tls_ca"])
    told = pool_tls_of(node)
    assert told.control is not None
    assert told.data is not None
    ours = pool_tls_for(made({"tls_control": "on", "tls_ca": data["tls_ca"]}), str(node))
    assert ours.control is not None
    assert ours.data is not None
    assert pool_tls_for(made({"tls_data": "off"}), str(node)).data is None


class Between(Sniffer):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Breaker(Between):
    """Once ``armed``, holds the target's answer until ``most`` bytes are there, and changes the last one."""

    def __init__(self, target: str, most: int) -> None:
        self.most, self.armed, self.held = most, False, b""
        super().__init__(target)

    def change(self, seen: bytearray, piece: bytes) -> bytes:
        if seen is not self.down or not self.armed:
            return piece
        self.held += piece
        if len(self.held) < self.most:
            return b""
        self.armed = False
        return self.held[:-1] + bytes([self.held[-1] ^ 1])


class Changer(Between):
    """Changes one byte of what the target says, behind the first ``after``."""

    def __init__(self, target: str, after: int) -> None:
        self.after, self.changed = after, False
        super().__init__(target)

    def change(self, seen: bytearray, piece: bytes) -> bytes:
        if seen is not self.down or self.changed or len(seen) < self.after:
            return piece
        self.changed = True
        middle = len(piece) // 2
        return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
