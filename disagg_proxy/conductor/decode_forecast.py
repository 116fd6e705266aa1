"""The forecast of a decode worker's load: requests that decode there now and still will, accepted requests
whose prefill ends before then, and requests that have not arrived yet.

Pure and of bounded size: requests are counted by the half second in which their decode begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from moonpool.disagg_proxy.conductor.answer_lengths import STEP_S, STEPS, AnswerLengthStats, Floats, Times

LONGEST = 0.1  # of the gaps
INFLOW_S = 30.0  # time constant of the average rate at which requests begin to decode here
_BACK = np.arange(STEPS)


class Occupancy(NamedTuple):
    """context_tokens: of the prompts."""

    requests: float
    context_tokens: float


class _Is(IntEnum):
    COMING = 0  # expected to begin in its step
    BEGUN = 1  # began in its step
    SILENT = 2  # expected to begin in its step; no report will say when it did


@dataclass(slots=True)
class _Taken:
    context: int
    step: int
    state: _Is


class DecodeForecast:
    """Requests are named by any hashable. Reports about unknown ones change nothing, so that they may come
    late, twice or never. answers: how long answers take; leads: seconds from acceptance to the first token;
    all workers share both. A clock that jumps spoils the forecast for as long as the jump; the counts stay
    right.
    """

    def __init__(self, answers: AnswerLengthStats, leads: Times) -> None:
        self._answers = answers
        self._leads = leads
        self._taken: dict[int, _Taken] = {}
        # By state, requests or tokens, and the step of the beginning modulo STEPS.
        self._tables = np.zeros((len(_Is), 2, STEPS))
        self._inflow: Floats = np.zeros(2)  # requests and tokens a second
        self._inflow_at_s = -math.inf
        # By the step: the gap by the model, and seconds of prompts that were computed here.
        self._gaps = np.zeros(STEPS)
        self._stalls = np.zeros(STEPS)
        self._noted = 0

    def __len__(self) -> int:
        return len(self._taken)

    def taken(self, name: int, context: int, begins_s: float, *, silent: bool = False) -> None:
        """A request was accepted, and is expected to begin to decode at ``begins_s``. silent: no report will
        say when it does."""
        self.over(name)
        taken = _Taken(context, _step(begins_s), _Is.SILENT if silent else _Is.COMING)
        self._taken[name] = taken
        self._count(taken, 1)

    def began(self, name: int, now_s: float) -> None:
        """Its decode begins now, and not when ``taken`` expected it; from now on it counts towards the rate
        of arrivals. A second report changes nothing."""
        taken = self._taken.get(name)
        if taken is None or taken.state is _Is.BEGUN:
            return
        self._count(taken, -1)
        taken.state, taken.step = _Is.BEGUN, _step(now_s)
        self._count(taken, 1)
        self._fade(now_s)
        self._inflow += np.array((1.0, taken.context)) / INFLOW_S

    def over(self, name: int) -> None:
        """The request has ended or was given up, in whichever state. The rate of arrivals keeps it."""
        taken = self._taken.pop(name, None)
        if taken is not None:
            self._count(taken, -1)

    def now(self) -> Occupancy:
        """Requests that decode now, silent ones included."""
        found = self._tables[_Is.BEGUN].sum(axis=1) + self._tables[_Is.SILENT].sum(axis=1)
        return Occupancy(float(found[0]), float(found[1]))

    def at(self, now_s: float, after_s: float) -> Occupancy:
        """``after_s`` seconds from now; at most half of the table's time ahead."""
        now, steps = _step(now_s), min(max(_step(after_s + STEP_S / 2), 0), STEPS // 2 - 1)
        left = self._answers.times.left
        still = left[steps : steps + STEPS] / left[:STEPS]  # by age
        past, future = (now - _BACK) % STEPS, (now + 1 + _BACK[:steps]) % STEPS
        half = STEPS // 2
        silent = self._tables[_Is.SILENT]
        found = self._tables[_Is.BEGUN][:, past] @ still + silent[:, past[:half]] @ still[:half]
        coming = self._tables[_Is.COMING]
        # A request that is due but has not begun counts as beginning in the next step.
        found += coming[:, past[:half]].sum(axis=1) * left[steps]
        if steps:
            later = left[steps - 1 :: -1]  # of those that begin 1, 2, ... steps from now
            found += (coming[:, future] + silent[:, future]) @ later
            self._fade(now_s)
            unknown = 1 - self._leads.left[1 : steps + 1]  # the share of those that have not arrived yet
            found += self._inflow * (STEP_S * float(unknown @ later))
        return Occupancy(float(found[0]), float(found[1]))

    def note(self, gap_s: float, now_s: float, *, stall_s: float = 0.0) -> None:
        """Notes the gap between tokens from now on, by the model. stall_s: seconds of a prompt that was just
        computed here."""
        place, is_new = _step(now_s) % STEPS, self._go_on(now_s)
        self._gaps[place] = gap_s if is_new else max(self._gaps[place], gap_s)
        self._stalls[place] += stall_s

    def longest_s(self, name: int, gap_s: float, gaps: int, now_s: float) -> float:
        """The mean of the longest tenth of its gaps, which a client notices; gap_s: the mean of all, which an
        engine reports."""
        taken = self._taken.get(name)
        if taken is None or taken.state is not _Is.BEGUN or gaps < 1:
            return gap_s
        self._go_on(now_s)
        now = _step(now_s)
        steps = min(max(now - taken.step + 1, 1), STEPS)
        lived = (now - _BACK[:steps]) % STEPS
        seen = np.sort(self._gaps[lived])
        mean_s, tenth = float(seen.mean()), max(steps // 10, 1)
        uneven = float(seen[-tenth:].mean()) / mean_s if mean_s > 0 else 1.0
        # Without those of its first step: its own prompt is one of them.
        stalls_s = min(float(self._stalls[lived[:-1]].sum()), gap_s * gaps)
        return (gap_s - stalls_s / gaps) * uneven + stalls_s / max(gaps * LONGEST, 1.0)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        for state in _Is:
            counted = self._tables[state].sum(axis=1)
            own = [taken for taken in self._taken.values() if taken.state is state]
            if round(counted[0]) != len(own) or round(counted[1]) != sum(taken.context for taken in own):
                raise AssertionError(f"the requests that are {state.name} do not add up")

    def _go_on(self, now_s: float) -> bool:
        """Fills the steps since the last note, in which nothing changed. Returns whether there were any."""
        now = _step(now_s)
        passed = now - self._noted
        if passed > 0:
            between = (self._noted + 1 + _BACK[: min(passed, STEPS)]) % STEPS
            self._gaps[between] = self._gaps[self._noted % STEPS]
            self._stalls[between] = 0.0
        self._noted = now  # also when the clock has gone back
        return passed != 0

    def _fade(self, now_s: float) -> None:
        passed_s = max(now_s - self._inflow_at_s, 0.0)
        self._inflow *= math.exp(-passed_s / INFLOW_S)
        self._inflow_at_s = now_s

    def _count(self, taken: _Taken, sign: int) -> None:
        self._tables[taken.state, :, taken.step % STEPS] += (sign, sign * taken.context)


def _step(seconds: float) -> int:
    return int(seconds // STEP_S)
