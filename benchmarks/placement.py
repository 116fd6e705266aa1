"""On which cores the two sides of a conversation run.

A message that wakes a process on another core costs three to five times what it costs on the same core (17 us
against 45 to 80 for 4 KiB in a virtual machine), and which of the two happens is the scheduler's mood of the
minute: it would decide every ratio. So what talks over TCP runs both ways, and a figure is of the way that
suits it better.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    name: str
    caller: frozenset[int]
    server: frozenset[int]

    def pin(self, callers: Iterable[int], servers: Iterable[int]) -> None:
        """All threads of the processes, and those that they start from now on."""
        for pids, cores in ((callers, self.caller), (servers, self.server)):
            for pid in pids:
                pin(pid, cores)


_cores = sorted(os.sched_getaffinity(0))
_all, _one = frozenset(_cores), frozenset(_cores[:1])
_half = max(1, len(_cores) // 2)
FREE = Placement("free", _all, _all)
TOGETHER = Placement("together", _one, _one)
APART = Placement("apart", frozenset(_cores[:_half]), frozenset(_cores[_half:]) or _one)


def pin(pid: int, cores: frozenset[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has just ended
