"""The commands and their pages, dummy clients, and the small modules beside the store."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake import _flags
from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.buffer_pool import BufferPool
from mooncake.mooncake_store_service import MooncakeStoreService
from mooncake.store import (
    BufferLeaseView,
    EngramStore,
    EngramStoreConfig,
    MooncakeDistributedStore,
    bind_to_numa_node,
)

import moonpool
from moonpool.core.service.http_tls import own_child_context
from tests.connectors.mooncake.commands import Command
from tests.core.master_bed import ADMIN_TOKEN, MasterProcess
from tests.core.store_bed import MIB, until

CERTIFICATES = Path(__file__).resolve().parents[2] / "core" / "certificates"
HOST, P2P = "127.0.0.1", "P2PHANDSHAKE"


@pytest.fixture(scope="module")
def original_like(_environment: None) -> Iterator[tuple[str, str]]:
    """A `mooncake_master`: the address for stores, and the URL of its pages."""
    command = Command(
        "cli", "--rpc_address=127.0.0.1", "--rpc_port=0", "-metrics_port", "0", "--enable_snapshot=true"
    )
    assert command.line.startswith("moonpool master at "), command.line
    address, url = command.line.removeprefix("moonpool master at ").split(", ")
    yield address, url.removesuffix("/metrics")
    assert command.end() == 0


def page(url: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def status_of(url: str, token: str = "", method: str = "GET", data: bytes | None = None) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url, headers=headers, method=method, data=data)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_master_and_its_pages(original_like: tuple[str, str], key: str) -> None:
    address, url = original_like
    store = MooncakeDistributedStore()
    assert store.setup(HOST, P2P, 16 * MIB, 0, "tcp", "", address) == 0
    assert store.put(key, b"12345") == 0
    segment = store.get_hostname()
    assert json.loads(page(f"{url}/health"))["status"] == "ok"
    assert page(f"{url}/role") == "leader"
    assert page(f"{url}/get_all_segments") == f"{segment}\n"
    detail = json.loads(page(f"{url}/get_segments_detail"))
    assert detail["total_segments"] == 1
    assert detail["segments"][0]["segment_name"] == segment
    assert detail["segments"][0]["size_bytes"] == 16 * MIB
    assert until(lambda: "\nmaster_key_count 1\n" in page(f"{url}/metrics"))
    assert "moonpool_master_" in page(f"{url}/metrics")
    assert "Keys: 1" in page(f"{url}/metrics/summary")
    for path in (
        "/get_all_keys",
        f"/query_key?key={key}",
        "/batch_query_keys?keys=a",
        "/query_segment?segment=x",
    ):
        assert status_of(f"{url}{path}") == 401
    assert page(f"{url}/get_all_keys", ADMIN_TOKEN).split() == [key]
    assert json.loads(page(f"{url}/query_key?key={key}", ADMIN_TOKEN))["data"] == {"key": key, "size": 5}
    assert status_of(f"{url}/query_key?key=none", ADMIN_TOKEN) == 404
    long = key + "n" * 2000
    assert status_of(f"{url}/query_key?key={long}", ADMIN_TOKEN) == 404
    assert store.put(long, b"123456") == 0
    assert json.loads(page(f"{url}/query_key?key={long}", ADMIN_TOKEN))["data"]["size"] == 6
    assert store.remove(long) == 0
    both = json.loads(page(f"{url}/batch_query_keys?keys={key},none", ADMIN_TOKEN))["data"]
    assert (both[key]["ok"], both["none"]["ok"]) == (True, False)
    assert segment in page(f"{url}/query_segment?segment={segment}", ADMIN_TOKEN)
    assert status_of(f"{url}/query_segment?segment=x", ADMIN_TOKEN) == 404
    assert status_of(f"{url}/api/v1/segments/status", ADMIN_TOKEN) == 400
    assert status_of(f"{url}/api/v1/segments/status?segment=x:1", ADMIN_TOKEN) == 404
    status = json.loads(page(f"{url}/api/v1/segments/status?segment={segment}", ADMIN_TOKEN))
    assert (status["success"], status["status"], status["status_name"]) == (True, 1, "OK")
    store.close()
    assert until(lambda: not page(f"{url}/get_all_segments"))
    assert status_of(f"{url}/get_all_keys", ADMIN_TOKEN) == 503


def test_the_pages_of_a_master_with_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all that names keys, they are not readable on the way."""
    for name in ("cert", "key"):
        file = tmp_path / f"{name}.pem"
        shutil.copy(CERTIFICATES / f"test-{name}.pem", file)
        file.chmod(0o600)
        monkeypatch.setenv(f"MOONPOOL_CLUSTER_TLS_{name.upper()}", str(file))
    command = Command("cli", "--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_port=0")
    try:
        url = command.line.split(", ")[1].removesuffix("/metrics")
        assert url.startswith("https://"), command.line
        with urllib.request.urlopen(f"{url}/role", timeout=10, context=own_child_context()) as answer:
            assert answer.read() == b"leader"
    finally:
        assert command.end() == 0


def test_a_real_client_and_dummies(original_like: tuple[str, str], free_port: int, key: str) -> None:
    """setup_dummy() finds the node of its host by the port, and reaches its memory by the Unix socket."""
    address, _ = original_like
    command = Command(
        "cli_client",
        f"--port={free_port}",
        "--global_segment_size=16 MB",
        f"--master_server_address={address}",
    )
    assert str(free_port) in command.line, command.line
    try:
        dummy = MooncakeDistributedStore()
        assert dummy.setup_dummy(MIB, MIB, f"{HOST}:{free_port}") == 0
        assert dummy._access.store()._holder.endswith(f"node-mooncake-client-{free_port}.sock")
        array = np.arange(MIB, dtype=np.uint8)
        assert dummy.register_buffer(array.ctypes.data, MIB) == 0
        assert dummy.batch_put_from([key], [array.ctypes.data], [MIB]) == [0]
        other = MooncakeDistributedStore()
        assert other.setup(HOST, P2P, 0, 0, "tcp", "", address) == 0
        assert until(lambda: other.get_into(key, array.ctypes.data, MIB) == MIB)
        assert dummy.batch_get_replica_desc([key])[key][0].is_memory_replica()
        assert dummy.get(key) == array.tobytes()
        assert dummy.allocate_and_mount_segment(MIB)["ret"] == -600
        assert dummy.health_check() == 0
        stranger = MooncakeDistributedStore()  # another host's address has nothing to do with our socket
        assert stranger.setup_dummy(MIB, MIB, f"0.0.0.1:{free_port}") < 0
        other.close()
    finally:
        command.end()
    assert dummy.health_check() == 2
    dummy.close()
    gone = MooncakeDistributedStore()
    assert gone.setup_dummy(MIB, MIB, f"{HOST}:{free_port}") == -900
    assert gone.setup_dummy(MIB, MIB, "nonsense") == -600


def test_a_dummy_beside_a_socket_that_was_left_behind(make_store: Callable[..., Any], key: str) -> None:
    node = make_store()
    port = node.get_hostname().rpartition(":")[2]
    left = Path(os.environ["MOONPOOL_RUNTIME_DIR"]) / f"node-mooncake-client-{port}.sock"
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind(str(left))
    dummy = MooncakeDistributedStore()
    try:
        assert dummy.setup_dummy(MIB, MIB, f"{HOST}:{port}") == 0
        assert dummy.put(key, b"by TCP") == 0
        assert node.get(key) == b"by TCP"
    finally:
        dummy.close()
        left.unlink()


def test_a_command_without_its_master(free_port: int) -> None:
    command = Command("cli_client", f"--port={free_port}", f"--master_server_address={HOST}:{free_port}x")
    _, errors = command.process.communicate(timeout=30)
    assert command.process.returncode == 2
    assert "is no address" in errors
    command = Command("cli", "positional")
    _, errors = command.process.communicate(timeout=30)
    assert "is no flag" in errors


def test_flags(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"rpc_port": "x", "on": "y"}
    assert _flags.parse(["--rpc_port=1", "-on", "--other", "5", "--last"], known, "p") == {
        "rpc_port": "1",
        "on": "true",
    }
    assert "other, last" in caplog.text
    assert _flags.parse(["-rpc_port", "7"], known, "p") == {"rpc_port": "7"}
    with pytest.raises(SystemExit) as ended:
        _flags.parse(["--help"], known, "p")
    assert ended.value.code == 0
    assert "--rpc_port" in capsys.readouterr().out


def test_the_pages_of_a_store(master: MasterProcess, free_port: int) -> None:
    for segment in (16 * MIB, 0):
        store = MooncakeDistributedStore()
        given = (HOST, P2P, segment, 0, "tcp", "", master.address)
        assert store.setup(*given, enable_client_http_server=True, client_http_port=free_port) == 0
        url = f"http://{HOST}:{free_port}"
        assert json.loads(page(f"{url}/health"))["status"] == "ok"
        assert ("moonpool_" in page(f"{url}/metrics")) is bool(segment)
        taken = MooncakeDistributedStore()
        assert taken.setup(*given, enable_client_http_server=True, client_http_port=free_port) == -600
        store.close()
        with pytest.raises(urllib.error.URLError):
            page(f"{url}/health")


def test_the_rest_service(master: MasterProcess, key: str, tmp_path: Path) -> None:
    settings = {"local_hostname": HOST, "metadata_server": P2P, "master_server_address": master.address}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings | {"global_segment_size": "16mb"}))
    command = Command("mooncake_store_service", "--config", str(file), "--port", "0", function="sync_main")
    url = command.line.split()[-1]
    try:
        body = json.dumps({"key": key, "value": "text"}).encode()
        assert status_of(f"{url}/put", method="PUT", data=body) == 200
        assert page(f"{url}/get/{key}") == "text"
        assert json.loads(page(f"{url}/exist/{key}")) == {"exists": True}
        assert status_of(f"{url}/remove/{key}", method="DELETE") == 200
        assert status_of(f"{url}/remove/{key}", method="DELETE") == 404
        assert status_of(f"{url}/get/{key}") == 404
        assert json.loads(page(f"{url}/exist/{key}")) == {"exists": False}
        assert status_of(f"{url}/put", method="PUT", data=b"{") == 400
        assert status_of(f"{url}/put", method="PUT", data=b'{"key": "", "value": ""}') == 400
        assert status_of(f"{url}/remove_all", method="DELETE") == 200
    finally:
        assert command.end() == 0


def test_a_rest_service_that_cannot_start(free_port: int) -> None:
    async def try_it() -> bool:
        service = MooncakeStoreService(
            cli_config={
                "local_hostname": HOST,
                "metadata_server": P2P,
                "master_server_address": f"{HOST}:{free_port}",
            }
        )
        try:
            return await service.start_store_service(0.1)
        finally:
            await service.stop()

    assert asyncio.run(try_it()) is False


# ---- the small modules


def test_async_forms(master: MasterProcess, key: str) -> None:
    async def use() -> list[Any]:
        store = MooncakeDistributedStoreAsync()
        assert await store.async_setup(HOST, P2P, 16 * MIB, 0, "tcp", "", master.address) == 0
        answers = [await store.async_put(key, b"x"), store.is_exist(key), await store.async_get(key)]
        answers += await asyncio.gather(*[store.async_is_exist(key) for _ in range(10)])
        with pytest.raises(TypeError):
            await store.async_put(key, "text")
        with pytest.raises(AttributeError, match="async_nothing"):
            store.async_nothing  # noqa: B018
        with pytest.raises(AttributeError):
            store.nothing  # noqa: B018
        assert await store.async_close() == 0
        return answers

    assert asyncio.run(use()) == [0, 1, b"x", *[1] * 10]


def test_a_buffer_pool(store: Any, key: str) -> None:
    pool = BufferPool(store, max_bytes=1 << 20, alignment=4096)
    with pool.buffer(100_000) as lease:
        assert (lease.size, len(lease.buffer), lease.buffer.readonly, lease.ptr % 4096) == (
            100_000,
            100_000,
            False,
            0,
        )
        lease.buffer[:5] = b"bytes"
        assert store.put_from(key, lease.ptr, 5) == 0
        place = lease.ptr
    assert store.get(key) == b"bytes"
    for name in ("ptr", "buffer"):
        with pytest.raises(RuntimeError, match="closed"):
            getattr(lease, name)
    assert lease.size == 100_000
    lease.release()
    with pool.acquire(70_000) as again:
        assert again.ptr == place  # the same class, kept
    with pytest.raises(RuntimeError, match=r"exhausted.*more than"):
        pool.acquire(2 << 20)
    with pool.acquire(0) as nothing:
        assert (nothing.size, len(nothing.buffer), nothing.ptr % 4096) == (0, 0, 0)
    whole = pool.acquire(1 << 20)  # the idle one made room
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(10, block=False)
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(10, timeout=0.01)
    for no_size in (-1, "8", 1.5, None, 1 << 70):
        with pytest.raises(TypeError):
            pool.acquire(no_size)
    for no_time in (-1, "x", float("nan")):
        with pytest.raises(RuntimeError, match="timeout must be non-negative"):
            pool.acquire(10, timeout=no_time)
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    whole.release()
    pool.prewarm(65536, 3)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(10)
    for bad in ({"alignment": 3}, {"min_size_class": 0}):
        with pytest.raises(RuntimeError):
            BufferPool(store, **bad)
    with pytest.raises(RuntimeError, match="store"):
        BufferPool(5)
    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(MooncakeDistributedStore())


def test_a_lease_with_views_is_not_released(store: Any) -> None:
    """The next holder of the memory would write under them."""
    pool = BufferPool(store, max_bytes=1 << 16, alignment=4096)
    makers: list[Callable[[Any], Any]] = [
        lambda lease: lease.buffer,
        lambda lease: lease.buffer[2:4],
        lambda lease: memoryview(lease.buffer),
        lambda lease: np.frombuffer(lease.buffer, np.uint8),
        lambda lease: np.frombuffer(lease.buffer, np.uint8)[3:],
        lambda lease: BufferLeaseView(lease).buffer,
    ]
    for make in makers:
        lease = pool.acquire(10)
        view = make(lease)
        with pytest.raises(RuntimeError, match="exported views"):
            lease.release()
        with pytest.raises(RuntimeError, match="active leases"):
            pool.close()
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(10, block=False)
        assert lease.size == 10
        view[0] = 7
        del view
        lease.release()
        lease.release()
        pool.acquire(10, block=False).release()
    with pytest.raises(RuntimeError, match="exported views"), pool.acquire(10) as kept:
        inside = kept.buffer
    inside.release()
    kept.release()
    # A view keeps the lease that nobody else has.
    last = pool.acquire(10).buffer
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    del last
    pool.close()


def test_a_pool_waits_for_a_release(store: Any) -> None:
    import threading

    pool = BufferPool(store, max_bytes=65536, alignment=4096)
    lease = pool.acquire(10)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(pool.acquire(20, timeout=30)))
    waiting.start()
    lease.release()
    waiting.join(30)
    assert got[0].size == 20
    got.pop().release()
    pool.close()


def test_a_release_wakes_those_who_fit(store: Any) -> None:
    """Not only who has waited longest, and may need more than was given back."""
    pool = BufferPool(store, max_bytes=2 * 65536, alignment=4096)
    leases = [pool.acquire(65536), pool.acquire(65536)]
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(pool.acquire, 2 * 65536, timeout=60)
        until(lambda: len(pool._changed._waiters) == 1)
        small = threads.submit(pool.acquire, 65536, timeout=60)
        until(lambda: len(pool._changed._waiters) == 2)
        leases[0].release()
        small.result(30).release()
        leases[1].release()
        large.result(30).release()
    pool.close()


def test_embedding_tables(store: Any) -> None:
    config = EngramStoreConfig()
    assert (config.table_vocab_sizes, config.embedding_dim) == ([1024], 64)
    config.table_vocab_sizes, config.embedding_dim = [5, 7], 4
    tables = EngramStore(3, config, store)
    assert tables.get_store_keys() == ["engram:l3:h0", "engram:l3:h1"]
    assert (tables.get_num_heads(), tables.get_embedding_dim(), tables.get_table_vocab_sizes()) == (
        2,
        4,
        [5, 7],
    )
    ids = np.array([[[1, 6], [0, 2]]])
    with pytest.raises(RuntimeError, match="not stored"):
        tables.lookup(ids)
    first, second = (np.arange(n * 4, dtype=np.float32).reshape(n, 4) for n in (5, 7))
    tables.populate([first, second])
    found = tables.lookup(ids)
    assert (found == np.array([[[first[1], second[6]], [first[0], second[2]]]])).all()
    for bad, word in (
        (np.array([[[9, 0]]]), "rows"),
        (np.array([1, 2]), "shape"),
        (np.array([[[-1, 0]]]), "rows"),
    ):
        with pytest.raises(RuntimeError, match=word):
            tables.lookup(bad)
    for tables_given in ([first], [second, first]):
        with pytest.raises(RuntimeError):
            tables.populate(tables_given)
    assert tables.remove_from_store() == 2
    assert tables.remove_from_store(True) == 0
    with pytest.raises(RuntimeError, match="without a store"):
        EngramStore(3, config).lookup(ids)


def test_numa_binding(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    try:
        bind_to_numa_node(0)
        bind_to_numa_node(999)
    finally:
        os.sched_setaffinity(0, before)
    assert "999" in caplog.text


def test_a_moonpool_error_is_what_is_raised() -> None:
    with pytest.raises(moonpool.Error):
        MooncakeDistributedStore().get("key")
