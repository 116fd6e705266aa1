"""How much of a prefix that the pool has is worth loading: a load that is predicted to take longer than
computing the same tokens is not made.

    seconds of a load of k blocks  = loads before it + notice + sum over blocks of bytes / rate of their tier,
                                     which is that of loads of about as many bytes
    seconds of computing them      = k * tokens of a block / prefill rate

The rates are measured while the engine serves: those of loads by each rank, the prefill rate by the steps.
Without enough measurements of a rate everything is loaded, which is how rates are measured. A declined load
measures nothing, so one of PROBE_EVERY is made all the same. Nothing here knows a clock but the one it is
given, and nothing waits.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moonpool.connectors.vllm.messages import LoadTime

LOADS_MIN, LOADS_MAX = 5, 9  # measurements of a tier: with fewer it has no rate; older ones are forgotten
STEPS_MIN, STEPS_MAX = 5, 33  # the same of the prefill rate
STEP_TOKENS_MIN = 64  # a step of fewer prompt tokens says little: its fixed costs are most of it
SMALLER_MAX = 1  # powers of 4: how much smaller the loads may be whose rate is taken for that of a load
MARGIN = 1.25  # a load is declined when it is predicted to take this many times as long as computing
PROBE_EVERY, PROBE_S = 16, 10.0  # of so many declined loads one is made, and at most one in so many seconds

Shares = npt.NDArray[np.float64]


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
        """An amount took so many seconds.

        done: how much of the amount was done; None: all.
        """
        if amount <= 0 or seconds <= 0:
            return
        rate = max((amount if done is None else done) / seconds, 1.0)
        self._latest.append((rate, amount))
        if len(self._latest) >= self._least:
            self.per_second = self._median()

    def _median(self) -> float:
        rates, amounts = zip(*sorted(self._latest), strict=True)
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
        self._declined = 0
        self._probed_s = -PROBE_S
        self.block_bytes = 0  # of the rank that holds most of a block

    # What was measured

    def step_took(self, prompt_tokens: int, seconds: float) -> bool:
        """A step computed so many tokens of prompts. Returns whether that counts as a measurement."""
        counts = prompt_tokens >= STEP_TOKENS_MIN and seconds > 0
        if counts:
            self._prefill.add(prompt_tokens, seconds)
        return counts

    def load_took(self, load: LoadTime) -> None:
        """A rank's load ended. Bytes that failed count when they took longer than a load that succeeds: an
        error at once costs nothing."""
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
            self._memory.add(done, load.seconds)
            return
        # One load, one time: the network's share is what memory does not explain, and at least its part.
        memory = self._memory.per_second(load.memory_bytes)
        explained_s = load.memory_bytes / memory if memory else 0.0
        seconds = max(load.seconds - explained_s, load.seconds * load.network_bytes / done)
        self._network.add(load.network_bytes, seconds)

    # What is decided

    def blocks_worth_loading(self, network: Shares) -> int:
        """How many leading blocks of a found prefix are to be loaded.

        network: of each block the share that comes from another host.
        """
        if self._prefill.per_second is None or not len(network):
            return len(network)
        saved_s = np.arange(1, len(network) + 1) * (self._block_tokens / self._prefill.per_second)
        gains = MARGIN * saved_s - self._notice() - self._waiting_s() - np.cumsum(self._block_s(network))
        best = int(np.argmax(gains))
        blocks = best + 1 if gains[best] > 0 else 0
        if blocks < len(network) and self._is_probe():
            return len(network)
        return blocks

    def load_begins(self, network: Shares) -> None:
        """These blocks are being loaded from now on, behind the loads under way."""
        self._loading_until_s = self._clock() + self._waiting_s() + float(self._block_s(network).sum())

    def loads_ended(self) -> None:
        """No load is under way."""
        self._loading_until_s = 0.0

    def _block_s(self, network: Shares) -> Shares:
        """Predicted seconds of each block; a tier without a rate costs none."""
        size, remote_size = self.block_bytes * len(network), self.block_bytes * float(network.sum())
        memory, remote = self._memory.per_second(size - remote_size), self._network.per_second(remote_size)
        memory_s = self.block_bytes / memory if memory else 0.0
        remote_s = self.block_bytes / remote if remote else 0.0
        return memory_s + network * (remote_s - memory_s)

    def _waiting_s(self) -> float:
        """Predicted seconds until the loads under way have ended."""
        return max(self._loading_until_s - self._clock(), 0.0)

    def _notice(self) -> float:
        """Seconds from the end of a load until the engine has seen it, at the end of a step."""
        return statistics.median(self._notice_s) if len(self._notice_s) >= LOADS_MIN else 0.0

    def _is_probe(self) -> bool:
        """Counts a load that is to be declined. Whether it is made all the same, to measure it."""
        self._declined += 1
        now_s = self._clock()
        if self._declined < PROBE_EVERY or now_s - self._probed_s < PROBE_S:
            return False
        self._declined, self._probed_s = 0, now_s
        return True
