"""The outcomes of the requests of a replay, in a few bytes each, and their sums."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import NamedTuple

from moonpool.disagg_proxy.tools.replay.client import Ended, Outcome
from moonpool.disagg_proxy.tools.simulator.results import Slo, quantile


class Summary(NamedTuple):
    """Seconds are of the answered requests, from their sending; shares of all that ended by themselves.

    late_p99_s:  how much later than due requests were sent, because of the bound of those out at once.
    gap:         of a request, the mean between two tokens; gap_tail: the mean of its longest tenth.
    prompt_tokens, cached_tokens: of the answers that report both; reusable: of those, the share that caches
                 without end would have had.
    good:        share that was answered within the objective; good_per_s: of the time it took.
    """

    sent: int
    answered: int
    refused: int
    failed: int
    cut: int
    seconds: float
    late_p99_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    gap_mean_s: float
    gap_p50_s: float
    gap_p90_s: float
    gap_p99_s: float
    gap_tail_p90_s: float
    told: int
    prompt_tokens: int
    cached_tokens: int
    reusable: float
    answer_tokens: int
    good: float
    good_per_s: float

    @property
    def hits(self) -> float:
        """Share of the prompts' tokens that engines had cached; NaN where none reports it."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


class Results:
    """``add`` takes each request when it is over. Lists have one value for each answered request, in the
    order of their ends."""

    def __init__(self) -> None:
        self.ended: Counter[Ended] = Counter()
        self.refused: Counter[str] = Counter()  # by reason
        self.failed: Counter[str] = Counter()
        self.engines: Counter[str] = Counter()  # answers by engine, where a proxy reports it
        self.at_s = array("d")
        self.ttft_s = array("d")
        self.gap_s = array("d")
        self.gap_tail_s = array("d")
        self.refused_s = array("d")  # due times of refused and failed requests
        self.late_s = array("d")  # of all
        self.end_s = 0.0
        self._told = self._prompt = self._cached = self._reusable = self._answer = self._sent = 0

    def __len__(self) -> int:
        return len(self.late_s)

    def add(self, outcome: Outcome) -> None:
        """Counts one request. Not thread safe. A request that the end of the replay cut counts in ``ended``,
        ``late_s`` and ``end_s`` alone."""
        self.ended[outcome.ended] += 1
        self.late_s.append(max(outcome.sent_s - outcome.at_s, 0.0))
        self.end_s = max(self.end_s, outcome.end_s)
        if outcome.ended is not Ended.ANSWERED:
            if outcome.ended is not Ended.CUT:
                (self.refused if outcome.ended is Ended.REFUSED else self.failed)[outcome.why] += 1
                self.refused_s.append(outcome.at_s)
            return
        self.at_s.append(outcome.at_s)
        self.ttft_s.append(outcome.ttft_s)
        self.gap_s.append(outcome.mean_gap_s)
        self.gap_tail_s.append(outcome.tail_gap_s)
        if outcome.engine:
            self.engines[outcome.engine] += 1
        self._answer += max(outcome.answer_tokens, 0)
        self._sent += outcome.prompt_tokens if outcome.prompt_tokens > 0 else outcome.input_tokens
        if outcome.cached_tokens >= 0 and outcome.prompt_tokens > 0:
            self._told += 1
            self._prompt += outcome.prompt_tokens
            self._cached += outcome.cached_tokens
            self._reusable += outcome.reusable

    @property
    def prompt_tokens(self) -> int:
        """Of all answered requests: the engine's count, else what was sent."""
        return self._sent

    @property
    def progress(self) -> str:
        """The requests that have ended, by how they ended."""
        return ", ".join(f"{self.ended[ended]} {ended.value}" for ended in Ended if ended is not Ended.CUT)

    def good(self, slo: Slo) -> int:
        """How many were answered within the objective."""
        pairs = zip(self.ttft_s, self.gap_tail_s, strict=True)
        return sum(ttft_s <= slo.ttft_s and gap_s <= slo.gap_s for ttft_s, gap_s in pairs)

    def summary(self, slo: Slo) -> Summary:
        """Seconds, tokens and shares. Sorts all answered requests' times: at the end, not while requests are
        sent."""
        ttft_s, late_s, tail_s = sorted(self.ttft_s), sorted(self.late_s), sorted(self.gap_tail_s)
        gap_s = sorted(gap for gap in self.gap_s if gap > 0)
        whole = max(len(self) - self.ended[Ended.CUT], 1)
        good = self.good(slo)
        return Summary(
            sent=len(self),
            answered=self.ended[Ended.ANSWERED],
            refused=self.ended[Ended.REFUSED],
            failed=self.ended[Ended.FAILED],
            cut=self.ended[Ended.CUT],
            seconds=self.end_s,
            late_p99_s=quantile(late_s, 0.99),
            ttft_mean_s=mean(ttft_s),
            ttft_p50_s=quantile(ttft_s, 0.5),
            ttft_p90_s=quantile(ttft_s, 0.9),
            ttft_p99_s=quantile(ttft_s, 0.99),
            gap_mean_s=mean(gap_s),
            gap_p50_s=quantile(gap_s, 0.5),
            gap_p90_s=quantile(gap_s, 0.9),
            gap_p99_s=quantile(gap_s, 0.99),
            gap_tail_p90_s=quantile(tail_s, 0.9),
            told=self._told,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            reusable=self._reusable / self._prompt if self._prompt else math.nan,
            answer_tokens=self._answer,
            good=good / whole,
            good_per_s=good / self.end_s if self.end_s > 0 else 0.0,
        )


def mean(values: list[float]) -> float:
    """NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan
