"""How a proxy hears of what engines do: at once and exactly, or late, at intervals, and with errors.

A report says when a prompt was computed, when an answer began and when it ended. A lag and an interval put
its delivery off; its times stay those of the event. Errors change the times: each stage lasted, by the
report, so many times what it really lasted.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.simulator.job import Job

TIMES_MIN = 0.05  # a stage lasts at least so much of its time, by its report


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """lag_s:    from an event to the delivery of its report, seconds.
    period_s: reports are delivered at multiples of so many seconds; 0: each by itself.
    noise:    standard deviation of the factor by which a stage's reported seconds differ, drawn for each.
    skew:     the seconds that one engine reports differ by one factor, drawn for it from 1/skew to skew.
    silent_from_s, silent_s: reports that were due in these seconds are delivered at their end.
    """

    lag_s: float = 0.0
    period_s: float = 0.0
    noise: float = 0.0
    skew: float = 1.0
    silent_from_s: float = 0.0
    silent_s: float = 0.0

    def __post_init__(self) -> None:
        seconds = (self.lag_s, self.period_s, self.silent_from_s, self.silent_s)
        if not all(0 <= each < math.inf for each in seconds):
            raise ConfigError("reports come after 0 seconds or more", operation="simulate")
        if not (0 <= self.noise <= 2 and 1 <= self.skew <= 100):
            raise ConfigError(
                "the noise of reports is from 0 to 2, their skew from 1 to 100", operation="simulate"
            )

    def delivery_s(self, now_s: float) -> float:
        """When a report of now is delivered."""
        at_s = now_s + self.lag_s
        if self.period_s:
            at_s = math.ceil(at_s / self.period_s) * self.period_s
        silent_to_s = self.silent_from_s + self.silent_s
        return silent_to_s if self.silent_from_s <= at_s < silent_to_s else at_s


PROMPT = ReportSettings()  # at once and exact


class Times(NamedTuple):
    """Seconds of the simulation; infinity: it has not happened."""

    computed_s: float
    first_s: float
    done_s: float


class Reporter:
    """The times of jobs as one proxy is told them. A job's times are the same in each of its reports."""

    def __init__(self, settings: ReportSettings, seed: int) -> None:
        self.settings = settings
        self._random = random.Random(seed)
        self._seed = seed
        self._told: dict[int, Times] = {}  # by the job's name, while it is under way
        self._skews: dict[int, float] = {}  # by place

    def times(self, job: Job) -> Times:
        """Of what has happened to the job by now."""
        if self.settings.noise == 0 and self.settings.skew == 1:
            return Times(job.computed_s, job.first_s, job.done_s)
        before = self._told.get(job.name, Times(math.inf, math.inf, math.inf))
        computed_s = self._after(
            before.computed_s, job.begun_s, job.begun_s, job.computed_s, job.prefill_place
        )
        first_s = self._after(before.first_s, computed_s, job.computed_s, job.first_s, job.decode_place)
        done_s = self._after(before.done_s, first_s, job.first_s, job.done_s, job.decode_place)
        self._told[job.name] = found = Times(computed_s, first_s, done_s)
        return found

    def forget(self, job: Job) -> None:
        """It has ended, or another attempt of it begins."""
        self._told.pop(job.name, None)

    def _after(self, told_s: float, from_s: float, began_s: float, ended_s: float, place: int) -> float:
        """The reported end of a stage. told_s: as it was reported before; from_s: the reported beginning."""
        if told_s < math.inf or ended_s == math.inf:
            return told_s
        noise = max(self._random.gauss(1.0, self.settings.noise), TIMES_MIN)
        return from_s + (ended_s - began_s) * noise * self._skew(place)

    def _skew(self, place: int) -> float:
        skew = self._skews.get(place)
        if skew is None:
            drawn = random.Random(f"{self._seed} {place}").uniform(-1, 1)
            skew = self._skews[place] = self.settings.skew**drawn
        return skew
