"""The demand, and the length of prompt up to which decode can serve all of it: the price of a place.

When demand exceeds what decode can take, a request is refused, and a long prompt takes the room of several
short ones. Admission that accepts every request that fits at its arrival serves few. This module computes,
from the arrivals of the last minute, which requests can be served if the shortest go first; the others exceed
capacity (a bid price: Talluri and van Ryzin, "An analysis of bid-price controls for network revenue
management", Management Science 44, 1998). The number of requests at one time is their arrival rate x their
time (Little's law). Pure, and of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from moonpool.disagg_proxy.conductor.answer_lengths import AnswerLengthStats
from moonpool.disagg_proxy.conductor.arrival_rate import OVER_S, YOUNG_S
from moonpool.disagg_proxy.conductor.worker import Worker, answering

PER_OCTAVE = 16  # classes of lengths: within one, all requests count as equally long
CLASSES = 24 * PER_OCTAVE
EVERY_S = 1.0  # the length is an average over a minute


class Capacity(IntEnum):
    """How many of the requests of this length decode can take, when shorter ones go first.

    FITS: all. MARGINAL: some. EXCEEDS: none.
    """

    FITS = 0
    MARGINAL = 1
    EXCEEDS = 2


class Demand:
    """The demand of requests that may decode at the same workers. Not thread safe."""

    def __init__(self) -> None:
        self._came = np.zeros((2, CLASSES))  # requests and tokens of each class, faded
        self._to_s = math.nan
        self._age_s = 0.0
        self._looked_s = -math.inf
        self._longest = math.inf

    def add(self, tokens: int, now_s: float) -> None:
        """A request arrived, whether it is accepted or not. A clock that goes back counts as one that stands
        still."""
        passed_s = now_s - self._to_s
        if passed_s > 0:
            self._came *= math.exp(-passed_s / OVER_S)
            self._age_s += passed_s
        self._to_s = now_s
        self._came[:, _class(tokens)] += (1.0, tokens)

    def longest(
        self, workers: Sequence[Worker], gap_s: float, answers: AnswerLengthStats, now_s: float
    ) -> float:
        """The length of prompt, in tokens, below which all requests can decode at ``workers`` without a gap
        longer than ``gap_s``; of the last class below it only some. Infinity until it is known how long
        answers take."""
        if not answers.times.learnt:
            return math.inf
        if not 0.0 <= now_s - self._looked_s < EVERY_S:
            self._looked_s = now_s
            self._longest = self._look(workers, gap_s, answers, now_s)
        return self._longest

    def _look(
        self, workers: Sequence[Worker], gap_s: float, answers: AnswerLengthStats, now_s: float
    ) -> float:
        decoding = answering(workers)
        if not decoding:
            return math.inf
        age_s = max(self._age_s, YOUNG_S)
        over_s = OVER_S * -math.expm1(-age_s / OVER_S)
        share = answers.times.mean_s / over_s / len(decoding)
        requests, tokens = np.cumsum(self._came, axis=1) * share  # at one time, up to each class
        none, request, token = np.mean([_gaps(each, now_s) for each in decoding], axis=0)
        full = none + request * requests + token * tokens > gap_s
        room = min((each.room_tokens for each in decoding if each.room_tokens), default=math.inf)
        full |= tokens + requests * answers.tokens > room
        full &= requests > 0  # the shortest are accepted even where an empty worker is too slow
        # Includes the class in which decode becomes full: of that one it can take some.
        return 2.0 ** ((int(full.argmax()) + 1) / PER_OCTAVE) if full.any() else math.inf


def _gaps(worker: Worker, now_s: float) -> tuple[float, float, float]:
    """Seconds: the gap of an empty worker, and what each request and each token adds to it."""
    gap_s = worker.decode_model.predict
    none = gap_s(0, 0)
    return gap_s(0, 0, worker.load.stall_s(now_s)), gap_s(1, 0) - none, (gap_s(0, 1e6) - none) / 1e6


def _class(tokens: int) -> int:
    return min(int(math.log2(max(tokens, 1)) * PER_OCTAVE), CLASSES - 1)
