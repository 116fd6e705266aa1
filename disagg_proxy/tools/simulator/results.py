"""The outcomes of the requests of a simulation, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.sample import Sample

KEPT_MAX = 250_000


class Slo(NamedTuple):
    """Seconds to the first token, and the mean of the longest tenth of the gaps between tokens; infinity for
    what does not matter."""

    ttft_s: float = 30.0
    gap_s: float = math.inf

    @classmethod
    def of(cls, ttft_s: float, gap_s: float) -> Slo:
        """As options say it, 0 being any."""
        return cls(ttft_s or math.inf, gap_s or math.inf)

    @property
    def text(self) -> str:
        """For people: TTFT in seconds, the gap in milliseconds; what does not matter is left out."""
        parts = [f"TTFT <= {self.ttft_s:g} s"] if self.ttft_s < math.inf else []
        parts += [f"gap <= {self.gap_s * 1000:g} ms"] if self.gap_s < math.inf else []
        return ", ".join(parts) or "any time"


class Summary(NamedTuple):
    """good is of all requests, refused ones included; all else of those that were served.

    own, fetched:    share of the served prompts' tokens that came from the instance's own cache and from
                     others'.
    good:            share that was served within the objective.
    error_*_s:       so far off were the predictions of the first token, half, 90 % and 99 % of them at most;
    bias_s:          observed minus predicted, the mean. NaN without any prediction.
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
    error_p90_s: float
    error_p99_s: float
    bias_s: float

    @property
    def hits(self) -> float:
        """Share of the served prompts' tokens that some cache held."""
        return self.own + self.fetched

    @property
    def computed(self) -> float:
        """Share of the prompts' tokens that no cache held."""
        return 1 - self.hits


class Results:
    """``add`` takes each request when it is over. Counts and means are of all; quantiles, shares and curves
    of at most KEPT_MAX of them, drawn by chance, so that a million take no more memory than that.

    arrived_s, ttft_s, gap_s, predicted_s: one value for each request that was served and is kept.
    """

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._served = Sample(4, kept_max)
        self._refused = Sample(1, kept_max)
        self.arrived_s, self.ttft_s, self.gap_s, self.predicted_s = self._served.columns
        (self.refused_s,) = self._refused.columns  # arrivals of refused requests
        self.reasons: Counter[str] = Counter()
        self.last_s = 0.0  # the last arrival
        self._tokens = self._own = self._fetched = 0
        self._ttft_sum_s = self._gap_sum_s = 0.0

    def __len__(self) -> int:
        return self._served.count + self._refused.count

    @property
    def served(self) -> int:
        """Requests that were answered, also those of which no times are kept."""
        return self._served.count

    @property
    def refused(self) -> int:
        """Requests that were refused or given up, also those of which no times are kept."""
        return self._refused.count

    @property
    def ttft_mean_s(self) -> float:
        """NaN when no request was served."""
        return self._ttft_sum_s / (self.served or math.nan)

    @property
    def gap_mean_s(self) -> float:
        """NaN when no request was served."""
        return self._gap_sum_s / (self.served or math.nan)

    def add(self, job: Job) -> None:
        """Counts one request, refused or served. Costs O(1)."""
        arrival = job.arrival
        self.last_s = max(self.last_s, arrival.at_s)
        if job.why_not:
            self._refused.add((arrival.at_s,))
            self.reasons[job.why_not] += 1
            return
        self._served.add((arrival.at_s, job.ttft_s, job.gap_s, job.predicted_ttft_s))
        self._ttft_sum_s += job.ttft_s
        self._gap_sum_s += job.gap_s
        self._tokens += arrival.tokens
        self._own += job.own
        self._fetched += job.fetched

    def good(self, slo: Slo) -> int:
        """How many were served within the objective."""
        pairs = zip(self.ttft_s, self.gap_s, strict=True)
        kept = sum(ttft_s <= slo.ttft_s and gap_s <= slo.gap_s for ttft_s, gap_s in pairs)
        return round(kept * self.served / max(len(self.ttft_s), 1))

    def summary(self, slo: Slo) -> Summary:
        """Shares and quantiles are of the kept requests, counts and means of all. Sorts: O(n log n) of those
        kept.
        """
        ttft_s, gap_s = sorted(self.ttft_s), sorted(self.gap_s)
        off_s = [
            ttft - predicted
            for ttft, predicted in zip(self.ttft_s, self.predicted_s, strict=True)
            if predicted == predicted
        ]
        errors_s = sorted(map(abs, off_s))
        tokens = max(self._tokens, 1)
        return Summary(
            requests=len(self),
            refused=self.refused,
            ttft_mean_s=self.ttft_mean_s,
            ttft_p50_s=quantile(ttft_s, 0.5),
            ttft_p90_s=quantile(ttft_s, 0.9),
            ttft_p99_s=quantile(ttft_s, 0.99),
            gap_mean_s=self.gap_mean_s,
            gap_p90_s=quantile(gap_s, 0.9),
            own=self._own / tokens,
            fetched=self._fetched / tokens,
            good=self.good(slo) / max(len(self), 1),
            error_p50_s=quantile(errors_s, 0.5),
            error_p90_s=quantile(errors_s, 0.9),
            error_p99_s=quantile(errors_s, 0.99),
            bias_s=math.fsum(off_s) / len(off_s) if off_s else math.nan,
        )


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that this share of them does not exceed; NaN of none."""
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1] if ordered else math.nan
