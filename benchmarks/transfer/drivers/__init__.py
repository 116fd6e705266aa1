"""One module per engine, each with a Target (the side whose memory is moved to or from) and an Initiator.

They run under their engine's own interpreter, so each module is imported only where it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.transfer.memory import Region
from moonpool.core.bench.load import timed_calls

Call = Callable[[], object]


class Caller(Protocol):
    """One thread's calls of one cell."""

    def run(self, first: int, count: int) -> list[float]:
        """Makes the calls first .. first + count - 1, one after another; how many seconds each took. Raises
        when one of them failed.
        """
        ...


class Target(Protocol):
    """about: what the initiator has to know, as JSON."""

    region: Region
    about: dict[str, Any]


class Initiator(Protocol):
    """op: which way the bytes go. limit: the name of the machine's own way to do the same, "" for none."""

    op: str
    limit: str
    region: Region

    def caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller: ...
    def limit_caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller: ...


class PythonCaller:
    """Calls from Python, as this project's users and its peers' make them."""

    def __init__(self, calls: list[Call], expected: object) -> None:
        """expected: what each returns when all is well; None: it does not say."""
        self._calls, self._expected = calls, expected

    def run(self, first: int, count: int) -> list[float]:
        spent_s, results = timed_calls(self._calls[first : first + count])
        if self._expected is not None and any(result != self._expected for result in results):
            raise RuntimeError(f"a call gave {results}, not {self._expected}")
        return spent_s


# driver -> its module and the arguments of both its sides
DRIVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours shm": ("moonpool", {"transport": "shm", "own": True}),
    "ours foreign": ("moonpool", {"transport": "shm", "own": False}),
    "ours tcp": ("moonpool", {"transport": "tcp", "own": False}),
    "ours tcp reads": ("moonpool", {"transport": "tcp", "own": False, "reads": True}),
    "ours submit": ("moonpool", {"transport": "tcp", "own": False, "submits": True}),
    "drop-in": ("drop_in", {}),
    "mooncake": ("mooncake", {}),
    "nixl shm": ("nixl", {"transport": "shm"}),
    "nixl tcp": ("nixl", {"transport": "tcp"}),
    "plain": ("plain", {}),
}


def load(name: str, side: str) -> Callable[..., Any]:
    """The class ``side`` of a driver, its own arguments filled in."""
    module, arguments = DRIVERS[name]
    found = getattr(importlib.import_module(f"{__name__}.{module}"), side)
    return lambda *rest: found(*rest, **arguments)
