"""Mock engines, and routers in front of them, for the benchmarks of the proxy."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.processes import Process, free_port
from benchmarks.proxy.routers import PEERS_OF, Engine, command, event_options

ENGINES = 4


class Bed:
    """Mock engines, and the routers that are put in front of them. quiet: engines that told of blocks at
    start, and no more; telling: they tell of each prompt."""

    def __init__(self, stack: ExitStack, venv: Path | None) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._stack = stack
        self._venv = venv
        self.quiet = [self._engine() for _ in range(ENGINES)]
        self.telling = [self._engine(tells=True) for _ in range(ENGINES)]

    def routers(self, form: str) -> dict[str, tuple[Process, int]]:
        """All there are for this form of hand-over ("": none), with round robin: processes and ports."""
        engines = self.quiet if form else self.quiet[:2]
        found = {name: self._router(name, engines, form=form) for name in ("ours", *PEERS_OF[form])}
        return {name: router for name, router in found.items() if router is not None}

    def aware(
        self, engines: list[Engine], *options: str | Path, form: str = "two_step"
    ) -> tuple[Process, int]:
        """Ours, which chooses by where the prefix lies, from the events of the engines."""
        half = ENGINES // 2
        names = [f"engine-{i}" for i in range(ENGINES)]
        if form:
            names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(half)]
        events = event_options(engines, names)
        router = self._router("ours", engines, "--policy", "conductor", *events, *options, form=form)
        assert router is not None
        return router

    def _router(
        self, name: str, engines: list[Engine], *options: str | Path, form: str
    ) -> tuple[Process, int] | None:
        """None where it is not there. options: for ours."""
        port = free_port()
        options = options or ("--policy", "round_robin")
        words = command(name, port, engines, self._venv, self.folder, form=form, options=options)
        return None if words is None else (self._start(words, port, f"{name}-{port}"), port)

    def _engine(self, *, tells: bool = False) -> Engine:
        port, events, replay = free_port(), *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        words = [sys.executable, "-m", "benchmarks.proxy.mock_engine", str(port), events, replay]
        self._start([*words, *(["tells"] if tells else [])], port, f"engine-{port}")
        return Engine(f"http://127.0.0.1:{port}", events, replay)

    def _start(self, words: Sequence[str | Path], port: int, name: str) -> Process:
        process = Process(words, self.folder / f"{name}.log")
        self._stack.callback(process.stop)
        process.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
        return process
