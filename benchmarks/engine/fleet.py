"""The processes of one engine benchmark: a node, a tiny real model, and vLLM engines of a process each."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.processes import PYTHON, ROOT, Failed, Process, Talker

START_TIMEOUT_S = 200.0
VOCABULARY = 256  # of the tiny model: a token is a byte
ENVIRONMENT = {  # of every engine and node
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ON_CPU = {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def vllm_python() -> str:
    """The default interpreter for engines."""
    return os.environ.get("MOONPOOL_VLLM_PYTHON", sys.executable)


def prompt(tokens: int, name: str, vocabulary: int = VOCABULARY) -> list[int]:
    """Random token ids, the same for the same name; two names share no prefix worth the name."""
    source = random.Random(name)
    return [source.randrange(vocabulary) for _ in range(tokens)]


def tiny_model(folder: Path) -> Path:
    """Makes the model of examples/demo there, with its weights; its path."""
    path = folder / "tiny"
    script = ROOT / "examples" / "demo" / "tiny_model.py"
    subprocess.run([PYTHON, script, path], check=True, stdout=subprocess.DEVNULL)
    return path


class Fleet:
    """The engines and the node of one run."""

    def __init__(
        self,
        folder: Path,
        python: str,
        stack: ExitStack,
        *,
        model: Path | None = None,
        environment: dict[str, str] = ON_CPU,
    ) -> None:
        """folder: for the model, sockets, logs and files of the run.
        python: the interpreter with vLLM.
        model: of the engines; None: the tiny one.
        environment: of engines and node, beside ENVIRONMENT.
        """
        self.folder, self.python, self.stack = folder, python, stack
        self.model = tiny_model(folder) if model is None else model
        self.environment = environment

    def node(self, dram: str, http: str = "off") -> Path:
        """Starts a node; its socket. Raises Failed."""
        path = self.folder / "node.sock"
        command: list[str | Path] = [
            *(PYTHON, "-m", "moonpool", "node", "--dram", dram, "--socket", path, "--http", http),
        ]
        node = Process(command, self.folder / "node.log", extra=self._environment())
        self.stack.callback(node.stop)
        node.wait_for_port(socket.AF_UNIX, str(path))
        return path

    def engine(
        self,
        name: str,
        kv_transfer_config: dict[str, Any] | None,
        extra: dict[str, str] | None = None,
        module: str = "benchmarks.engine.driver",
        **more: Any,
    ) -> Talker:
        """Starts an engine and returns at once; ``ready`` waits for several. extra: environment; module: of
        its driver; more: arguments of vllm.LLM."""
        config: dict[str, Any] = {"model": str(self.model), **more}
        if kv_transfer_config is not None:
            config["kv_transfer_config"] = kv_transfer_config
        engine = Talker(
            self.python,
            module,
            [json.dumps(config)],
            self.folder / f"{name}.log",
            {**self._environment(), **(extra or {})},
        )
        self.stack.callback(engine.close)
        return engine

    def _environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, **self.environment, "MOONPOOL_RUNTIME_DIR": str(self.folder)}


def ready(*engines: Talker) -> None:
    """Returns when all serve. Raises Failed."""
    for engine in engines:
        engine.wait_ready(START_TIMEOUT_S)


def moonpool_config(node: Path, **more: Any) -> dict[str, Any]:
    """The connector, on this node; no pool is an error here. more: options of the connector."""
    return {
        "kv_connector": "Mooncake",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": str(node), "require_pool": True, **more},
    }


__all__ = ["Failed", "Fleet", "moonpool_config", "prompt", "ready", "vllm_python"]
