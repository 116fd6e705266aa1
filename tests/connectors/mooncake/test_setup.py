"""setup() in all its forms, before it and after close(), and the faults of masters and nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake import _ssd
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

import moonpool
from moonpool.core.config.paths import read_or_create_token
from moonpool.core.service.listen_addresses import _first_address
from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB, until

HOST, P2P = "127.0.0.1", "P2PHANDSHAKE"
Make = Callable[..., Any]
NAMES = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
)


def test_by_position_and_by_keyword(master: MasterProcess) -> None:
    by_keyword = (HOST, "http://127.0.0.1:1/metadata", 16 * MIB, 0, "tcp", "", master.address)
    for arguments, keywords in (
        ((HOST, P2P, 16 * MIB, MIB, "tcp", "", master.address), {}),
        ((HOST, P2P, 16 * MIB, MIB, "rdma", "mlx5_0", master.address, None), {"tenant_id": "default"}),
        ((), dict(zip(NAMES, by_keyword, strict=True))),
    ):  # fmt: skip
        store = MooncakeDistributedStore()
        assert store.setup(*arguments, **keywords) == 0
        assert store.setup(*arguments, **keywords) == 0
        assert store.get_hostname().startswith("127.0.0.1:")
        assert store.health_check() == 0
        assert store.put("k", b"v") == 0
        assert store.get("k") == b"v"
        assert store.remove("k") == 0
        assert store.close() == 0


@pytest.mark.parametrize("size", [16 * MIB, str(16 * MIB), "16mb", "16 MiB"])
def test_by_dict(master: MasterProcess, size: Any) -> None:
    store = MooncakeDistributedStore()
    given = {"local_hostname": HOST, "metadata_server": P2P, "global_segment_size": size, "protocol": "tcp"}
    assert store.setup(given | {"master_server_address": master.address, "device_name": ""}) == 0
    assert store._access.settings.segment == 16 * MIB
    assert store.setup(config=given) == 0  # is set up already
    assert store.close() == 0
    for tenant in (None, ""):
        nobody = MooncakeDistributedStore()
        settings = given | {"master_server_address": master.address, "tenant_id": tenant}
        assert nobody.setup(settings | {"enable_ssd_offload": "disable"}) == 0
        assert nobody._access.settings.tenant == "default"
        assert nobody.close() == 0


def test_what_cannot_be_meant(master: MasterProcess, caplog: pytest.LogCaptureFixture) -> None:
    good = [HOST, P2P, 16 * MIB, MIB, "tcp", "", master.address]
    with pytest.raises(TypeError, match="foo"):
        MooncakeDistributedStore().setup(*good, foo=1)
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup(*good[:-1])
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup(HOST, P2P, "16mb", *good[3:])
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup(None, *good[1:])
    for arguments, word in (
        (({"local_hostname": HOST, "metadata_server": P2P},), "master_server_addr"),
        (
            ({"local_hostname": HOST, "master_server_addr": master.address, "global_segment_size": "many"},),
            "many",
        ),
        (
            ({"local_hostname": HOST, "master_server_addr": master.address, "global_segment_size": "1.5"},),
            "1.5",
        ),
        ((*good[:-1], "etcd://127.0.0.1:2379"), "etcd"),
        ((HOST, P2P, -1, *good[3:]), "below 0"),
        ((*good[:-1], "127.0.0.1:notaport"), "notaport"),
    ):
        caplog.clear()
        store = MooncakeDistributedStore()
        assert store.setup(*arguments) == -600, arguments
        assert word in caplog.text
        assert store.put("k", b"v") == -1


@pytest.mark.parametrize("script", ["closed_store.py", "bad_input.py"])
def test_before_setup_after_close_and_with_bad_input(script: str, master: MasterProcess) -> None:
    """Every method, in a process of its own: none may end it."""
    script = str(Path(__file__).with_name(script))
    done = subprocess.run(
        [sys.executable, script, master.address], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_token_and_the_master_are_looked_at(
    master: MasterProcess, free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mooncake._access.JOIN_TIMEOUT_S", 0.5)
    for segment in (0, 16 * MIB):
        caplog.clear()
        store = MooncakeDistributedStore()
        assert store.setup(HOST, P2P, segment, 0, "tcp", "", f"127.0.0.1:{free_port}") in (-900, -901)
        assert str(free_port) in caplog.text
        assert store.put("k", b"v") == -900
        assert store.health_check() == 2
        store.close()
        assert store.put("k", b"v") == -1
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another")
    assert MooncakeDistributedStore().setup(HOST, P2P, 0, 0, "tcp", "", master.address) == -601
    monkeypatch.setattr("mooncake._access.JOIN_TIMEOUT_S", 10.0)
    refused = MooncakeDistributedStore()
    assert refused.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", master.address) == -601
    assert refused._waiting is None  # nobody goes on trying
    folder = Path(os.environ["MOONPOOL_RUNTIME_DIR"])
    assert not list(folder.glob(f"node-mooncake-{os.getpid()}-*"))


@pytest.mark.parametrize("segment", [0, 16 * MIB])
def test_a_master_that_starts_later_is_joined(
    segment: int, free_port: int, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("mooncake._access.JOIN_TIMEOUT_S", 0.1)
    monkeypatch.setattr("mooncake._base.JOIN_AGAIN_S", 0.05)
    address = f"{HOST}:{free_port}"
    there: MasterProcess | None = None
    store, other = MooncakeDistributedStore(), MooncakeDistributedStore()
    try:
        assert store.setup(HOST, P2P, segment, 0, "tcp", "", address) in (-900, -901)
        assert store.put(key, b"x") in (-900, -901)
        there = MasterProcess(listen=address)
        if segment:  # by itself, whether or not somebody calls
            until(lambda: store._waiting.server.membership()[0])
        else:
            monkeypatch.setattr("mooncake._access.JOIN_TIMEOUT_S", 5.0)
            assert other.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", address) == 0
        assert until(lambda: store.put(key, b"x") == 0)
        assert store.get(key) == b"x"
        assert store.health_check() == 0
    finally:
        store.close()
        other.close()
        if there is not None:
            there.close()


@pytest.mark.parametrize("leave", ["", "import os; os.fork() or exit(); assert os.wait()[1] == 0"])
def test_a_process_with_pages_ends_at_once(master: MasterProcess, leave: str) -> None:
    """With the store still open, and in a child of fork(): nobody waits for a thread that is no more."""
    code = (
        "from mooncake import _pages; from mooncake.store import MooncakeDistributedStore; import sys\n"
        "_pages.START_TIMEOUT_S = 3600\n"
        "store = MooncakeDistributedStore()\n"
        f"assert store.setup({HOST!r}, {P2P!r}, {16 * MIB}, 0, 'tcp', '', {master.address!r}) == 0\n"
        "store._pages = _pages.ClientPages(store._access, 0)\n"
        f"sys.kept = store\n{leave}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_chosen_token_the_host_stays_by_itself(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN")
    token = read_or_create_token()
    there = MasterProcess(env={"MOONPOOL_CLUSTER_TOKEN": token.decode()})
    try:
        store = MooncakeDistributedStore()
        assert store.setup("10.1.2.3", P2P, 16 * MIB, 0, "tcp", "", there.address) == 0
        assert store.get_hostname().startswith("10.1.2.3:")  # the name stays; others reach it at
        assert [one.address.rpartition(":")[0] for one in store._access.members()] == ["127.0.0.1"]
        store.close()
    finally:
        there.close()


def test_beside_an_engine_that_has_the_port(master: MasterProcess, key: str) -> None:
    """As SGLang does it: the store is told the session id of the transfer engine, who listens there."""
    engine = TransferEngine()
    assert engine.initialize(HOST, P2P, "tcp", "") == 0
    session = f"{HOST}:{engine.get_rpc_port()}"
    store = MooncakeDistributedStore()
    given = (session, P2P, 16 * MIB, 0, "tcp", "", master.address)
    assert store.setup(*given, engine.get_engine()) == 0
    assert store.get_hostname() == session
    assert store._access.server.addresses != [session]
    assert store.put(key, b"x") == 0
    (copy,) = store.get_replica_desc(key)
    assert copy.get_memory_descriptor().buffer_descriptor.transport_endpoint == session
    assert store.close() == 0


@pytest.fixture
def lan() -> str:
    """An address of this host that others reach."""
    if not (found := _first_address()):
        pytest.skip("this host has no address but loopback")
    return found


@pytest.mark.parametrize("hostname", ["localhost", "127.0.0.1", ""])
def test_loopback_is_no_name_for_a_master_elsewhere(lan: str, hostname: str) -> None:
    there = MasterProcess(listen=f"{lan}:0")
    store = MooncakeDistributedStore()
    try:
        assert store.setup(hostname, P2P, 16 * MIB, 0, "tcp", "", there.address) == 0
        assert store.get_hostname().startswith(f"{lan}:")
    finally:
        store.close()
        there.close()


def test_a_refused_hostname_is_named(
    lan: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN")
    store = MooncakeDistributedStore()
    assert store.setup(lan, P2P, 16 * MIB, 0, "tcp", "", f"{lan}:1") == -600
    assert f"local_hostname = '{lan}'" in caplog.text


@pytest.mark.parametrize(
    ("master_at", "hostname"), [("[::1]", "::1"), ("[::1]:PORT", "[::1]"), ("::1", "[::1]:0")]
)
def test_ipv6(master_at: str, hostname: str, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    there = MasterProcess(listen="[::1]:0")
    port = there.address.rpartition(":")[2]
    monkeypatch.setattr("mooncake._access.MASTER_PORT", int(port))
    store = MooncakeDistributedStore()
    try:
        assert store.setup(hostname, P2P, 16 * MIB, 0, "tcp", "", master_at.replace("PORT", port)) == 0
        assert store.get_hostname().startswith("[::1]:")
        assert store.put(key, b"x") == 0
    finally:
        store.close()
        there.close()


def test_two_stores_of_one_process_share_the_pool(make_store: Make, key: str) -> None:
    one, other = make_store(), make_store()
    assert one.put(key, b"from one") == 0
    assert until(lambda: other.get(key)) == b"from one"
    assert one.get_hostname() != other.get_hostname()


def test_a_guest_uses_the_memory_of_others(make_store: Make, key: str) -> None:
    owner, guest = make_store(), make_store(0)
    assert guest.put(key, b"given away") == 0
    assert until(lambda: owner.is_exist(key)) == 1
    assert guest.get(key) == b"given away"
    assert guest.get_hostname().startswith(f"{HOST}:")


def test_a_guest_alone_is_told_to_wait_and_goes_on(keys: Callable[[int], list[str]]) -> None:
    """-200 is what callers slow down for."""
    first, second = keys(2)
    there = MasterProcess()
    try:
        guest = MooncakeDistributedStore()
        assert guest.setup(HOST, P2P, 0, 0, "tcp", "", there.address) == 0
        assert guest.put(first, b"x") == -200
        assert guest.is_exist(first) == -1  # nobody can say
        with pytest.raises(moonpool.Unavailable, match="no node"):
            guest.get(first)
        owner = MooncakeDistributedStore()
        assert owner.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", there.address) == 0
        assert until(lambda: guest.put(first, b"x") == 0)
        other = MooncakeDistributedStore()
        assert other.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", there.address) == 0
        owner.close()  # the guest's node is gone, with what it had
        assert until(lambda: guest.put(second, b"y") == 0)
        assert guest.get(second) == b"y"
        assert guest.get(first) in (b"", b"x")
        other.close()
        guest.close()
    finally:
        there.close()


def test_a_dead_master_loses_nothing(free_port: int, key: str) -> None:
    there = MasterProcess(listen=f"{HOST}:{free_port}")
    store = MooncakeDistributedStore()
    assert store.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", there.address) == 0
    assert store.put(key, b"stays") == 0
    address = there.address
    there.kill()
    assert store.get(key) == b"stays"
    assert store.is_exist(key) == 1
    assert store.put(f"{key}-later", b"goes on") == 0
    assert store.health_check() == 2
    there.close()
    there = MasterProcess(listen=address)
    try:
        until(lambda: store.health_check() == 0)
        assert store.get(f"{key}-later") == b"goes on"
        assert until(lambda: [one.status for one in store.get_replica_desc(key)])
    finally:
        store.close()
        there.close()


def test_a_dead_provider_is_a_miss(master: MasterProcess, make_store: Make, key: str) -> None:
    """Its process is killed; what it alone had is gone, and nobody waits long."""
    store = make_store()
    code = (
        "import sys; from mooncake.store import MooncakeDistributedStore as S; s = S()\n"
        f"assert s.setup({HOST!r}, {P2P!r}, {16 * MIB}, 0, 'tcp', '', {master.address!r}) == 0\n"
        f"assert s.put({key!r}, b'short-lived') == 0\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    provider = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert provider.stdout is not None
        assert provider.stdout.readline() == b"ready\n"
        assert until(lambda: store.get(key)) == b"short-lived"
    finally:
        provider.kill()
        provider.communicate()
    until(lambda: store.get(key) == b"")
    until(lambda: store.is_exist(key) <= 0)  # -1, not known, until the master gives the provider up
    assert store.put(key, b"anew") == 0
    assert store.get(key) == b"anew"


def test_a_full_pool_says_so(master: MasterProcess, keys: Callable[[int], list[str]]) -> None:
    """What is pinned is not evicted: -200 until it is let go."""
    there = MasterProcess()
    try:
        store = MooncakeDistributedStore()
        assert store.setup(HOST, P2P, 8 * MIB, 0, "tcp", "", there.address) == 0
        piece = np.ones(MIB, np.uint8)
        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        names = keys(16)
        codes = [store.put(name, piece, pinned) for name in names]
        assert set(codes) == {0, -200}
        held = [name for name, code in zip(names, codes, strict=True) if code == 0]
        assert store.batch_is_exist(held) == [1] * len(held)
        assert store.put("too large", np.ones(8 * MIB, np.uint8)) == -200
        for name in held:
            assert store.remove(name) == 0
        assert store.batch_put_from(names, [piece.ctypes.data] * 16, [MIB] * 16).count(0) > 0
        store.close()
    finally:
        there.close()


def test_tenants_share_nothing(make_store: Make, key: str) -> None:
    one, other = make_store(tenant_id="one"), make_store()
    assert one.put(key, b"mine") == 0
    assert other.put(f"{key}-other", b"theirs") == 0
    assert other.is_exist(key) == 0
    assert one.remove_all() == 1
    assert other.get(f"{key}-other") == b"theirs"


def test_ssd_offload(tmp_path: Path, keys: Callable[[int], list[str]]) -> None:
    """A pool of one small segment, and no faster than the disk: nothing is lost, however it is read."""
    there = MasterProcess()
    store = MooncakeDistributedStore()
    try:
        given = (HOST, P2P, 8 * MIB, 0, "tcp", "", there.address)
        assert store.setup(*given, enable_ssd_offload=True, ssd_offload_path=str(tmp_path / "ssd")) == 0
        written = 0
        for size in (MIB, MIB // 4):
            names = keys(24 * MIB // size)
            for i, name in enumerate(names):
                until(lambda name=name, i=i, size=size: store.put(name, bytes([i]) * size) == 0)
                written += 1
                until(lambda n=written: store._ask(lambda one: one.stat())["ssd_objects"] >= n)
            assert [store.get(name)[:1] for name in names] == [bytes([i]) for i in range(len(names))]
            assert [store.get(name)[:1] for name in names] == [bytes([i]) for i in range(len(names))]
        assert any(tmp_path.joinpath("ssd").iterdir())
        assert store.unmount_local_disk_segment() == -1011
    finally:
        store.close()
        there.close()


def test_an_ssd_outlives_its_process(tmp_path: Path, keys: Callable[[int], list[str]]) -> None:
    """The next process that takes the path finds what was written there; a close() writes the rest."""
    names, there = keys(24), MasterProcess()  # of a pool of its own: nothing goes elsewhere
    code = (
        "import sys, time; from mooncake.store import MooncakeDistributedStore as S; s = S()\n"
        f"given = ({HOST!r}, {P2P!r}, {8 * MIB}, 0, 'tcp', '', {there.address!r})\n"
        f"assert s.setup(*given, enable_ssd_offload=True, ssd_offload_path={str(tmp_path)!r}) == 0\n"
        f"for i, name in enumerate({names!r}):\n"
        f"    assert s.put(name, bytes([i]) * {MIB}) == 0\n"
        "    while s._access.store().stat()['ssd_objects'] <= i: time.sleep(0.001)\n"
        "s.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    store = MooncakeDistributedStore()
    given = (HOST, P2P, 8 * MIB, 0, "tcp", "", there.address)
    assert store.setup(*given, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) == 0
    try:
        assert [store.get(name)[:1] for name in names] == [bytes([i]) for i in range(24)]
    finally:
        store.close()
        there.close()


def test_an_ssd_is_not_made_anew_for_its_own_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Callable[[int], list[str]]
) -> None:
    """On a small disk: the log was given most of what was free, and has all it had at the next start, also
    when others have filled the rest."""
    disk, log = 200 * MIB, tmp_path / "moonpool.ssd"
    others = 0

    def usage(_: object) -> shutil._ntuple_diskusage:
        used = others + (log.stat().st_blocks * 512 if log.exists() else 0)
        return shutil._ntuple_diskusage(disk, used, disk - used)

    monkeypatch.setattr("mooncake._ssd.shutil.disk_usage", usage)
    names, there = keys(16), MasterProcess()
    try:
        for start in range(3):
            store = MooncakeDistributedStore()
            given = (HOST, P2P, 16 * MIB, 0, "tcp", "", there.address)
            assert store.setup(*given, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) == 0
            try:
                if start == 0:
                    assert [store.put(name, name.encode() * 100) for name in names] == [0] * 16
                assert [store.get(name) for name in names] == [name.encode() * 100 for name in names]
            finally:
                store.close()
            others = 30 * MIB
    finally:
        there.close()
    assert _ssd.ssd_bytes(tmp_path) == log.stat().st_size
    monkeypatch.setenv("MOONPOOL_SSD_SIZE", "32MiB")  # who wants it smaller says so
    assert _ssd.ssd_bytes(tmp_path) == 32 * MIB


@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_node_that_is_killed_in_the_middle(
    verb: str, master: MasterProcess, key: str, keys: Callable[[int], list[str]]
) -> None:
    """While a guest's call is under way there: a code or a miss, never other bytes, and no hang; then the
    guest goes on with the next node."""
    there = MasterProcess()
    guest = MooncakeDistributedStore()
    size = 64 * MIB
    code = (
        "import sys; from mooncake.store import MooncakeDistributedStore as S; s = S()\n"
        f"assert s.setup({HOST!r}, {P2P!r}, {256 * MIB}, 0, 'tcp', '', {there.address!r}) == 0\n"
        f"assert s.put({key!r}, b'7' * {size}) == 0\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    nodes = []

    def start() -> None:
        node = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        nodes.append(node)
        assert node.stdout is not None
        assert node.stdout.readline() == b"ready\n"

    data, into = bytes([7]) * size, np.zeros(size, np.uint8)
    under_way = threading.Event()
    answers: list[Any] = []

    def call() -> None:
        for name in keys(1000):
            under_way.set()
            if verb == "get":
                answers.append(guest.get_into(key, into.ctypes.data, size))
            else:
                answers.append(guest.put(name, data))
            if answers[-1] < 0:
                return

    try:
        start()
        assert guest.setup(HOST, P2P, 0, 0, "tcp", "", there.address) == 0
        caller = threading.Thread(target=call)
        caller.start()
        assert under_way.wait(30)
        until(lambda: answers)  # each call takes long, so that another is under way now
        nodes[0].kill()
        caller.join(30)
        assert not caller.is_alive()
        assert answers[-1] in ((-704, -200, -900, -901, -800) if verb == "get" else (-200, -900, -901, -800))
        assert set(answers[:-1]) == {size if verb == "get" else 0}
        start()
        until(lambda: guest.get_into(key, into.ctypes.data, size) == size)
        assert (into == ord("7")).all()
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
        guest.close()
        there.close()


def test_the_ssd_of_the_environment(
    make_store: Make, master: MasterProcess, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no path is given; with none at all setup() says so, rather than to keep nothing."""
    given = (HOST, P2P, 16 * MIB, 0, "tcp", "", master.address)
    named = {"local_hostname": HOST, "master_server_addr": master.address, "enable_ssd_offload": "true"}
    nowhere = MooncakeDistributedStore()
    assert nowhere.setup(*given, enable_ssd_offload=True) == -600
    assert nowhere.setup(named | {"global_segment_size": "16mb"}) == -600
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(tmp_path / "ssd"))
    monkeypatch.setenv("MOONPOOL_SSD_SIZE", "64MiB")
    store = make_store(16 * MIB, enable_ssd_offload=True)
    assert store.put(key, b"x") == 0
    assert store._access.config.node.ssd[0].endswith(f":{64 * MIB}")
    assert any((tmp_path / "ssd").iterdir())


def test_a_store_that_is_dropped_leaves(master: MasterProcess) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", master.address) == 0
    place = store._access.socket
    assert place.exists()
    del store
    assert not place.exists()


def test_a_segment_that_no_machine_has_leaves_nothing(master: MasterProcess) -> None:
    folder = Path(os.environ["MOONPOOL_RUNTIME_DIR"])
    before = set(folder.iterdir())
    store = MooncakeDistributedStore()
    assert store.setup(HOST, P2P, 1 << 60, 0, "tcp", "", master.address) < 0
    assert set(folder.iterdir()) == before
    assert store.setup({"local_hostname": HOST, "master_server_addr": master.address, "client_http_port": "x",
                        "enable_client_http_server": True}) == -600  # fmt: skip


def test_setup_from_many_threads_is_one(master: MasterProcess) -> None:
    store = MooncakeDistributedStore()
    folder = Path(os.environ["MOONPOOL_RUNTIME_DIR"])
    before = len(list(folder.glob("node-mooncake-*.sock")))
    with ThreadPoolExecutor(8) as threads:
        given = (HOST, P2P, 16 * MIB, 0, "tcp", "", master.address)
        codes = list(threads.map(lambda _: store.setup(*given), range(8)))
    assert codes == [0] * 8
    assert len(list(folder.glob("node-mooncake-*.sock"))) == before + 1
    store.close()


def test_a_forked_child_harms_nobody(make_store: Make, key: str) -> None:
    """Its calls say no, and its end takes nothing from the parent."""
    store = make_store()
    assert store.put(key, b"x") == 0
    child = os.fork()
    if child == 0:
        code = 0
        try:
            code |= store.put(key, b"y") >= 0
            code |= 2 * (store.is_exist(key) != -1)
            store.close()
            del store
        except BaseException:
            code = 9
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert store.get(key) == b"x"
    assert store._access.socket.exists()
    assert store.put(f"{key}-more", b"y") == 0


def test_many_threads_on_one_store(make_store: Make, keys: Callable[[int], list[str]]) -> None:
    store = make_store()
    names = keys(8)

    def work(name: str) -> bool:
        array = np.full(4096, len(name) % 251, np.uint8)
        at = array.ctypes.data
        assert store.register_buffer(at, 4096) == 0
        for i in range(100):
            assert store.upsert_from(f"{name}-{i}", at, 4096) == 0
            assert store.batch_get_into([f"{name}-{i}", "none"], [at, at], [4096, 4096]) == [4096, -704]
            assert store.is_exist(f"{name}-{i}") == 1
        return store.unregister_buffer(at) == 0

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, names))
