"""The batch of a mock engine: requests wait, prefill in chunks, decode together, step by step.

Pure: ``begin_step`` says how long a step takes, ``end_step`` what it made. The order is that of vLLM: decodes
first, then prefills in the order of arrival, as far as the step's token budget goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from moonpool.disagg_proxy.tools.mock_engine.blocks import Blocks
from moonpool.disagg_proxy.tools.mock_engine.settings import Timing


class State(Enum):
    """Of a job: WAITING -> (FETCHING ->) PREFILL -> DECODE -> OVER; ``abort`` goes to OVER from any state."""

    WAITING = auto()
    FETCHING = auto()  # its blocks come from a prefill engine
    PREFILL = auto()
    DECODE = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class Job:
    """One request in the batch. computed: tokens of the prompt that are in the cache; made: tokens of the
    answer so far; cached: tokens that the prefix cache held; fetched: tokens that came from a prefill engine.
    """

    name: str
    tokens: int
    digests: Sequence[bytes]
    answer_tokens: int
    fetches: bool = False
    state: State = State.WAITING
    computed: int = 0
    made: int = 0
    cached: int = 0
    fetched: int = 0
    chunk: int = 0


class Batch:
    """budget: tokens of a step; requests_max: the most that run at one time."""

    def __init__(
        self,
        blocks: Blocks,
        timing: Timing,
        *,
        block_tokens: int,
        budget: int = 8192,
        requests_max: int = 256,
    ) -> None:
        self._blocks = blocks
        self._timing = timing
        self._block_tokens = block_tokens
        self._budget = budget
        self._requests_max = requests_max
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    def blocks_of(self, job: Job) -> int:
        """Blocks for the whole prompt and the whole answer, which a job reserves before it runs."""
        return -(-(job.tokens + job.answer_tokens) // self._block_tokens)

    def fits(self, job: Job) -> bool:
        """Whether all blocks together are enough for it."""
        return self.blocks_of(job) <= self._blocks.count

    def submit(self, job: Job) -> None:
        """Puts a WAITING job at the end of the queue. The queue has no maximum; the caller has checked
        ``fits``."""
        self.waiting.append(job)

    def fetched(self, job: Job, tokens: int) -> None:
        """The blocks of a fetching job have arrived; 0 tokens: they have not, and the job computes them."""
        if job.state is State.FETCHING:
            job.fetched = max(0, min(tokens, job.tokens) - job.cached)
            job.computed = min(job.cached + job.fetched, job.tokens - 1)
            job.state = State.PREFILL

    def abort(self, job: Job) -> None:
        """Ends it in any state. Its blocks are freed, unless a lease has taken them over."""
        if job.state is State.OVER:
            return
        if job.state is State.WAITING:
            self.waiting.remove(job)
        else:
            self.running.remove(job)
        job.state = State.OVER
        self._blocks.free(job)

    def admit(self) -> list[Job]:
        """Starts waiting jobs, in order, while there is room. Returns those whose blocks must be fetched."""
        fetching = []
        while self.waiting and len(self.running) < self._requests_max:
            job = self.waiting[0]
            hit = self._blocks.take(job, job.digests, self.blocks_of(job))
            if hit is None:
                break
            self.waiting.popleft()
            self.running.append(job)
            job.cached = min(hit * self._block_tokens, job.tokens - 1)
            job.computed = job.cached
            job.state = State.PREFILL
            if job.fetches:
                job.state = State.FETCHING
                fetching.append(job)
        return fetching

    def begin_step(self) -> float | None:
        """Plans a step. Returns its seconds; None when there is nothing to do."""
        budget, seconds = self._budget, self._timing.step_s
        works = False
        for job in self.running:
            job.chunk = 0
            if job.state is State.DECODE:
                budget -= 1
                works = True
                seconds += self._timing.gap_s_per_request
        for job in self.running:
            if job.state is State.PREFILL and budget > 0:
                job.chunk = min(budget, job.tokens - job.computed)
                budget -= job.chunk
                seconds += self._timing.chunk_s(job.computed, job.chunk)
                works = True
        return seconds if works else None

    def end_step(self) -> list[tuple[Job, int]]:
        """Carries the step out. Returns the jobs that made tokens, and how many."""
        made = []
        for job in self.running:
            if job.state is State.PREFILL and job.chunk:
                job.computed += job.chunk
                self._blocks.publish(job, job.digests[: job.computed // self._block_tokens])
                if job.computed < job.tokens:
                    continue
                job.state = State.DECODE
            elif job.state is not State.DECODE:
                continue
            count = job.answer_tokens - job.made if self._timing.is_instant else 1
            job.made += count
            made.append((job, count))
        return made

    def finish(self, job: Job, heir: object | None = None) -> None:
        """An answer is complete. heir: the holder of its blocks from now on; None: none."""
        if job.state is State.OVER:
            return
        self.running.remove(job)
        job.state = State.OVER
        if heir is None:
            self._blocks.free(job)
        else:
            self._blocks.hand(job, heir)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if any(job.state is not State.WAITING for job in self.waiting):
            raise AssertionError("a job that does not wait is in the queue")
        if any(job.state in (State.WAITING, State.OVER) for job in self.running):
            raise AssertionError("a job that does not run is in the batch")
        if any(not 0 <= job.computed <= job.tokens for job in self.running):
            raise AssertionError("a job has computed more than its prompt")
        self._blocks.check_integrity()
