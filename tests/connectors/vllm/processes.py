"""The processes of the engine tests: real vLLM engines and nodes, started with a deadline and always taken
down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.connectors.forks import AnyProcess, ForkedProcess, Warm, inherited
from tests.descriptors import speaks

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
START_TIMEOUT_S = 480.0
CALL_TIMEOUT_S = 120.0

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(SOURCE),
}


IMPORTED = (
    "vllm",
    "vllm.lora.request",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)


class EngineFailed(Exception):
    """The engine process said so, or ended, or was silent for too long. ``causes``: its chain of
    exceptions."""

    def __init__(self, message: str, causes: list[str]) -> None:
        super().__init__(message)
        self.causes = causes


def engine_environment() -> dict[str, str]:
    """Without a runtime folder. Compiled bytecode is kept."""
    return {**inherited(), **ENGINE_ENVIRONMENT}


def environment(runtime: Path) -> dict[str, str]:
    """What child processes see: this checkout, and a runtime folder of their own."""
    return {**engine_environment(), "MOONPOOL_RUNTIME_DIR": str(runtime)}


def warm(python: str) -> Warm:
    """For ForkedProcess."""
    return Warm(python, IMPORTED, tuple(ENGINE_ENVIRONMENT.items()))


class Engine:
    """One engine_driver.py. Starting returns at once; ``wait`` or the first call waits until it is ready.
    forked: from an interpreter that has imported vLLM, see ForkedProcess."""

    driver = HERE / "engine_driver.py"
    forked = True

    def __init__(self, python: str, model: Path, runtime: Path, log: Path, **config: Any) -> None:
        self.log = log
        config = {
            "model": str(model),
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_batched_tokens": 256,
        } | config
        reader, writer = os.pipe()
        self.process: AnyProcess
        with open(log, "wb") as output:
            if self.forked:
                self.process = ForkedProcess(
                    warm(python),
                    [str(self.driver), writer, json.dumps(config)],
                    environment(runtime),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            else:
                self.process = subprocess.Popen(
                    [python, str(self.driver), str(writer), json.dumps(config)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(runtime),
                    pass_fds=[writer],
                )
        os.close(writer)
        self._answers = os.fdopen(reader, "rb", buffering=0)
        self._pending = b""
        self._ready = False

    def wait(self) -> Engine:
        """Returns when the engine serves. Raises EngineFailed."""
        if not self._ready:
            self._answer(START_TIMEOUT_S)
            self._ready = True
        return self

    def call(self, operation: str, /, **args: Any) -> Any:
        """What Driver.<operation>(**args) returned. Raises EngineFailed."""
        self.wait()
        self.send(operation, **args)
        return self.receive()

    def send(self, operation: str, /, **args: Any) -> None:
        """The first half of ``call``, for a test that acts meanwhile."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": operation, "args": args}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        return self._answer(CALL_TIMEOUT_S).get("result")

    def close(self) -> None:
        if self.process.poll() is None and self._ready:
            try:
                self.send("exit")
                self.process.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
        elif self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._answers.close()

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not speaks(self._answers, left_s):
                raise EngineFailed(f"no answer within {timeout_s:g} s\n{self._tail()}", [])
            chunk = self._answers.read(65536)
            if not chunk:
                raise EngineFailed(f"the engine ended ({self.process.wait()})\n{self._tail()}", [])
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self._tail()}", answer["error"])
        return answer

    def _tail(self) -> str:
        return "\n".join(self.logged().splitlines()[-40:])


class Bed(Engine):
    """One identity_bed.py: forks an engine for each call."""

    driver = HERE / "identity_bed.py"
    node_pid = 0  # of its engines, if bed_with_node made it

    def run(self, args: dict[str, Any], prompts: list[list[int]], **how: Any) -> dict[str, Any]:
        """What a new engine answers; it leaves no block and no pin, and survived no error."""
        answer: dict[str, Any] = self.call("run", args=args, environment={}, prompts=prompts, **how)
        assert answer["left"] == {"blocks": 0, "pins": 0}
        assert answer["survived_errors"] == 0
        return answer


@contextmanager
def bed_with_node(python: str) -> Iterator[tuple[Bed, Path]]:
    """A bed whose engines have a node, and a folder for models; taken down at the end."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path, ExitStack() as stack:
        folder = Path(path)
        bed = Bed(python, folder, folder / "run", folder / "log")
        stack.callback(bed.close)
        node = Node(folder / "run").start()
        stack.callback(node.stop)
        bed.node_pid = node.pid
        yield bed, folder


class Node:
    """One node_process.py on the default socket of ``runtime``."""

    def __init__(self, runtime: Path, size: int = 256 << 20) -> None:
        self.runtime = runtime
        self.size = size
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Node:
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "node_process.py"), str(self.runtime / "node.sock"), str(self.size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(self.runtime),
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def metrics(self) -> dict[str, int]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        metrics: dict[str, int] = json.loads(self.process.stdout.readline())
        return metrics

    def kill(self) -> None:
        """As kill -9: nothing is tidied up, the socket file stays."""
        if self.process is not None:
            self.process.kill()
            self._reap()

    def pause(self) -> None:
        """Stops the process where it is. One thread takes the signal and stops the others, so wait for
        all."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + 10
        while any(_state(task) != "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < deadline_s, "the node does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(10)
            self._reap()

    def _reap(self) -> None:
        assert self.process is not None
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process = None


def _state(task: Path) -> str:
    """One letter: R running, S sleeping, T stopped, ..."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
