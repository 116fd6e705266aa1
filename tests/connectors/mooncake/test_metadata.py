"""metadata_server, protocol and device_name: names in a real etcd, Redis and the drop-in's own server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake import _protocols
from mooncake.engine import TransferEngine
from mooncake.http_metadata_server import KVBootstrapServer
from mooncake.store import MooncakeDistributedStore

import moonpool
from moonpool import InvalidArgument
from tests.core.master_bed import MasterProcess
from tests.core.metadata_bed import running
from tests.core.store_bed import MIB, until
from tests.ports import free_port as a_free_port

HOST, P2P = "127.0.0.1", "P2PHANDSHAKE"


@pytest.fixture(scope="module", params=["http", "etcd", "redis"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param != "http":
        with running(request.param, tmp_path_factory.mktemp("store")) as server:
            yield server.url
        return
    server = KVBootstrapServer(a_free_port())
    server.run()
    yield f"http://{HOST}:{server.port}/metadata"
    server.close()


def made(name: str, url: str, protocol: str = "tcp", devices: str = "") -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(name, url, protocol, devices) == 0
    return engine


def close(*engines: TransferEngine) -> None:
    for engine in engines:
        assert engine._engine is not None
        engine._engine.close()


PEER = """
import sys, numpy as np
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize(sys.argv[1], sys.argv[2], "tcp", "") == 0
array = np.full(4096, int(sys.argv[3]), np.uint8)
assert engine.register_memory(array.ctypes.data, 4096) == 0
print(array.ctypes.data, flush=True)
sys.stdin.read()
"""


def start_peer(name: str, url: str, value: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", PEER, name, url, str(value)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.wait()
    return process, int(line)


def test_engines_find_each_other_by_local_hostname(url: str, free_port: int) -> None:
    name = f"{HOST}:{free_port}"
    first, there = start_peer(name, url, 1)
    taker = made(f"{HOST}:0", url)
    here = np.zeros(4096, np.uint8)
    assert taker.register_memory(here.ctypes.data, 4096) == 0
    try:
        assert taker.send_probe(name) == 0
        assert taker.get_first_buffer_address(name) == there
        assert taker.transfer_sync_read(name, here.ctypes.data, there, 4096) == 0
        assert set(here) == {1}
        assert taker.send_probe("10.0.0.1x") == -102
        taken = TransferEngine()
        assert taken.initialize(name, url, "tcp", "") == -1  # the port is taken
    finally:
        first.kill()
        first.communicate()
        close(taker)


def test_a_name_without_a_port_is_followed_to_a_new_one(url: str) -> None:
    """The port is a free one each time; a second living engine of the name is refused."""
    first, there = start_peer("localhost", url, 1)
    taker = made(f"{HOST}:0", url)
    here = np.zeros(4096, np.uint8)
    assert taker.register_memory(here.ctypes.data, 4096) == 0
    second = None
    try:
        assert taker.transfer_sync_read("localhost", here.ctypes.data, there, 4096) == 0
        refused = TransferEngine()
        assert refused.initialize("localhost", url, "tcp", "") == -1
        first.kill()
        second, there = start_peer("localhost", url, 2)  # waits for the end of the dead one's lease
        until(lambda: taker.send_probe("localhost") == 0, 30)
        assert taker.transfer_sync_read("localhost", here.ctypes.data, there, 4096) == 0
        assert set(here) == {2}
    finally:
        close(taker)
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


def test_a_metadata_server_without_a_scheme(url: str, free_port: int) -> None:
    kind, _, place = url.partition("://")
    one = TransferEngine()
    assert one.initialize_ext("one.example", place, "tcp", "", kind) == -1  # no address of this host
    assert one.initialize_ext(f"localhost:{free_port}", place, "tcp", "", kind) == 0
    other = made(HOST, url)
    assert other.send_probe(f"localhost:{free_port}") == 0
    close(one, other)
    if kind == "etcd":
        third = made(f"{HOST}:0", place)  # as the original has it
        close(third)


def test_protocols_that_this_machine_has_not(caplog: pytest.LogCaptureFixture) -> None:
    for protocol in ("rdma", "RDMA ", "efa", "ascend"):
        caplog.clear()
        engine = made(HOST, P2P, protocol, "mlx5_0")
        assert f"protocol = {protocol} is not available here: " in caplog.text
        assert "device_name = mlx5_0 is not used" in caplog.text
        assert engine._engine is not None
        assert engine._engine.transports()["tcp"] == ""
        close(engine)
    caplog.clear()
    for protocol, devices in (("tcp", ""), ("", ""), ("rpc_only", "")):
        close(made(HOST, P2P, protocol, devices))
    assert caplog.text == ""
    close(made(HOST, P2P, "tcp", "mlx5_0"))
    assert "tcp takes no devices; the address in local_hostname chooses the network card" in caplog.text
    engine = TransferEngine()
    assert engine.initialize(HOST, P2P, "carrier pigeon", "") == -1
    assert "protocol = carrier pigeon is none; there are tcp, rdma, " in caplog.text
    close(made(HOST, P2P, "tcp", ""))


def test_a_protocol_chooses_the_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    with moonpool.TransferEngine("all", listen=None, metadata="") as engine:
        here = dict.fromkeys(engine.transports(), "")  # as if all of them worked on this host
    monkeypatch.setattr(_protocols, "_transports_here", lambda: here)
    near = ["loopback", "shm", "cuda_ipc"]
    for protocol, devices, options in (
        ("tcp", "", {"transports": [*near, "tcp"]}),
        ("rdma", "", {"transports": [*near, "rdma", "tcp"]}),
        ("rdma", "a, b", {"transports": [*near, "rdma", "tcp"], "rdma_devices": ["a", "b"]}),
        ("efa", "", {"transports": [*near, "efa", "tcp"]}),
        ("efa", "a", {"transports": [*near, "efa", "tcp"], "efa_devices": ["a"]}),
        ("cxl", "/dev/dax0.0", {"transports": [*near, "tcp"]}),
        ("nvmeof", "", {"transports": [*near, "file", "cufile", "tcp"]}),
        ("nvlink", "", {"transports": [*near, "tcp"]}),
        ("", "", {}),
    ):
        assert _protocols.engine_options(protocol, devices) == options
    here["rdma"] = "no device"
    assert "rdma_devices" not in _protocols.engine_options("rdma", "a")


def test_every_protocol_that_is_to_be_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """Its transports are names that this moonpool has; the others say that there are none."""
    with moonpool.TransferEngine("all", listen=None, metadata="") as engine:
        known = engine.transports()
    for name, row in _protocols.PROTOCOLS.items():
        assert {row.transport, *row.beside} - {""} <= set(known)
        caplog.clear()
        _protocols.engine_options(name, "")
        assert ("this moonpool has no such transport" in caplog.text) == (row.transport == "")


def test_cxl_puts_managed_buffers_on_the_dax_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("dax0.0", "dax1.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(_protocols, "DAX_FOLDER", tmp_path)
    monkeypatch.delenv("MC_CXL_DEV_PATH", raising=False)
    place = _protocols.managed_memory
    assert place("cxl", "/dev/dax0.0") == place("CXL", "dax0.0") == "dax:/dev/dax0.0"
    monkeypatch.setenv("MC_CXL_DEV_PATH", "/dev/dax1.0")
    assert place("cxl", "") == "dax:/dev/dax1.0"
    assert place("cxl", "/dev/dax0.0") == "dax:/dev/dax0.0"
    assert place("cxl", "mlx5_0") == "dax:/dev/dax1.0"
    assert place("tcp", "") == place("", "") == "cpu:0"
    assert caplog.text == ""
    with pytest.raises(InvalidArgument, match=r"no DAX device /dev/dax7.0; it has dax0.0, dax1.0"):
        place("cxl", "/dev/dax7.0")


def test_the_engine_asks_for_memory_of_that_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dax99.7").mkdir()
    monkeypatch.setattr(_protocols, "DAX_FOLDER", tmp_path)
    engine = made(HOST, P2P, "cxl", "/dev/dax99.7")
    assert "not available here" not in caplog.text
    assert engine.allocate_managed_buffer(4096) == 0  # the device is the test's: no kernel has it
    assert 'no memory of the DAX device "/dev/dax99.7" can be had' in caplog.text
    close(engine)


def test_cxl_without_a_dax_device(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for device, variable, said in (
        ("", None, "device_name or MC_CXL_DEV_PATH names no DAX device"),
        ("mlx5_0", None, "device_name = mlx5_0 names no DAX device"),
        ("mlx5_0", "/tmp/it", "device_name = mlx5_0 and MC_CXL_DEV_PATH = /tmp/it names no DAX device"),
    ):
        caplog.clear()
        if variable is None:
            monkeypatch.delenv("MC_CXL_DEV_PATH", raising=False)
        else:
            monkeypatch.setenv("MC_CXL_DEV_PATH", variable)
        engine = made(HOST, P2P, "cxl", device)
        assert said in caplog.text
        assert "shared memory within the host and TCP between hosts" in caplog.text
        address = engine.allocate_managed_buffer(4096)
        assert address != 0
        assert engine.free_managed_buffer(address, 4096) == 0
        close(engine)
    engine = TransferEngine()
    assert engine.initialize(HOST, P2P, "cxl", "/dev/dax99.9") == -1
    assert "this host has no DAX device /dev/dax99.9; it has " in caplog.text
    close(made(HOST, P2P, "tcp", ""))


def test_nvmeof_moves_bytes_between_memory_and_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "name:space"
    path.write_bytes(bytes(64 * 1024))
    engine, peer = made(HOST, P2P, "nvmeof"), made(HOST, P2P)
    assert "not available" not in caplog.text
    array = np.full(8192, 7, np.uint8)
    assert engine.register_memory(array.ctypes.data, 8192) == 0
    assert engine.transfer_sync_write(f"file://{path}", array.ctypes.data, 16384, 8192) == 0
    assert path.read_bytes() == bytes(16384) + bytes([7]) * 8192 + bytes(40960)
    array[:] = 0
    assert engine.transfer_sync_read(f"file://{path}", array.ctypes.data, 20480, 8192) == 0
    assert bytes(array) == bytes([7]) * 4096 + bytes(4096)
    assert engine.send_probe(f"{HOST}:{peer.get_rpc_port()}") == 0  # engines are peers as before
    assert peer.transfer_sync_read(f"file://{path}", array.ctypes.data, 0, 4096) == -1  # it was given tcp
    close(engine, peer)


def test_the_arguments_of_a_store(caplog: pytest.LogCaptureFixture, master: MasterProcess) -> None:
    good: dict[str, Any] = {
        "local_hostname": HOST,
        "metadata_server": P2P,
        "global_segment_size": 16 * MIB,
        "local_buffer_size": 0,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": master.address,
    }
    for wrong, said in (
        ({"protocol": "pigeon"}, "protocol = pigeon is none"),
        ({"metadata_server": "ftp://x"}, "metadata_server = ftp://x names no store"),
        ({"metadata_server": "redis://:s3cret@x:y"}, "names no store"),
    ):
        caplog.clear()
        assert MooncakeDistributedStore().setup(**good | wrong) == -600
        assert MooncakeDistributedStore().setup(good | wrong) == -600
        assert said in caplog.text
        assert "s3cret" not in caplog.text
    caplog.clear()
    store = MooncakeDistributedStore()
    given = {"protocol": "rdma", "rdma_devices": "mlx5_0", "metadata_server": "http://127.0.0.1:1/metadata"}
    assert store.setup(**good | given) == 0
    assert "protocol = rdma: the pool's bytes take TCP between hosts" in caplog.text
    assert "rdma_devices = mlx5_0 is not used" in caplog.text
    store.close()
