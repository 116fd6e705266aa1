"""A real vLLM, LMCache's server beside it, and a node: what one pair stored another takes from the pool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.processes import Engine, Node, environment
from tests.core.store_bed import until
from tests.ports import free_port

HERE = Path(__file__).resolve().parent
TINY_MODEL = HERE.parents[2] / "examples" / "demo" / "tiny_model.py"
CHUNK, PROMPT = 256, 700
HELD = PROMPT // CHUNK * CHUNK
ADAPTER = {
    "type": "plugin",
    "module_path": "moonpool.connectors.lmcache.adapter",
    "class_name": "MoonpoolL2Adapter",
    "adapter_params": {},
}

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.engine,
    pytest.mark.heavy,
    pytest.mark.slow,
    pytest.mark.timeout(500),
]


class EngineWithLMCache(Engine):
    driver = HERE / "vllm_driver.py"
    forked = False  # LMCache is to be imported before vLLM


def packages_of(python: str) -> list[str]:
    command = [
        python,
        "-c",
        "import json, sys; print(json.dumps([p for p in sys.path if 'site-packages' in p]))",
    ]
    found: list[str] = json.loads(subprocess.check_output(command, text=True))
    return found


@pytest.fixture(scope="module")
def python(vllm_python: str) -> Iterator[str]:
    """An interpreter with vLLM, and behind it LMCache."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
        own = next((Path(path) / "lib").glob("python3*")) / "site-packages"
        both = packages_of(vllm_python) + packages_of(os.environ["MOONPOOL_LMCACHE_PYTHON"])
        own.joinpath("both.pth").write_text("\n".join(dict.fromkeys(both)) + "\n")
        yield str(Path(path) / "bin" / "python")


@pytest.fixture
def pair(
    python: str, vllm_python: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Node, Callable[[], tuple[EngineWithLMCache, Callable[[], None]]]]]:
    """A node, and what starts an engine with a server of its own, and how both are ended."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN", raising=False)
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path, ExitStack() as stack:
        folder = Path(path)
        model = folder / "model"
        subprocess.run([sys.executable, TINY_MODEL, model], check=True)
        node = Node(folder / "run").start()
        stack.callback(node.kill)

        def start() -> tuple[EngineWithLMCache, Callable[[], None]]:
            port = free_port()
            log = folder / f"server-{port}.log"
            server = start_server(python, port, node.runtime, log)
            mine = ExitStack()
            mine.callback(end, server)
            stack.callback(mine.close)
            until(lambda: "cache server is running" in log.read_text(), 120)
            connector: dict[str, Any] = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
            engine = EngineWithLMCache(
                python, model, node.runtime, folder / f"engine-{port}.log", kv_transfer_config=connector
            )
            mine.callback(engine.close)
            return engine, mine.close

        yield node, start


def start_server(python: str, port: int, runtime: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [python, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--l1-size-gb", "0.25", "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(CHUNK), "--supported-transfer-mode", "engine_driven"]
    command += ["--l2-adapter", json.dumps(ADAPTER)]
    with open(log, "wb") as output:
        return subprocess.Popen(
            command, env=environment(runtime), stdout=output, stderr=output, start_new_session=True
        )


def end(server: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def test_a_second_engine_and_server_take_it_from_the_pool(pair: Any, rng: Any) -> None:
    node, start = pair
    prompt, other = ([rng.randrange(256) for _ in range(PROMPT)] for _ in range(2))
    first, end_first = start()
    (computed,) = first.call("generate", prompts=[prompt])["outputs"]
    assert not computed["cached"]
    until(lambda: node.metrics()["objects"] >= PROMPT // CHUNK, 30)
    end_first()
    second, _ = start()
    (answer,) = second.call("generate", prompts=[prompt])["outputs"]
    assert (answer["tokens"], answer["cached"]) == (computed["tokens"], HELD)
    node.kill()
    (without,) = second.call("generate", prompts=[other])["outputs"]  # computed, and no hang
    assert len(without["tokens"]) == len(computed["tokens"])
