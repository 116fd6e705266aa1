"""Tenants' own keys: what a key opens and what it does not, over a real master and two nodes."""

from __future__ import annotations

import logging
import mmap
import resource
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from moonpool import Store, _native
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.config.tenants_file import (
    ROLES,
    TenantRole,
    TenantRow,
    TenantsFile,
    native_rows,
    read_tenants,
    tenants_text,
)
from moonpool.core.errors import AuthError, ConfigError, Error
from moonpool.core.service import tenant_keys
from moonpool.core.service.drain import Drain, DrainRequest
from moonpool.core.service.tenant_keys import TenantKeys
from moonpool.core.store.types import Presence
from tests.token_file import TokenFile

from ..cluster.tcp_wire import TcpWire
from .store_bed import MIB, TOKEN, until
from .tenants_bed import ROWS, SALTS, TenantsPool, hash_without_salt, row, secret, to_master_by_node
from .wire_client import (
    COMMIT,
    LEASE,
    ONE_WAY,
    OPEN_SPACE,
    PUT,
    RELAY,
    REMOVE,
    Wire,
    commit,
    lease,
    open_space,
    put,
    remove,
)

WRONG = "no key of tenant"
LOCATE, PLACE, FORGET, ORDERED = 36, 37, 38, 41


@pytest.fixture(params=["always", "never"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TenantsPool]:
    """Processes ask the master by their node, and by themselves."""
    made = TenantsPool(tmp_path, relay=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("far", [False, True])
def test_a_key_opens_its_own_tenant(pool: TenantsPool, far: bool) -> None:
    for tenant, other in (("a", "b"), ("b", "a"), ("a", "default")):
        with pytest.raises(AuthError, match=WRONG):
            pool.store(other, secret(tenant, "writer"), far=far)
    with pytest.raises(AuthError, match=WRONG):
        pool.store("a", b"a key that no row has", far=far)
    with pool.store("a", secret("a", "writer"), far=far) as store:
        assert store.put("key", b"bytes")
    with pool.store("a", TOKEN, far=far) as store:  # the cluster token opens all
        assert bytes(store.get("key")) == b"bytes"
    assert pool.nodes["one"].metrics()["auth_failures_total"] == 4


def test_refusals_are_told_to_the_operator_and_not_to_strangers(pool: TenantsPool) -> None:
    told = []
    for tenant, key in (("a", b"a key that no row has"), ("default", secret("a", "writer"))):
        with pytest.raises(AuthError) as refused:
            pool.store(tenant, key)
        told.append(str(refused.value).replace(f'"{tenant}"', "it"))
    assert told[0] == told[1]  # whether a tenant has keys is not said
    noted = [text for _, kind, _, text, _ in pool.nodes["one"].take_notes() if kind == "auth_refused"]
    assert [text.endswith("(the tenant has other keys)") for text in noted] == [True, False]
    assert noted[1].endswith("(no row has that tenant)")
    assert not any(secret("a", "writer").decode() in text for text in noted)


def test_nothing_of_a_tenant_is_within_reach_of_another(pool: TenantsPool) -> None:
    with (
        pool.store("a", secret("a", "writer")) as a,
        pool.store("a", secret("a", "reader"), "two") as reader,
        pool.store("b", secret("b", "admin"), "two") as b,
        pool.store("b", secret("b", "writer"), far=True) as far,
    ):
        assert a.put(["key", "other"], [b"of a", b"too"], replicas=2)
        pool.told(4)
        for store in (b, far):
            assert store.get("key") is None
            assert store.exists(["key", "other"]) == [Presence.MISS, Presence.MISS]
            assert store.longest_prefix(["key", "other"]).blocks == 0
            assert not any(store.remove(["key", "other"]))
        assert b.list() == []
        assert b.put("key", b"of b", replace=True)
        assert [entry.key for entry in b.list()] == [b"key"]
        # As the master has it: by the hash that is made of what b may know of a's key.
        stolen = hash_without_salt("a", b"key")
        directory = pool.directory("b", secret("b", "writer"))
        assert list(directory.locate(stolen)[0]) == []
        assert directory.forget(stolen, []) == 0
        directory.close()
        assert any(b.remove(["key"]))
        pool.told(4)
        assert bytes(a.get("key")) == b"of a"
        assert bytes(reader.get("key")) == b"of a"


def test_a_hash_without_a_salt_is_in_reach_of_other_tenants(tmp_path: Path) -> None:
    """What salts are for, and why docs/security.md tells to give each tenant one."""
    pool = TenantsPool(tmp_path, salts={})
    with pool.store("a", secret("a", "writer")) as a:
        assert a.put("key", b"of a")
        pool.told(1)
        directory = pool.directory("b", secret("b", "writer"))
        assert len(directory.locate(hash_without_salt("a", b"key"))[0]) == 1
        directory.close()
    pool.close()


def test_roles(pool: TenantsPool) -> None:
    with (
        pool.store("a", secret("a", "writer")) as writer,
        pool.store("a", secret("a", "admin")) as admin,
        pool.store("a", secret("a", "reader")) as near,
        pool.store("a", secret("a", "reader"), "two", far=True) as far,
    ):
        assert writer.put("key", b"bytes")
        pool.told(1)
        for reader in (near, far):
            assert bytes(reader.get("key")) == b"bytes"
            for call in (
                lambda reader=reader: reader.put("new", b"x"),
                lambda reader=reader: reader.put("key", b"x", replace=True),
                lambda reader=reader: reader.put("new", b"x", unique=True),
                lambda reader=reader: reader.remove("key"),
                lambda reader=reader: reader.remove("key", node="one"),
            ):
                with pytest.raises(AuthError, match="which may not put, replace or remove objects"):
                    call()
        for store in (near, writer):
            with pytest.raises(AuthError, match="may not list objects; use a key with the role admin"):
                store.list()
        assert [entry.key for entry in admin.list()] == [b"key"]
        directory = pool.directory("a", secret("a", "reader"))
        (holders,) = directory.locate(near._client.key_hashes([b"key"]))
        assert len(holders) == 1
        with pytest.raises(AuthError, match="may not put, replace or remove"):
            directory.forget(hash_without_salt("a", b"key"), [])
        with pytest.raises(AuthError, match="may not put, replace or remove"):
            directory.place(1, 1)
        directory.close()
        assert bytes(near.get("key")) == b"bytes"
        assert any(writer.remove(["key"]))


def test_a_node_refuses_a_reader_that_asks_all_the_same(pool: TenantsPool) -> None:
    """Whatever the client's own library would have refused before."""
    with Wire.open(pool.place("one"), secret("a", "reader"), tenant=b"a") as wire:
        bodies = {LEASE: lease(1, 1), COMMIT: commit(wire.space, []), REMOVE: remove(wire.space, [b"key"])}
        for kind, body in bodies.items():
            code, text = wire.ask(kind, body).error
            assert code == 2
            assert 'the key of tenant "a" has the role reader' in text
            assert wire.lookup([b"key"])[1] == 0  # the connection goes on
        wire.send(COMMIT, bodies[COMMIT], flags=ONE_WAY)
        assert "has the role reader" in wire.ended()[1]


def test_a_reader_cannot_map_the_arena_writable(pool: TenantsPool) -> None:
    for role, may in (("reader", False), ("writer", True)):
        with Wire.open(pool.place("one"), secret("a", role), tenant=b"a") as wire:
            arena = wire.descriptors[0]
            mmap.mmap(arena, mmap.PAGESIZE, prot=mmap.PROT_READ).close()
            if may:
                mmap.mmap(arena, mmap.PAGESIZE).close()
                continue
            with pytest.raises(PermissionError):
                mmap.mmap(arena, mmap.PAGESIZE)


def test_a_node_refuses_a_reader_that_puts_over_tcp_all_the_same(pool: TenantsPool) -> None:
    """The bytes of the objects stand behind the head: the connection ends."""
    key = secret("a", "reader")
    with TcpWire(socket.create_connection(_host_and_port(pool.place("one", far=True)), 10.0)) as wire:
        wire.prove(key, b"store", b"a")
        (wire.space,) = struct.unpack("<I", wire.ask(OPEN_SPACE, open_space(b"default", b"")).body)
        assert wire.ask(REMOVE, remove(wire.space, [b"key"])).error[0] == 2
        data = bytes(MIB)
        wire.send(PUT, put(wire.space, [(_native.crc32c(data), b"key", b"", data)]), request_id=5)
        refused = wire.receive()
        assert refused.request_id == 0
        assert refused.error[0] == 2
        assert 'the key of tenant "a" has the role reader' in refused.error[1]
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.is_closed()
    with pool.store("a", key) as store:
        assert store.get("key") is None
    assert pool.nodes["one"].metrics()["objects"] == 0


def test_a_node_passes_no_removal_of_a_reader_on(tmp_path: Path) -> None:
    pool = TenantsPool(tmp_path, relay="always")
    key = hash_without_salt("a", b"key")
    questions = {
        "order": struct.pack("<IB3xBBHI", 5000, LOCATE, 6, 0, 0, 1) + key,
        "place": struct.pack("<IB3xQHBBHH", 5000, PLACE, 1, 1, 0, 0, 0, 0),
        "forget": struct.pack("<IB3xIHH", 5000, FORGET, 1, 0, 0) + key,
        "ordered": struct.pack("<IB3xQQIHH", 5000, ORDERED, 1, 1, 1, 0, 0) + key,
    }
    with to_master_by_node(pool.place("one"), b"a", secret("a", "reader")) as wire:
        for body in questions.values():
            wire.send(RELAY, body, request_id=7)
            refused = wire.receive()
            assert refused.request_id == 7
            assert refused.error[0] == 2
            assert 'the key of tenant "a" has the role reader' in refused.error[1]
        wire.send(RELAY, struct.pack("<IB3xBBHI", 5000, LOCATE, 0, 0, 1, 1) + key, request_id=8)
        assert wire.receive().kind == LOCATE
    with to_master_by_node(pool.place("one"), b"a", secret("a", "writer")) as wire:
        wire.send(RELAY, questions["forget"], request_id=9)
        assert wire.receive().kind == FORGET
        pool.set_rows([each for each in ROWS if each.name != "a"])
        assert "withdrawn" in wire.ended()[1]
    pool.close()


@pytest.mark.parametrize("role", ROLES)
def test_a_tenants_key_is_no_nodes(pool: TenantsPool, role: TenantRole) -> None:
    """Of what opens by the cluster token alone, also where the tenant is the one that nodes name."""
    key = secret("default", role)
    pool.set_rows([*ROWS, TenantRow(name="default", role=role, keys=(key.decode(),))])
    pool.store("default", key).close()
    refusal = 'a tenant\'s key does not open the service "{}", which needs the cluster token'
    node = _native.Server(
        str(pool.folder / "rogue.sock"),
        [("a", 2 * MIB)],
        key,
        node_settings(),
        name="rogue",
        listen=["127.0.0.1:0"],
        master=pool.address,
    )
    node.start()
    until(lambda: refusal.format("member") in node.membership()[2])
    node.stop()
    with pytest.raises(AuthError, match=refusal.format("master")):
        _native.master_state(pool.address, key, timeout_s=10.0)
    standby = _native.MasterServer(["127.0.0.1:0"], key, master_settings(), standby_of=pool.address)
    standby.start()
    until(lambda: any(refusal.format("standby") in note[3] for note in pool.master.take_notes()), 60.0)
    standby.stop()


def test_no_call_fails_while_one_key_replaces_another(pool: TenantsPool, tmp_path: Path) -> None:
    old, new = secret("a", "writer"), secret("a", "writer", 2)
    file = TokenFile(tmp_path / "key", old)
    others = [each for each in ROWS if (each.name, each.role) != ("a", "writer")]
    with pool.store("a", file.token()) as store, pool.store("a", file.token(), "two", far=True) as far:
        done = threading.Event()
        calls, failed = [0], []

        def use() -> None:
            while not done.is_set():
                for each in (store, far):
                    try:
                        assert each.put("key", b"%d" % calls[0], replace=True)
                        assert bytes(each.get("key") or b"") == b"%d" % calls[0]
                    except (Error, AssertionError) as error:
                        failed.append(error)
                calls[0] += 1

        def some_calls() -> None:
            before = calls[0]
            until(lambda: calls[0] > before + 3, 60.0)

        user = threading.Thread(target=use, daemon=True)
        user.start()
        some_calls()
        pool.set_rows([*others, row("a", "writer", 1, 2)])
        some_calls()
        # Of both stores, and of each one to the other's node; at the master those that ask it themselves.
        relayed = pool.relay == "always"
        expected = dict(zip(_connections(pool), (1, 3, 2) if relayed else (2, 2, 2), strict=True))
        before = _connections(pool)
        file.replace(new)
        until(lambda: all(n >= before[at] + expected[at] for at, n in _connections(pool).items()), 60.0)
        some_calls()
        pool.set_rows([*others, row("a", "writer", 2)])
        some_calls()
        done.set()
        user.join()
        assert not failed
    with pytest.raises(AuthError, match=WRONG):
        pool.store("a", old)


def test_a_key_that_is_withdrawn_ends_its_connections(pool: TenantsPool) -> None:
    with (
        pool.store("a", secret("a", "writer")) as near,
        pool.store("a", secret("a", "writer"), far=True) as far,
        pool.store("b", secret("b", "writer")) as other,
        pool.store("a", TOKEN) as trusted,
    ):
        for store in (near, far, other):
            assert store.put("key", b"bytes")
        directory = pool.directory("a", secret("a", "writer"))
        assert len(directory.members(True)[1]) == 2
        pool.set_rows([each for each in ROWS if each.name != "a"])

        def refused(store: Store) -> bool:
            try:
                return store.put("new", b"x") is None
            except AuthError as error:
                return WRONG in str(error) or "withdrawn" in str(error)
            except Error:
                return False

        for store in (near, far):
            until(lambda store=store: refused(store), 60.0)
        until(lambda: _fails(lambda: directory.members(True)), 60.0)
        directory.close()
        assert bytes(other.get("key")) == b"bytes"
        assert bytes(trusted.get("key")) == b"bytes"


def test_keys_of_one_tenant_share_large_objects(pool: TenantsPool) -> None:
    """A manifest is known by the salt, which all keys of the tenant have in common."""
    data = bytes(range(256)) * (5 * MIB // 256)
    with (
        pool.store("a", secret("a", "writer")) as writer,
        pool.store("a", secret("a", "reader"), "two") as reader,
        pool.store("a", TOKEN, "two") as trusted,
    ):
        assert writer.put("large", data)
        for each in (reader, trusted):
            until(lambda each=each: each.get("large") is not None)
            assert bytes(each.get("large")) == data


def test_objects_of_a_tenant_with_a_salt_are_found_on_the_disk_again(tmp_path: Path) -> None:
    def node(salts: dict[str, str]) -> _native.Server:
        server = _native.Server(
            str(tmp_path / "ssd.sock"),
            [("a", 8 * MIB)],
            TOKEN,
            node_settings(),
            ssd=[(str(tmp_path / "ssd"), 64 * MIB)],
            salts=salts,
        )
        server.start()
        return server

    for salts, found in ((SALTS, None), (SALTS, b"bytes"), ({}, None)):
        server = node(salts)
        with Store(str(tmp_path / "ssd.sock"), tenant="a", token=TOKEN, timeout_s=20.0) as store:
            value = store.get("key")
            assert (None if value is None else bytes(value)) == found
            if salts and found is None:
                assert store.put("key", b"bytes")
        server.stop()


def test_a_drain_copies_objects_of_a_tenant_with_a_salt(pool: TenantsPool) -> None:
    with (
        pool.store("a", secret("a", "writer")) as one,
        pool.store("a", secret("a", "reader"), "two") as two,
    ):
        assert one.put(["key", "other"], [b"of a", b"too"])

        def client(tenant: str, namespace: str, fingerprint: bytes) -> _native.Client:
            made = _native.Client(pool.place("one"), TOKEN, tenant, namespace, fingerprint, timeout_s=20.0)
            made.connect()
            return made

        drain = Drain("one", pool.nodes["one"], client, DrainRequest())
        drain.start()
        until(lambda: not drain.is_running, 60.0)
        assert drain.now().copied_objects == 2
        pool.nodes.pop("one").stop()
        until(lambda: two.get("key") is not None)
        assert bytes(two.get("other")) == b"too"


def test_a_key_opens_the_masters_of_all_ranges(tmp_path: Path) -> None:
    masters = []
    for index in range(2):
        master = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings(), range=(index, 2))
        master.set_tenants(native_rows(ROWS))
        master.start()
        masters.append(master)
    addresses = ";".join(master.addresses[0] for master in masters)
    directory = _native.DirectoryClient(addresses, secret("a", "reader"), "a", timeout_s=10.0)
    assert directory.members(True)[1] == []
    directory.close()
    directory = _native.DirectoryClient(addresses, secret("a", "reader"), "b", timeout_s=10.0)
    with pytest.raises(AuthError, match=WRONG):
        directory.members(True)
    directory.close()
    for master in masters:
        master.stop()


BAD_FILES = {
    "without a name": "[[tenants]]",
    "no row": "",
    "no file of tenants": "x = " + "9" * 5000,  # tomllib has a ValueError for it
    "recursion": "x = " + "[" * 100_000,
    "not UTF-8": b"\xff",
}


def test_the_file_is_followed(
    pool: TenantsPool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_keys, "FOLLOW_S", 0.02)
    file = TokenFile(tmp_path / "tenants.toml", tenants_text(ROWS).encode())
    assert read_tenants(str(file.path)) == ROWS
    log = logging.getLogger("moonpool.node")
    node = pool.nodes["one"]
    follower = TenantKeys(TenantsFile(str(file.path)), node, log)
    with caplog.at_level(logging.INFO), pool.store("a", secret("a", "reader")) as reader:
        for why, text in BAD_FILES.items():
            caplog.clear()
            file.replace(text if isinstance(text, bytes) else text.encode())
            until(lambda: "the tenants' keys from before are in use" in caplog.text)
            assert why in caplog.text
            assert reader.get("key") is None  # it has its connection still
        file.replace(tenants_text([*ROWS[1:], row("a", "reader", 2)]).encode())
        until(lambda: "5 rows of tenants are in force" in caplog.text)
    pool.store("a", secret("a", "reader", 2)).close()
    with pytest.raises(AuthError, match=WRONG):
        pool.store("a", secret("a", "reader"))
    follower.close()
    assert secret("a", "reader").decode() not in caplog.text


def test_a_file_that_could_not_be_read_is_read_at_the_next_look(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tenants.toml", tenants_text(ROWS).encode())
    followed = TenantsFile(str(file.path))
    file.replace(tenants_text(ROWS[1:]).encode())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    failed = []
    try:
        for _ in range(2):
            try:
                followed.reread()
            except ConfigError as error:
                failed.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert ["Too many open files" in why for why in failed] == [True, True]
    assert followed.rows == ROWS
    followed.reread()
    assert followed.rows == ROWS[1:]


class Unwilling:
    """A server that does not take rows, for one look."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def set_tenants(self, rows: Sequence[tuple[str, str, Sequence[str]]]) -> None:
        self.calls.append(len(rows))
        if len(self.calls) == 2:
            raise MemoryError(rows[0][2][0])


def test_rows_that_were_not_taken_are_handed_over_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_keys, "FOLLOW_S", 0.02)
    file = TokenFile(tmp_path / "tenants.toml", tenants_text(ROWS).encode())
    server = Unwilling()
    follower = TenantKeys(TenantsFile(str(file.path)), server, logging.getLogger("moonpool.node"))
    file.replace(tenants_text(ROWS[1:]).encode())
    until(lambda: server.calls == [5, 4, 4])
    follower.close()
    assert "cannot be followed now: MemoryError; the tenants' keys from before are in use" in caplog.text
    assert secret("a", "writer").decode() not in caplog.text


GOOD = '[[tenants]]\nname = "a"\nrole = "writer"\nkeys = ["0123456789abcdef"]\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[tenants]]", r"row 1 \(without a name\)"),
        (GOOD.replace("writer", "owner"), r"row 1 \(a\) .*owner"),
        (GOOD.replace("0123456789abcdef", "short"), "a key of 5 bytes: fewer than 16 can be guessed"),
        (
            GOOD.replace("]\n", ', "x", "y"]\n', 2).replace('[[tenants], "x", "y"]', "[[tenants]]"),
            "at most|length",
        ),
        (GOOD + GOOD.replace("writer", "reader"), "rows 1 and 2 .* have the same key"),
        (GOOD + GOOD.replace("0", "z"), "are both the writer of a"),
        (
            GOOD + GOOD.replace("0", "z").replace("writer", "reader") + 'salt = "a-salt-of-16-bytes"',
            "salts|row 2",
        ),
        (GOOD + "more = 1", "row 1"),
        (GOOD + 'dram_min = "much"', r"row 1 \(a\) .*: dram_min: 'much' is no size"),
        (GOOD + "ssd_max = -1", r"row 1 \(a\) .*ssd_max"),
        (GOOD + "dram_max = 4096", "dram_max of tenant a .* is under 2 MiB"),
        (GOOD + 'dram_min = "8MiB"\ndram_max = "4MiB"', "8.0 MiB, more than its dram_max of 4.0 MiB"),
        (
            GOOD + "pins_max = 1\n" + GOOD.replace("0", "z").replace("writer", "reader") + "pins_max = 2",
            "rows 1 and 2 .* have different pins_max; tenant a has one",
        ),
        ("not toml", "no file of tenants"),
        ("# none\n", "has no row"),
        ("tenants = []", "has no row"),
        (GOOD.replace('"a"', "0x" + "f" * 5000), r"row 1 \(without a name\)"),
    ],
)
def test_a_file_with_an_error_names_its_row_and_no_key(tmp_path: Path, text: str, why: str) -> None:
    file = TokenFile(tmp_path / "tenants.toml", text.encode())
    with pytest.raises(ConfigError, match=why) as error:
        read_tenants(str(file.path))
    assert "0123456789abcdef" not in str(error.value)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tenants.toml", GOOD.encode())
    assert len(read_tenants(str(file.path))) == 1
    file.replace(GOOD.encode(), 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tenants(str(file.path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tenants(str(tmp_path / "absent"))


def _host_and_port(place: str) -> tuple[str, int]:
    host, _, port = place.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _connections(pool: TenantsPool) -> dict[str, int]:
    servers = {"master": pool.master, **pool.nodes}
    return {name: server.metrics()["connections_total"] for name, server in servers.items()}


def _fails(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except Error:
        return True
    return False
