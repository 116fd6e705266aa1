"""A real prefill server and a real decode server of SGLang, as processes of the test, and what Hugging Face
answers in their place."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.connectors.forks import ForkedProcess
from tests.connectors.sglang.bed import Bed, HuggingFace
from tests.connectors.sglang.reference import MAX_TOKENS
from tests.connectors.sglang.server import FLAGS, Server, environment, forked
from tests.connectors.sglang.transfer.installed import install
from tests.ports import kept_port

HICACHE = ("--enable-hierarchical-cache", "--hicache-write", "--hicache-storage")


class Half(Server):
    """One of the two; mode: prefill or decode. Its ports stay the same after restart()."""

    def __init__(
        self,
        mode: str,
        model: Path,
        runtime: Path,
        plugins: tuple[Path, ...],
        log: Path,
        bootstrap_port: int,
        tp_size: int = 1,
    ) -> None:
        self.port = kept_port()
        self.log = log
        self.bootstrap_port = bootstrap_port
        self._command = [
            *("-m", "sglang.launch_server"),
            *(flag for flag in FLAGS if not flag.startswith(HICACHE)),
            *(f"--model-path={model}", "--host=127.0.0.1", f"--port={self.port}"),
            *(f"--disaggregation-mode={mode}", "--disaggregation-transfer-backend=mooncake"),
            *(f"--disaggregation-bootstrap-port={bootstrap_port}", "--hicache-mem-layout=page_first_direct"),
            *("--max-running-requests=16", f"--tp-size={tp_size}"),
        ]
        self._environment = environment(runtime, *plugins) | {
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp_size),
            "MOONPOOL_SGLANG_PD": "1",
        }
        self._process = self._start()

    def restart(self) -> None:
        self.close()
        self._process = self._start()

    def _start(self) -> ForkedProcess:
        return forked(self._command, self._environment, self.log)


class Pair:
    """Asks both at once, as SGLang's protocol wants it; answers are decode's."""

    def __init__(self, prefill: Half, decode: Half) -> None:
        self.prefill = prefill
        self.decode = decode
        self._rooms = iter(range(1, 1_000_000))
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(16)

    def generate(self, prompt: list[int], name: str | None = None) -> list[int]:
        """Raises HTTPError with what decode said."""
        prefill, decode = self.ask(prompt, name)
        tokens: list[int] = decode.result()["output_ids"]
        prefill.result()
        return tokens

    def ask(
        self, prompt: list[int], name: str | None = None, *, prefill: bool = True, tokens: int = MAX_TOKENS
    ) -> tuple[Future[Any], Future[Any]]:
        """Starts a request on both; ``prefill=False``: on decode alone, which then waits for it."""
        with self._lock:
            room = next(self._rooms)
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": room,
        }
        if name is not None:
            body["rid"] = name
        first: Future[Any] = Future()
        if prefill:
            first = self._threads.submit(self._post, self.prefill, body)
        return first, self._threads.submit(self._post, self.decode, body)

    def _post(self, half: Half, body: dict[str, Any]) -> Any:
        return json.loads(half.call("POST", "generate", body))

    def abort(self, name: str) -> None:
        for half in (self.prefill, self.decode):
            half.call("POST", "abort_request", {"rid": name})


@dataclass
class Line:
    """Both servers, prompts, and what Hugging Face says to them; logprobs: as HuggingFace has them."""

    pair: Pair
    asked: list[list[int]]
    expected: list[list[int]]
    logprobs: list[list[float]]

    def answers_all(self) -> None:
        assert [self.pair.generate(prompt) for prompt in self.asked] == self.expected

    def answers_at_once(self, times: int) -> None:
        waiting = [self.pair.ask(prompt)[1] for prompt in self.asked * times]
        assert [one.result()["output_ids"] for one in waiting] == self.expected * times


@contextmanager
def make_line(bed: Bed, asked: list[list[int]], tp_size: int = 1, kind: type[Half] = Half) -> Iterator[Line]:
    """tp_size: of decode."""
    plugins, port = (bed.plugin, bed.folder / "moonpool"), kept_port()
    install(plugins[1])
    halves = [
        kind(mode, bed.model, bed.runtime, plugins, bed.folder / f"{mode}.log", port, size)
        for mode, size in (("prefill", 1), ("decode", tp_size))
    ]
    try:
        reference = HuggingFace(bed, asked)
        for half in halves:
            half.wait()
            assert "moonpool: transfer engine at 127.0.0.1:" in half.logged()
        yield Line(Pair(*halves), asked, reference.answers(), reference.logprobs())
    finally:
        for half in halves:
            print(half.tail(), file=sys.stderr)
            half.close()


def said(failed: Future[Any]) -> str:
    """What a server answered to a request that it did not serve, or how its answer says that it was not."""
    error = failed.exception(timeout=120)
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.read().decode()}"
    assert error is None, error
    return json.dumps(failed.result())
