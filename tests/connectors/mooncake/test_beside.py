"""What stands beside engine and store: the metadata server, the bench, names that only devices need."""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from mooncake import cli_bench
from mooncake.engine import TransferEngine
from mooncake.http_metadata_server import KVBootstrapServer, KVPoll
from mooncake.store import (
    MooncakeDistributedNoFRegister,
    MooncakeHostMemAllocator,
    get_alloc_func_addr,
    get_free_func_addr,
)

from moonpool.core import topology
from moonpool.core.errors import ConfigError

from ... import machines
from .commands import Command


def asked(url: str, method: str = "GET", data: bytes | None = None) -> tuple[int, bytes]:
    try:
        request = urllib.request.Request(url, method=method, data=data)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_metadata_server(free_port: int) -> None:
    command = Command("http_metadata_server", f"--port={free_port}")
    assert command.line == f"metadata at http://127.0.0.1:{free_port}/metadata"
    try:
        url = command.line.split()[-1]
        one = f"{url}?key=mooncake/ram/a%20b"
        missing = (404, b"metadata not found")
        assert asked(one) == missing
        assert asked(one, "PUT", b'{"at": 1}') == (200, b"metadata updated")
        assert asked(one) == (200, b'{"at": 1}')
        assert asked(one, "PUT", b"") == (200, b"metadata updated")
        assert asked(one) == (200, b"")
        assert asked(one, "DELETE") == (200, b"metadata deleted")
        assert asked(one, "DELETE") == missing
        for bad in (url, f"{url}?key="):
            assert asked(bad, "PUT", b"x") == (400, b"metadata key is required")
        assert asked(one, "POST", b"x") == (405, b"Method not allowed")
        assert asked(one, "PUT", bytes((1 << 20) + 1))[0] == 413
        assert asked(url.replace("metadata", "other"))[0] == 404
        assert asked(url.replace("metadata", "health")) == (200, b"OK")
    finally:
        assert command.end() == 0


def test_a_master_with_a_metadata_server(free_port: int) -> None:
    command = Command(
        "cli", "--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_port=0",
        "--enable_http_metadata_server=true", f"--http_metadata_server_port={free_port}",
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{free_port}"
        assert command.line.endswith(f"metadata at {url}/metadata")
        assert asked(f"{url}/health") == (200, b"OK")
        assert asked(f"{url}/metadata?key=a", "PUT", b"1") == (200, b"metadata updated")
        assert asked(f"{url}/metadata?key=a") == (200, b"1")
    finally:
        assert command.end() == 0


def test_a_metadata_server_inside_of_a_program(free_port: int) -> None:
    server = KVBootstrapServer(free_port)
    assert server.poll() is KVPoll.Failed
    thread = server.run()
    assert thread.is_alive()
    assert server.poll() is KVPoll.Success
    url = f"http://127.0.0.1:{free_port}/metadata?key=a"
    assert asked(url, "PUT", b"1") == (200, b"metadata updated")
    taken = KVBootstrapServer(free_port)
    taken.run()
    assert taken.poll() is KVPoll.Failed
    taken.close()
    server.close()
    server.close()
    assert not thread.is_alive()
    assert server.poll() is KVPoll.Failed
    server.run()
    assert asked(url) == (404, b"metadata not found")
    server.close()


def test_noise_on_a_page_is_one_short_line(caplog: pytest.LogCaptureFixture, free_port: int) -> None:
    """A request of 1 MiB of no HTTP was written to the log, with a traceback."""
    server = KVBootstrapServer(free_port)
    server.run()
    try:
        with caplog.at_level(logging.DEBUG):
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", free_port), timeout=30) as stranger:
                    with suppress(OSError):
                        stranger.sendall(b"\xff" * (1 << 20))
                    with suppress(OSError):
                        while stranger.recv(65536):
                            pass
            assert asked(f"http://127.0.0.1:{free_port}/health") == (200, b"OK")
    finally:
        server.close()
    assert sum(len(line) for line in caplog.text.splitlines()) < 5 * 300
    assert "Traceback" not in caplog.text


def test_names_of_expert_parallelism_are_there() -> None:
    from mooncake import mooncake_ep_buffer
    from mooncake.engine import TransferEngine, TransferOpcode

    assert TransferEngine.TransferOpcode is TransferOpcode  # type: ignore[attr-defined]
    with mooncake_ep_buffer.EventOverlap():
        pass
    for refused in (
        lambda: mooncake_ep_buffer.Buffer(None),
        lambda: mooncake_ep_buffer.Buffer.get_ep_buffer_size_hint(1, 2, 3, 4),
    ):
        with pytest.raises(ImportError, match="moonpool has none"):
            refused()


def test_a_metadata_server_where_somebody_listens(free_port: int) -> None:
    first = Command("http_metadata_server", f"--port={free_port}")
    try:
        second = Command("http_metadata_server", f"--port={free_port}")
        assert second.line == ""
        _, said = second.process.communicate(timeout=30)
        assert second.process.returncode == 2
        assert str(free_port) in said
    finally:
        assert first.end() == 0


def test_the_bench_takes_the_flags_that_scripts_know(free_port: int) -> None:
    assert cli_bench.command({"mode": "target", "local_server_name": "10.0.0.2", "buffer_size": "4096"}) == [
        "bench", "transfer", "--serve", "--listen", "10.0.0.2:7720", "--memory", "4096",
    ]  # fmt: skip
    for wrong in ({"mode": "both"}, {"segment_id": "x:y"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            cli_bench.command(wrong)
    small = "--buffer_size=16777216"
    target = Command("cli_bench", "--mode=target", f"--local_server_name=127.0.0.1:{free_port}", small)
    try:
        done = subprocess.run(
            [
                sys.executable, "-c", "from mooncake.cli_bench import main; main()",
                "--mode=initiator", f"--segment_id=127.0.0.1:{free_port}", "--operation=write", "--threads=1",
                "--duration=0.2", "--block_size=4096", "-batch_size", "16", "--protocol=tcp", small,
                "--metadata_server=P2PHANDSHAKE", "--auto_discovery",
            ],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "GB/s" in done.stdout
        assert "auto_discovery" in done.stderr
        assert "metadata_server" not in done.stderr
    finally:
        target.end()


def test_the_topology() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from mooncake.transfer_engine_topology_dump import main; main()"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout.partition(":")[2])
    matrix = topology.matrix(topology.read())
    assert list(rows) == list(matrix)
    near, others = rows["cpu:0"]
    assert [row.nic for row in matrix["cpu:0"]] == [*near, *others]


def test_the_topology_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its users read it: lists of near and of other NICs for each memory."""
    dgx = topology.read(str(machines.build("dgx_h100", tmp_path)))
    monkeypatch.setattr(topology, "read", lambda: dgx)
    rows = json.loads(TransferEngine().get_local_topology())
    assert list(rows) == ["cpu:0", "cpu:1", *(f"cuda:{number}" for number in range(8))]
    near, others = rows["cuda:5"]
    assert near == ["mlx5_9"]
    assert others[:3] == ["mlx5_6", "mlx5_7", "mlx5_8"]
    assert len(others) == 12
    rows = json.loads(TransferEngine().get_local_topology("mlx5_0, mlx5_11"))
    assert rows["cuda:5"] == [["mlx5_11"], ["mlx5_0"]]
    assert rows["cpu:0"] == [["mlx5_0"], ["mlx5_11"]]
    assert json.loads(TransferEngine().get_local_topology("none"))["cpu:0"] == [[], []]
    with pytest.raises(TypeError):
        TransferEngine().get_local_topology(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["allocator", "pg", "ep"])
def test_what_only_devices_need_says_so(name: str) -> None:
    """As callers expect it of an original that was built without."""
    with pytest.raises(ImportError, match=rf"mooncake\.{name}.*; moonpool"):
        importlib.import_module(f"mooncake.{name}")


def test_nothing_is_registered_over_fabrics() -> None:
    register = MooncakeDistributedNoFRegister()
    assert register.real_register("a", 1, "b", 2, 3, 4, "c") == -1011
    assert register.real_unregister_by_endpoint("a", 1, "b", 2, "c") == -1011
    with pytest.raises(TypeError):
        register.real_register("a")  # type: ignore[call-arg]


def test_memory_for_those_who_call_from_c() -> None:
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        get_alloc_func_addr()
    )
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        get_free_func_addr()
    )
    address = alloc(8192, 0, None)
    assert address % 4096 == 0
    memory = np.frombuffer((ctypes.c_char * 8192).from_address(address), np.uint8)
    assert not memory.any()
    del memory
    free(address, 8192, 0, None)
    assert MooncakeHostMemAllocator().free(address) == -600  # it is gone
    free(None, 0, 0, None)
    free(12345, 1, 0, None)
    assert alloc(1 << 62, 0, None) is None
