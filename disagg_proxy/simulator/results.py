"""What became of the requests of a simulation, in a few bytes each."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import NamedTuple

from moonpool.disagg_proxy.simulator.job import Job


class Slo(NamedTuple):
    """Seconds to the first token, and the mean of the longest tenth of the gaps between tokens."""

    ttft_s: float = 30.0
    gap_s: float = math.inf


class Summary(NamedTuple):
    """Shares are of all requests, refused ones included; seconds are of those that were served.

    own, fetched:    share of the prompts' tokens that was reused.
    good:            share that was served within the objective.
    error_p50_s:     half of the predictions of the first token were at most so far off; NaN without any.
    """

    requests: int
    refused: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    gap_mean_s: float
    gap_p90_s: float
    own: float
    fetched: float
    good: float
    error_p50_s: float

    @property
    def hits(self) -> float:
        return self.own + self.fetched


class Results:
    """``add`` takes each request when it is over. arrived_s, ttft_s, gap_s, predicted_s: one value for each
    request that was served, in the order of their ends."""

    def __init__(self) -> None:
        self.arrived_s = array("d")
        self.ttft_s = array("d")
        self.gap_s = array("d")
        self.predicted_s = array("d")
        self.refused_s = array("d")  # when those came that were refused
        self.reasons: Counter[str] = Counter()
        self._tokens = self._own = self._fetched = 0

    def __len__(self) -> int:
        return len(self.ttft_s) + len(self.refused_s)

    def add(self, job: Job) -> None:
        arrival = job.arrival
        if job.why_not:
            self.refused_s.append(arrival.at_s)
            self.reasons[job.why_not] += 1
            return
        self.arrived_s.append(arrival.at_s)
        self.ttft_s.append(job.ttft_s)
        self.gap_s.append(job.gap_s)
        self.predicted_s.append(job.predicted_ttft_s)
        self._tokens += arrival.tokens
        self._own += job.own
        self._fetched += job.fetched

    def good(self, slo: Slo) -> int:
        """How many were served within it."""
        pairs = zip(self.ttft_s, self.gap_s, strict=True)
        return sum(ttft_s <= slo.ttft_s and gap_s <= slo.gap_s for ttft_s, gap_s in pairs)

    def summary(self, slo: Slo) -> Summary:
        ttft_s, gap_s = sorted(self.ttft_s), sorted(self.gap_s)
        errors_s = sorted(
            abs(ttft - predicted)
            for ttft, predicted in zip(self.ttft_s, self.predicted_s, strict=True)
            if predicted == predicted
        )
        tokens = max(self._tokens, 1)
        return Summary(
            requests=len(self),
            refused=len(self.refused_s),
            ttft_mean_s=_mean(ttft_s),
            ttft_p50_s=quantile(ttft_s, 0.5),
            ttft_p90_s=quantile(ttft_s, 0.9),
            ttft_p99_s=quantile(ttft_s, 0.99),
            gap_mean_s=_mean(gap_s),
            gap_p90_s=quantile(gap_s, 0.9),
            own=self._own / tokens,
            fetched=self._fetched / tokens,
            good=self.good(slo) / max(len(self), 1),
            error_p50_s=quantile(errors_s, 0.5),
        )


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that this share of them does not exceed; NaN of none."""
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1] if ordered else math.nan


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
