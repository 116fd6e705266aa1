"""One run: every store and its client are up, take turns, and what they measured is kept.

``SameHost`` does the cells of workload.py between processes of this host; ``OverCable`` those of ring.py,
with the stores in another network namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.namespace import Namespace
from benchmarks.placement import APART, TOGETHER
from benchmarks.processes import PYTHON, SOURCES, Failed, Talker
from benchmarks.store import servers
from benchmarks.store.ring import RING_CELLS
from benchmarks.store.workload import CELLS

PASSES_MAX = 6
OUR_PYTHON = ("ours", "drop-in")


@dataclass
class Backend:
    client: Talker
    pids: list[int]


class Run:
    """All backends of one run, and what they have measured so far."""

    client_module = ""

    def __init__(self, setting: servers.Setting, stack: ExitStack) -> None:
        self.setting, self.stack = setting, stack
        self.backends: dict[str, Backend] = {}
        self.missing: dict[str, str] = {}
        self.passes: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}

    def start(self, names: Sequence[str]) -> None:
        """Without a peer the others still run. Raises Failed when ours does not start."""
        for name in names:
            if name not in OUR_PYTHON and self.setting.peers_python is None:
                self.missing[name] = "needs --peers-venv DIR"
                continue
            try:
                self._start(name)
            except Failed as error:
                self._drop(name, error)

    def _start(self, name: str) -> None:
        server = servers.START[name](self.setting, self.stack)
        python: str | Path | None = PYTHON if name in OUR_PYTHON else self.setting.peers_python
        assert python is not None
        runtime = (servers.drop_in_runtime if name == "drop-in" else servers.runtime)(self.setting)
        client = Talker(
            python,
            self.client_module,
            [name, server.address, *self.client_words(name)],
            self.setting.log(f"client-{name}"),
            runtime if name in OUR_PYTHON else runtime | SOURCES,
        )
        self.stack.callback(client.close)
        client.wait_ready()
        self.backends[name] = Backend(client, server.pids)

    def client_words(self, name: str) -> list[str]:
        return []

    def ask_all(self, turn: int, request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """(backend, its answer), another backend first in each turn. Raises Failed when ours fails."""
        names = list(self.backends)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            backend = self.backends[name]
            try:
                yield name, self.ask(backend, {**request, "pids": backend.pids})
            except Failed as error:
                self._drop(name, error)

    def ask(self, backend: Backend, request: dict[str, Any]) -> Any:
        return backend.client.ask(request)

    def keep(self, name: str, cell: str, figures: Mapping[str, list[dict[str, float]]]) -> None:
        verbs = self.passes.setdefault(name, {}).setdefault(cell, {})
        for verb, rows in figures.items():
            verbs.setdefault(verb, []).extend(rows)

    def _drop(self, name: str, error: Failed) -> None:
        if name == "ours":
            raise error
        self.missing[name] = str(error)
        self.backends.pop(name, None)
        self.passes.pop(name, None)


class SameHost(Run):
    client_module = "benchmarks.store.client"

    def client_words(self, name: str) -> list[str]:
        return ["memcpy"] if name == "ours" else []

    def round(self, number: int, budget_s: float) -> None:
        """Every cell by every backend; number 0 is not counted."""
        for cell in CELLS:
            request = {"cell": asdict(cell), "budget_s": budget_s, "passes_max": PASSES_MAX}
            for name, answer in self.ask_all(number, request):
                if number:
                    self.keep(name, cell.name, answer)


class OverCable(Run):
    client_module = "benchmarks.store.ring"

    def __init__(self, setting: servers.Setting, stack: ExitStack, namespace: Namespace) -> None:
        super().__init__(setting, stack)
        self.namespace = namespace

    def cells(self, rounds: int, budget_s: float) -> None:
        """All rounds of one cell before the next: a new cell fills each store. The first is not counted."""
        for cell in RING_CELLS:
            for number in range(rounds + 1):
                for name, answers in self.ask_all(number, {"cell": asdict(cell), "budget_s": budget_s}):
                    for where, figures in answers.items() if number else ():
                        self.keep(name, f"{cell.name} {where}", figures)

    def ask(self, backend: Backend, request: dict[str, Any]) -> Any:
        answers = {}
        for where in (TOGETHER, APART):
            where.pin([backend.client.process.pid], backend.pids)
            answers[where.name] = self.ask_watched(backend, request)["figures"]
        return answers

    def ask_watched(self, backend: Backend, request: dict[str, Any]) -> Any:
        """Whoever did not send every byte over the cable did other work than the row says."""
        sent, received = self.namespace.bytes_sent(), self.namespace.bytes_received()
        answer = backend.client.ask(request)
        sent, received = self.namespace.bytes_sent() - sent, self.namespace.bytes_received() - received
        if sent < answer["put"] or received < answer["got"]:
            raise backend.client.process.failed(
                f"put {answer['put']} and got {answer['got']} bytes, but sent {sent} and received {received}"
            )
        return answer
