"""A real SGLang server as a process of the test: started with a deadline, asked over HTTP, always taken
down."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.connectors.forks import ForkedProcess, Warm, inherited
from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.reference import MAX_TOKENS
from tests.ports import kept_port

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
ADMIN_KEY = "admin of this test"
PAGE_TOKENS = 16
FLAGS = [
    "--device=cpu",
    "--dtype=float32",  # else ties among bfloat16's few logits decide otherwise than Hugging Face
    "--attention-backend=torch_native",
    "--mem-fraction-static=0.1",
    "--max-total-tokens=4096",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    f"--page-size={PAGE_TOKENS}",
    "--enable-hierarchical-cache",
    "--hicache-ratio=2",
    "--hicache-io-backend=direct",
    "--hicache-write-policy=write_through",
    "--hicache-storage-prefetch-policy=wait_complete",
    "--enable-metrics",
    "--enable-cache-report",
    f"--admin-api-key={ADMIN_KEY}",
]

POOL = {
    "backend_name": "moonpool",
    "module_path": "moonpool.connectors.sglang",
    "class_name": "MoonpoolHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}


# What SGLang imports before it loads plugins, and other packages that it imports later. Not more of SGLang:
# what plugins find imported is to be as in a server that was not forked.
IMPORTED = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "functorch.compile",
    "torch._inductor.compile_fx",
    "compressed_tensors",
    "openai",
    "xgrammar",
    "fastapi",
    "uvicorn",
    "uvloop",
    "sglang.launch_server",
)
SETTINGS = {
    "SGLANG_PLATFORM": "torchcpu",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def environment(runtime: Path, *paths: Path) -> dict[str, str]:
    """What engines see: this checkout, ``paths`` with the stand-ins for CUDA, their own runtime folder."""
    return {
        **inherited(),
        **SETTINGS,
        "PATH": f"{Path(os.environ['MOONPOOL_SGLANG_PYTHON']).parent}:{os.environ['PATH']}",  # ninja
        "PYTHONPATH": ":".join(map(str, (*paths, SOURCE))),
        "MOONPOOL_RUNTIME_DIR": str(runtime),
    }


@functools.cache
def warm() -> Warm:
    """For ForkedProcess."""
    plugin = tempfile.mkdtemp(prefix="moonpool-sglang-")
    atexit.register(shutil.rmtree, plugin)
    sglang_cpu.install(Path(plugin))
    variables = SETTINGS | {"PYTHONPATH": plugin}
    return Warm(os.environ["MOONPOOL_SGLANG_PYTHON"], IMPORTED, tuple(variables.items()))


def run(arguments: Sequence[str], env: Mapping[str, str], log: Path, timeout_s: float) -> str:
    """``python *arguments`` with SGLang -> what it said, which ``log`` has. One that fails fails the test."""
    process = forked(arguments, env, log)
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    said = log.read_text(errors="replace")
    assert code == 0, said[-4000:]
    return said


def forked(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> ForkedProcess:
    """``python *arguments`` with SGLang, in a session of its own; what it says is appended to ``log``."""
    with log.open("ab") as output:
        return ForkedProcess(
            warm(),
            arguments,
            env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            spawns=True,
        )


class Server:
    """One ``sglang.launch_server``; ``layout``: of its host memory; ``backend``: SGLang's name of HiCache's
    storage, by default the pool, of which ``extra`` are more options; ``paths``: for more packages."""

    def __init__(
        self,
        model: Path,
        runtime: Path,
        plugin: Path,
        log: Path,
        *,
        layout: str,
        extra: dict[str, object],
        tp_size: int = 1,
        backend: str = "dynamic",
        flags: Sequence[str] = (),
        paths: Sequence[Path] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.extra = (POOL if backend == "dynamic" else {}) | {"prefetch_threshold": PAGE_TOKENS} | extra
        self.port = kept_port()
        self.log = log
        command = [
            *("-m", "sglang.launch_server", *FLAGS),
            *(f"--model-path={model}", "--host=127.0.0.1", f"--port={self.port}", f"--tp-size={tp_size}"),
            *(f"--hicache-mem-layout={layout}", f"--hicache-storage-backend={backend}"),
            *(f"--hicache-storage-backend-extra-config={json.dumps(self.extra)}", *flags),
        ]
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp_size)}
        env = environment(runtime, plugin, *paths) | binding | dict(settings or {})
        self._process = forked(command, env, log)

    def wait(self) -> Server:
        """Returns when it serves; a server that ended, or says nothing for too long, fails the test."""
        started_s = time.monotonic()
        while True:
            try:
                self.call("GET", "health", timeout_s=5)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self._process.poll() is None, self.tail()
                assert time.monotonic() - started_s < START_TIMEOUT_S, self.tail()
                time.sleep(0.2)  # there is nothing to wait on but the port
            else:
                print(f"SGLang served after {time.monotonic() - started_s:.1f} s", file=sys.stderr)
                return self

    def generate(self, prompt: list[int], tokens: int = MAX_TOKENS) -> tuple[list[int], int]:
        """So many greedy tokens, and how many of the prompt's came from the pool."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        answer = json.loads(self.call("POST", "generate", body))
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return answer["output_ids"], int(details.get("storage", 0) or 0)

    def forget(self) -> None:
        """Empties the engine's own two tiers."""
        self._when_idle("POST", "flush_cache")

    def detach(self) -> None:
        self._when_idle("DELETE", "hicache/storage-backend")

    def attach(self, backend: str = "", extra: dict[str, object] | None = None) -> None:
        """The storage it was started with, or another one."""
        body = {
            "hicache_storage_backend": backend or self.backend,
            "hicache_storage_backend_extra_config_json": json.dumps(extra or self.extra),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        self._when_idle("PUT", "hicache/storage-backend", body)

    def _when_idle(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """It refuses these while anything is in flight, and answers a client before it has tidied up."""
        deadline_s = time.monotonic() + 30
        while True:
            try:
                self.call(method, path, body)
                return
            except urllib.error.HTTPError as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{path}: {error.read()!r}\n{self.tail()}") from error
                time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """The values of moonpool_hicache_*_total."""
        lines = self.call("GET", "metrics").splitlines()
        rows = [line.rpartition(" ") for line in lines if line.startswith("moonpool_hicache_")]
        return {name.partition("{")[0]: float(value) for name, _, value in rows}

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text: str = answer.read().decode()
            return text

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.logged().splitlines()[-60:])

    def close(self) -> None:
        """Ends all of its processes: they are a session of their own."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
