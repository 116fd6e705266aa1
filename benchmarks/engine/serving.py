"""Real vLLM servers that share one node's memory, and our proxies before them, for benchmarks over HTTP."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engine.fleet import ENVIRONMENT, ON_CPU, moonpool_config
from benchmarks.processes import PYTHON, ROOT, Failed, Process, free_port

START_TIMEOUT_S = 300.0
MODEL = "tiny"
BLOCK_TOKENS = 32


def larger_model(folder: Path) -> Path:
    """The model of examples/demo, with layers of four times the work: a prompt's tokens, not the steps of a
    server around them, take most of the time. Its path."""
    source = ROOT / "examples" / "demo" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values: dict[str, Any] = {"HIDDEN": 512, "INNER": 1024, "HEADS": 8, "KV_HEADS": 4, "SPREAD": 0.05}
    for name, value in values.items():
        setattr(module, name, value)
    path: Path = module.make(folder / MODEL)
    return path


class Serving:
    """The servers of one run."""

    def __init__(self, folder: Path, python: str, stack: ExitStack) -> None:
        """folder: short, for sockets; python: the interpreter with vLLM and moonpool."""
        self.folder, self.python, self.stack = folder, python, stack
        self.model = larger_model(folder)
        self.engines: dict[str, str] = {}  # name -> URL
        self._processes: dict[str, Process] = {}

    def start_node(self, dram: str) -> None:
        """Raises Failed."""
        socket_path = self.folder / "node.sock"
        command: list[str | Path] = [
            *(PYTHON, "-m", "moonpool", "node", "--dram", dram, "--socket", socket_path, "--http", "off"),
            *("--events", self._stream("node"), "--events-replay", self._stream("node-replay")),
        ]
        node = Process(command, self.folder / "node.log", extra=self._environment())
        self.stack.callback(node.stop)
        node.wait_for_port(socket.AF_UNIX, str(socket_path))

    def our_connector(self, **options: Any) -> dict[str, Any]:
        """Its --kv-transfer-config, over the node of this run."""
        return moonpool_config(self.folder / "node.sock", **options)

    def start_engine(self, name: str, *arguments: str, connector: dict[str, Any] | None) -> None:
        """Returns at once; ``wait`` waits for all. arguments: further ones of `vllm serve`. connector: its
        --kv-transfer-config, or None."""
        port = free_port()
        while f"http://127.0.0.1:{port}" in self.engines.values():  # of one that does not listen yet
            port = free_port()
        self.engines[name] = f"http://127.0.0.1:{port}"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._stream(name),
            "replay_endpoint": self._stream(f"{name}-replay"),
            "topic": "kv-events",
        }
        transfer = ["--kv-transfer-config", json.dumps(connector)] if connector else []
        command: list[str | Path] = [
            *(self.python, "-m", "vllm.entrypoints.cli.main", "serve", self.model),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL),
            *("--dtype", "float32", "--enforce-eager", "--seed", "0", "--block-size", str(BLOCK_TOKENS)),
            *(*transfer, "--kv-events-config", json.dumps(events)),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *arguments),
        ]
        process = Process(command, self.folder / f"{name}.log", extra=self._environment())
        self.stack.callback(process.stop)
        self._processes[name] = process

    def wait(self) -> None:
        """Until all engines serve. Raises Failed."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for name, url in self.engines.items():
            while not answers(url):
                process = self._processes[name]
                if not process.is_running or time.monotonic() > deadline_s:
                    raise process.failed("does not serve")
                time.sleep(0.2)

    def start_proxy(self, policy: str, *, pair: tuple[str, str] | None = None, pool: bool = True) -> str:
        """pair: engines for prefill and decode; without it all serve requests whole. pool: it gets the node's
        events. Its URL."""
        port = free_port()
        roles = dict(zip(pair, ("prefill", "decode"), strict=True)) if pair else {}
        command: list[str | Path] = [
            *(PYTHON, "-m", "moonpool", "proxy", "--policy", policy, "--listen", f"127.0.0.1:{port}"),
            *("--tokenizer", "none"),
        ]
        for name, url in self.engines.items():
            if roles and name not in roles:
                continue
            command += [f"--{roles.get(name, 'engine')}", f"{name}={url}"]
            command += ["--events", f"{name}={self._stream(name)},{self._stream(f'{name}-replay')}"]
        if pool:
            command += ["--pool-events", f"node={self._stream('node')},{self._stream('node-replay')}"]
        log = self.folder / f"proxy-{policy}-{'pair' if pair else 'whole'}-{port}.log"
        process = Process(command, log, extra=self._environment())
        self.stack.callback(process.stop)
        process.wait_for_output("serving on")
        return f"http://127.0.0.1:{port}"

    def _stream(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}.ipc"

    def _environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, **ON_CPU, "MOONPOOL_RUNTIME_DIR": str(self.folder)}


def answers(url: str) -> bool:
    """Whether GET /health answers 200 there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


__all__ = ["BLOCK_TOKENS", "MODEL", "Failed", "Serving"]
