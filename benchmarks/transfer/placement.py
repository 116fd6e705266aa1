"""Where the two processes of a pair run.

A message that wakes a process on another core costs three to five times what it costs on the same core (17 us
against 45 to 80 for 4 KiB in a virtual machine), and which of the two happens is the scheduler's mood of the
minute: it would decide every ratio. So each pair that exchanges messages runs each cell both ways, and a
figure is of the way that suits that engine and that cell better.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from benchmarks.transfer.cells import Cell

COPIES = ("ours shm", "ours foreign", "nixl shm")  # only the caller works: nobody is woken
POLLS = ("nixl tcp",)  # both sides work all the time: they need a core each


@dataclass(frozen=True)
class Placement:
    name: str
    initiator: frozenset[int]
    target: frozenset[int]


def placements(driver: str, cell: Cell) -> list[Placement]:
    cores = sorted(os.sched_getaffinity(0))
    free = frozenset(cores)
    half = len(cores) // 2
    if cell.threads > 1 or half == 0 or driver in COPIES:
        return [Placement("free", free, free)]
    apart = Placement("apart", frozenset(cores[:half]), frozenset(cores[half:]))
    if driver in POLLS:
        return [apart]
    return [Placement("together", frozenset(cores[:1]), frozenset(cores[:1])), apart]


def pin(pid: int, cores: frozenset[int]) -> None:
    """All threads of the process, and those they start from now on."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has just ended
