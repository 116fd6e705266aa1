"""Every example runs, and prints what it promises."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import Store, Unavailable

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NODE_START_S = 30.0
ENGINE_START_S = 240.0


def run_example(name: str) -> str:
    """Its stdout; it must end with 0."""
    result = subprocess.run(
        [sys.executable, EXAMPLES / name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def wait_for_node(deadline_s: float) -> None:
    while True:
        try:
            Store().close()
            return
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[None]:
    """`moonpool node` on this test's default socket."""
    command = [sys.executable, "-P", "-m", "moonpool", "node", "--dram", "64MiB", "--http", "off"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for_node(time.monotonic() + NODE_START_S)
        yield
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.usefixtures("node")
def test_store_sync() -> None:
    assert run_example("store_sync.py").splitlines() == [
        "put: ['stored', 'stored', 'stored']",
        "put again: exists",
        "get: [b'one', None]",
        "get into a buffer: 3 bytes: b'two'",
        "exists: True",
        "longest prefix: 3 blocks from {'dram'}",
        "removed: [True, True, True]",
    ]


@pytest.mark.usefixtures("node")
def test_store_async() -> None:
    assert run_example("store_async.py").splitlines() == [
        "all there: True",
        "longest prefix: 100",
        "removed: 100",
    ]


@pytest.mark.usefixtures("node")
def test_store_views() -> None:
    assert run_example("store_views.py").splitlines() == [
        "writable: False K equal: True",
        "V equal: True still in the pool: False",
    ]


def test_store_cluster(runtime_dir: Path) -> None:
    expected = [
        "copies: 2 of 2 ",
        "get: [b'zero', b'two', None]",
        "longest prefix: 3 blocks from nodes 0 1",
        "removed: [True, True, True]",
        "still here: False",
    ]
    environment = {**os.environ, "MOONPOOL_NODE_HTTP": "127.0.0.1:0", "MOONPOOL_NODE_LISTEN": "127.0.0.1:0"}
    environment |= {"MOONPOOL_MASTER_HTTP": "127.0.0.1:0", "MOONPOOL_MASTER_LISTEN": "127.0.0.1:0"}
    command = [sys.executable, "-u", "-m", "moonpool", "up", "--nodes", "2", "--dram", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as up:
        assert up.stdout is not None
        said = ""
        try:
            for line in up.stdout:  # ends when `up` does
                said += line
                if "all is up" in line:
                    break
            else:
                pytest.fail(said)
            # It has the patience of a user, half a second for the master: where the machine pauses for longer
            # there is one copy fewer, and it says why. It leaves nothing behind, so it can be asked again.
            for _ in range(3):
                printed = run_example("store_cluster.py").splitlines()
                if printed == expected:
                    break
        finally:
            up.terminate()
        assert up.wait(NODE_START_S) == 0
    assert printed == expected


def test_store_embedded() -> None:
    printed = run_example("store_embedded.py")
    assert "the newest among them: True" in printed
    assert "arena: 64 MiB" in printed
    kept = int(printed.split()[0])
    assert 32 <= kept <= 64


def test_transfer_sync() -> None:
    assert run_example("transfer_sync.py").splitlines() == [
        "opened offers with 1048576 bytes over shm",
        "read 65536 bytes of 3",
        "blocks: [0, 5, 7, 15]",
        "moved 65541 bytes: ['DONE', 'DONE']",
        "takes says it is written: hello",
        "failed as it should: 0 of 65536 bytes done",
    ]


def test_transfer_async() -> None:
    assert run_example("transfer_async.py").splitlines() == [
        "read 1048576 bytes; equal: True",
        "left: all blocks; moved 1048576 bytes",
    ]


def test_up_toml_is_a_valid_configuration() -> None:
    from moonpool.core.config.config import load

    path = EXAMPLES / "up.toml"
    config = load(path, env={})
    assert len(config.up.engine) == len(tomllib.loads(path.read_text())["up"]["engine"]) >= 2


def test_tiny_model_is_the_same_everywhere(tmp_path: Path) -> None:
    """Engines that share a pool must have the same weights, which depend on the seed alone; nothing else
    does.
    """
    for name in ("a", "b"):
        subprocess.run([sys.executable, EXAMPLES / "demo" / "tiny_model.py", tmp_path / name], check=True)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    subprocess.run([sys.executable, EXAMPLES / "demo" / "tiny_model.py", tmp_path / "c", "1"], check=True)
    pairs = [(path, tmp_path / "c" / path.name) for path in (tmp_path / "a").iterdir()]
    differ = [path.name for path, other in pairs if path.read_bytes() != other.read_bytes()]
    assert differ == ["model.safetensors"]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    header_bytes = int.from_bytes((tmp_path / "a" / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "a" / "model.safetensors").read_bytes()[8 : 8 + header_bytes])
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_serve(vllm_python: str, runtime_dir: Path, free_port: int, tmp_path: Path) -> None:
    """The script starts a node and a vLLM with the line that the README gives; a prompt's KV lands in the
    pool.
    """
    model = tmp_path / "tiny"
    subprocess.run([sys.executable, EXAMPLES / "demo" / "tiny_model.py", model], check=True)
    bin_folders = [str(Path(python).parent) for python in (vllm_python, sys.executable)]
    env = {
        **os.environ,
        "PATH": os.pathsep.join([*bin_folders, os.environ["PATH"]]),
        "DRAM": "64MiB",
        "NODE_HTTP": "off",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    options = [
        "--port",
        str(free_port),
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--block-size",
        "32",
    ]
    options += ["--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", "--served-model-name", "tiny"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [EXAMPLES / "vllm_serve.sh", model, *options],
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for_node(time.monotonic() + NODE_START_S)
        wait_for_engine(free_port, process, log)
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "moon " * 100}]}
        connection = http.client.HTTPConnection("127.0.0.1", free_port, timeout=60)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
        blocks = answer["usage"]["prompt_tokens"] // 32
        assert blocks > 10
        with Store() as store:
            deadline_s = time.monotonic() + 10
            while store.stat()["stored_bytes_total"] < blocks * 32 * 4096 and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert store.stat()["stored_bytes_total"] == blocks * 32 * 4096
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    except BaseException:
        print(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_engine(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + ENGINE_START_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, "vllm_serve.sh ended"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    pytest.fail("the engine was not ready in time")
