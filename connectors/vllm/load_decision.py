"""How much of a prefix that the pool has is worth loading: a load that is predicted to take longer than
computing the same tokens is not made.

    seconds of a load of k blocks  = loads before it + notice + sum over blocks of bytes / rate of their tier,
                                     which is that of loads of about as many bytes
    seconds of computing them      = k * tokens of a block / prefill rate

The rates are measured while the engine serves: those of loads by each rank, the prefill rate by the steps.
Without enough measurements of a rate everything is loaded, which is how rates are measured.

A rate that was measured wrong must not confirm itself: a declined load measures nothing, and neither does a
prompt of which all is loaded. So one of PROBE_EVERY hits that are declined is loaded, and of as many that are
loaded while no step measures the prefill rate, one has its last PROBE_TOKENS computed. Such a probe that
differs from its rate by more than CONTRADICTS times replaces all older measurements, and the next one comes
sooner, until one agrees. Nothing here knows a clock but the one it is given, and nothing waits.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.connectors.vllm.messages import LoadTime

LOADS_MIN, LOADS_MAX = 5, 9  # measurements of a tier: with fewer it has no rate; older ones are forgotten
STEPS_MIN, STEPS_MAX = 5, 33  # the same of the prefill rate
STEP_TOKENS_MIN = 64  # a step of fewer prompt tokens says little: its fixed costs are most of it
SMALLER_MAX = 1  # powers of 4: how much smaller the loads may be whose rate is taken for that of a load
MARGIN = 1.25  # a load is declined when it is predicted to take this many times as long as computing
PROBE_EVERY, PROBE_S = 16, 10.0  # one of so many hits is a probe, and at most one in so many seconds
PROBE_SOON = 4  # the same after a probe that contradicted, whatever the time
CONTRADICTS = 3.0
PROBE_TOKENS = 256
BOTH_TOKENS_MIN = 512  # of a hit: a shorter one has no chunks between which anything is decided
BOTH_GAIN = 1.15  # both is done when it is predicted to be so many times as fast as the better of the two
DOUBT = 10.0  # the prefill rate is probed where one that is so much higher would decline the load


@dataclass(frozen=True, slots=True)
class Shares:
    """Of each block of a prefix the share of its bytes that comes from memory of this host, and from another
    host. Their sum is 1, or less where a sliding window needs not all of a block."""

    memory: npt.NDArray[np.float64]
    network: npt.NDArray[np.float64]


# Why a hit was decided as it was.
UNMEASURED = "unmeasured"  # a rate lacks measurements, so all is loaded
FASTER = "load_faster"
PARTLY = "load_partly"  # up to where a tier that is too slow begins
SLOWER = "load_slower"
BOTH = "both"  # the front is computed while the back is loaded (meetings.py)
PROBE_LOAD, PROBE_PREFILL = "probe_load", "probe_prefill"
ALWAYS = "always_load"  # compute_if_faster is false
REASONS = (UNMEASURED, FASTER, PARTLY, SLOWER, BOTH, PROBE_LOAD, PROBE_PREFILL, ALWAYS)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided of one hit.

    blocks: how many leading blocks are to be loaded; of BOTH how many of the last ones are predicted to be.
    reason: one of REASONS.
    load_s, compute_s: predicted seconds of loading all of the hit, and of computing it; 0: not measured.
    both_s: predicted seconds until front and back meet; 0: not considered.
    """

    blocks: int
    reason: str
    load_s: float = 0.0
    compute_s: float = 0.0
    both_s: float = 0.0

    def plain(self) -> dict[str, str | int | float]:
        """For an answer."""
        plain: dict[str, str | int | float] = {
            "reason": self.reason,
            "blocks": self.blocks,
            "load_s": round(self.load_s, 6),
            "compute_s": round(self.compute_s, 6),
        }
        if self.both_s:
            plain["both_s"] = round(self.both_s, 6)
        return plain


@dataclass(slots=True)
class Pace:
    """How fast the front and the back of a hit come to each other: seconds of computing a block, and of
    loading one, which each step and each load correct."""

    compute_s: float
    load_s: float

    @property
    def ratio(self) -> float:
        """Blocks that are loaded in the time in which one is computed."""
        return self.compute_s / self.load_s

    def computed(self, blocks: float, seconds: float) -> None:
        """A step computed so many blocks in so many seconds."""
        if blocks > 0 and seconds > 0:
            self.compute_s = (self.compute_s + seconds / blocks) / 2

    def loaded(self, blocks: int, seconds: float) -> None:
        """A load of so many blocks took so many seconds."""
        if blocks and seconds > 0:
            self.load_s = (self.load_s + seconds / blocks) / 2


class Rate:
    """A rate by its latest measurements: their median, where each counts by its amount."""

    def __init__(self, least: int, most: int) -> None:
        """least: measurements without which there is no rate.
        most: measurements that are kept.
        """
        self._least = least
        self._latest: deque[tuple[float, float]] = deque(maxlen=most)  # (amount per second, amount)
        self.per_second: float | None = None

    def add(self, amount: float, seconds: float, *, done: float | None = None) -> None:
        """An amount took so many seconds. When the latest ``least`` measurements together contradict all of
        them, the older ones are forgotten.

        done: how much of the amount was done; None: all.
        """
        if amount <= 0 or seconds <= 0:
            return
        rate = max((amount if done is None else done) / seconds, 1.0)
        self._latest.append((rate, amount))
        if len(self._latest) < self._least:
            return
        latest = list(self._latest)[-self._least :]
        if _contradicts(self._median(latest), self._median(self._latest)):
            self._latest.clear()
            self._latest.extend(latest)
        self.per_second = self._median(self._latest)

    def restart(self, amount: float, seconds: float) -> None:
        """Forgets everything but this one measurement, which is the rate from here on."""
        self._latest.clear()
        self._least = 1
        self.add(amount, seconds)

    @staticmethod
    def _median(measured: Iterable[tuple[float, float]]) -> float:
        rates, amounts = zip(*sorted(measured), strict=True)
        seen = list(itertools.accumulate(amounts))
        return float(rates[bisect.bisect_left(seen, seen[-1] / 2)])


class Tier:
    """The rate of loads from one tier. Measured by size, since a small load takes as long as its fixed costs:
    its rate says nothing about a large one."""

    def __init__(self) -> None:
        self._by_size: dict[int, Rate] = {}

    def add(self, size: int, seconds: float, *, done: int | None = None) -> None:
        """A load of ``size`` bytes took so many seconds; see Rate.add."""
        rate = self._by_size.setdefault(_power_of_4(size), Rate(LOADS_MIN, LOADS_MAX))
        rate.add(size, seconds, done=done)

    def restart(self, size: int, seconds: float) -> None:
        """Forgets everything but this load."""
        self._by_size = {_power_of_4(size): Rate(1, LOADS_MAX)}
        self.add(size, seconds)

    def per_second(self, size: float) -> float | None:
        """Bytes per second of loads about as large, else of larger ones; None: not measured."""
        wanted = _power_of_4(int(size))
        measured = [
            (abs(power - wanted), rate.per_second)
            for power, rate in self._by_size.items()
            if power >= wanted - SMALLER_MAX and rate.per_second is not None
        ]
        return min(measured)[1] if measured else None


def _power_of_4(size: int) -> int:
    return size.bit_length() // 2


def _contradicts(measured: float, rate: float) -> bool:
    return not rate / CONTRADICTS <= measured <= rate * CONTRADICTS


class Probes:
    """When a hit of one kind is decided the other way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hits = 0
        self._last_s = -PROBE_S
        self._soon = False

    def is_due(self) -> bool:
        """Counts a hit. Whether it is a probe."""
        self._hits += 1
        now_s = self._clock()
        if self._hits < (PROBE_SOON if self._soon else PROBE_EVERY):
            return False
        if not self._soon and now_s - self._last_s < PROBE_S:
            return False
        self._hits, self._last_s = 0, now_s
        return True

    def ended(self, *, contradicts: bool) -> None:
        """A probe was measured."""
        self._hits, self._soon = 0, contradicts

    def measured(self) -> None:
        """What the probes are for was measured without one."""
        self._hits = 0


class LoadDecision:
    """The decision of one engine; all methods run on the scheduler's thread."""

    def __init__(self, block_tokens: int, clock: Callable[[], float]) -> None:
        """block_tokens: tokens of a block.
        clock: seconds, monotonic.
        """
        self._block_tokens = block_tokens
        self._clock = clock
        self._memory, self._network = Tier(), Tier()  # bytes per second of one rank
        self._prefill = Rate(STEPS_MIN, STEPS_MAX)  # tokens per second of the engine
        self._notice_s: deque[float] = deque(maxlen=LOADS_MAX)
        self._loading_until_s = 0.0
        self._load_probes, self._prefill_probes = Probes(clock), Probes(clock)
        self._prefill_probed = False  # the next step measures a probe
        self.block_bytes = 0  # of the rank that holds most of a block

    # What was measured

    def step_took(self, prompt_tokens: int, seconds: float) -> bool:
        """A step computed so many tokens of prompts. Returns whether that counts as a measurement."""
        if prompt_tokens < STEP_TOKENS_MIN or seconds <= 0:
            return False
        rate, probed = self._prefill.per_second, self._prefill_probed
        # A step of few tokens is slow by its fixed costs: only one that is fast says something.
        contradicts = probed and rate is not None and prompt_tokens / seconds > rate * CONTRADICTS
        if contradicts:
            self._prefill.restart(prompt_tokens, seconds)
        else:
            self._prefill.add(prompt_tokens, seconds)
        if probed:
            self._prefill_probes.ended(contradicts=contradicts)
        self._prefill_probed = False
        self._prefill_probes.measured()
        return True

    def load_took(self, load: LoadTime, *, probe: bool = False, piece: bool = False) -> None:
        """A rank's load ended. Bytes that failed count when they took longer than a load that succeeds: an
        error at once costs nothing.

        probe: whether it was made as a probe.
        piece: whether it was a part of a hit of which the rest was computed: no probe is needed then.
        """
        if piece:
            self._load_probes.measured()
        if load.notice_s is not None:
            self._notice_s.append(load.notice_s)
        done = load.memory_bytes + load.network_bytes
        asked = done + load.failed_bytes
        slowest = self._network if load.from_network else self._memory
        if load.failed_bytes:
            rate = slowest.per_second(asked)
            if rate is not None and asked / rate < load.seconds:
                slowest.add(asked, load.seconds, done=done)
            return
        if not load.network_bytes:
            self._measured(self._memory, done, load.seconds, probe=probe)
            return
        # One load, one time: the network's share is what memory does not explain, and at least its part.
        memory = self._memory.per_second(load.memory_bytes)
        explained_s = load.memory_bytes / memory if memory else 0.0
        seconds = max(load.seconds - explained_s, load.seconds * load.network_bytes / done)
        self._measured(self._network, load.network_bytes, seconds, probe=probe)

    def _measured(self, tier: Tier, size: int, seconds: float, *, probe: bool) -> None:
        rate = tier.per_second(size)
        contradicts = rate is not None and size > 0 and seconds > 0 and _contradicts(size / seconds, rate)
        if probe and contradicts:
            tier.restart(size, seconds)
        else:
            tier.add(size, seconds)
        if probe:
            self._load_probes.ended(contradicts=contradicts)

    # What is decided

    def choose(self, shares: Shares, *, whole: bool = False) -> Choice:
        """How many leading blocks of a found prefix are to be loaded, and why.

        shares: of the prefix.
        whole: whether a part of the prefix is of no use.
        """
        everything = len(shares.network)
        if self._prefill.per_second is None or not everything:
            return Choice(everything, UNMEASURED)
        saved_s = np.arange(1, everything + 1) * (self._block_tokens / self._prefill.per_second)
        block_s = self._block_s(shares)
        loads_s = self._notice() + self._waiting_s() + np.cumsum(block_s)
        load_s, compute_s = float(loads_s[-1]), float(saved_s[-1])
        gains = MARGIN * saved_s - loads_s
        best = everything - 1 if whole else int(np.argmax(gains))
        blocks = best + 1 if gains[best] > 0 else 0
        if blocks < everything:
            if self._load_probes.is_due():
                return Choice(everything, PROBE_LOAD, load_s, compute_s)
            return Choice(blocks, PARTLY if blocks else SLOWER, load_s, compute_s)
        if not block_s[shares.memory + shares.network > 0].all():
            return Choice(everything, UNMEASURED, load_s, compute_s)
        if not whole and load_s * DOUBT > MARGIN * compute_s and self._prefill_probes.is_due():
            self._prefill_probed = True
            computed = -(-PROBE_TOKENS // self._block_tokens)
            return Choice(max(everything - computed, 0), PROBE_PREFILL, load_s, compute_s)
        return Choice(everything, FASTER, load_s, compute_s)

    def meet(self, shares: Shares, choice: Choice) -> tuple[Choice, Pace | None]:
        """The choice again, or BOTH where computing the front while the back is loaded is predicted to be
        faster than what was chosen, and the pace at which it begins."""
        rate, everything = self._prefill.per_second, len(shares.network)
        if rate is None or choice.reason not in {FASTER, PARTLY, SLOWER}:
            return choice, None
        if everything * self._block_tokens < BOTH_TOKENS_MIN:
            return choice, None
        block_s, computed_s = self._block_s(shares), self._block_tokens / rate
        fronts_s = np.arange(1, everything) * computed_s
        backs_s = self._notice() + self._waiting_s() + np.cumsum(block_s[::-1])[::-1][1:]
        boths_s = np.maximum(fronts_s, backs_s)
        front = int(np.argmin(boths_s)) + 1
        back_s, both_s = float(block_s[front:].sum()), float(boths_s[front - 1])
        if back_s <= 0 or both_s * BOTH_GAIN > min(choice.load_s, choice.compute_s):
            return choice, None
        met = Choice(everything - front, BOTH, choice.load_s, choice.compute_s, both_s)
        return met, Pace(computed_s, back_s / (everything - front))

    def compute_s(self, tokens: int) -> float:
        """Predicted seconds of computing so many tokens; infinity: not measured."""
        rate = self._prefill.per_second
        return math.inf if rate is None else tokens / rate

    def load_begins(self, shares: Shares) -> None:
        """These blocks are being loaded from now on, behind the loads under way."""
        self._loading_until_s = self._clock() + self._waiting_s() + float(self._block_s(shares).sum())

    def loads_ended(self) -> None:
        """No load is under way."""
        self._loading_until_s = 0.0

    def _block_s(self, shares: Shares) -> npt.NDArray[np.float64]:
        """Predicted seconds of each block; a tier without a rate costs none."""
        memory = self._memory.per_second(self.block_bytes * float(shares.memory.sum()))
        remote = self._network.per_second(self.block_bytes * float(shares.network.sum()))
        memory_s = self.block_bytes / memory if memory else 0.0
        remote_s = self.block_bytes / remote if remote else 0.0
        return shares.memory * memory_s + shares.network * remote_s

    def _waiting_s(self) -> float:
        """Predicted seconds until the loads under way have ended."""
        return max(self._loading_until_s - self._clock(), 0.0)

    def _notice(self) -> float:
        """Seconds from the end of a load until the engine has seen it, at the end of a step."""
        return statistics.median(self._notice_s) if len(self._notice_s) >= LOADS_MIN else 0.0
