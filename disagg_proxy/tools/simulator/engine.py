"""Simulated instances: one that computes prompts for others, and one that decodes and may compute prompts,
too.

All keep the order of arrival, as engines do by default. They report to ``Outcomes``; the caches are the
cluster's.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol

from moonpool.disagg_proxy.tools.simulator.cache import Caches
from moonpool.disagg_proxy.tools.simulator.decoding import Decoding
from moonpool.disagg_proxy.tools.simulator.events import Events
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.machine import Machine
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS


class Outcomes(Protocol):
    """What engines call when something has happened to a request, at the current time of the simulation."""

    def next(self, job: Job) -> None:
        """It is the next whose prompt is computed: what other caches hold of it is fetched, until
        ``job.ready_s``."""

    def computed(self, job: Job) -> None:
        """Its prompt is computed, for another instance."""

    def began(self, job: Job) -> None:
        """Its first token is there."""

    def ended(self, job: Job) -> None:
        """Its last token is there."""


class Surroundings(NamedTuple):
    """What the engines of a cluster share."""

    machine: Machine
    events: Events
    caches: Caches
    outcomes: Outcomes


class _Engine:
    """The common part. dead: the instance has stopped. busy_s: seconds in which it computed prompts."""

    def __init__(self, place: int, surroundings: Surroundings) -> None:
        self.place = place
        self._machine, self._events, self._caches, self._outcomes = surroundings
        self._usual = self._machine
        self._line: deque[Job] = deque()
        self.dead = False
        self.busy_s = 0.0

    def slow(self, times: float) -> None:
        """What it begins from now on takes so many times as long as on its machine."""
        self._machine = self._usual.faster(1 / times)

    def _begin_prompt(self, job: Job) -> None:
        """Only blocks that are still here are reused: some may have been evicted since they were fetched."""
        job.begun_s = self._events.now_s
        held = self._caches.length(self.place, job.blocks) * BLOCK_TOKENS
        job.fetched = min(job.fetched, max(held - job.own, 0))
        job.own = held - job.fetched
        job.left = job.arrival.tokens - held

    def _end_prompt(self, job: Job) -> None:
        job.computed_s = self._events.now_s
        self._caches.keep(self.place, job.blocks, self._events.now_s)


class PrefillEngine(_Engine):
    """width: nodes that compute a prompt together, chunk after chunk through a pipeline of stages (chunked
    pipeline parallelism, Mooncake, FAST '25): so many chunks of this prompt, or of the next one, are computed
    at one time. A chunk takes 1/width of its time in each stage, after the chunk before it.
    """

    def __init__(self, place: int, surroundings: Surroundings, *, width: int, chunk_tokens: int) -> None:
        super().__init__(place, surroundings)
        self._free_s = [0.0] * width  # by stage: the time at which its chunks are done
        self._chunk_tokens = chunk_tokens if width > 1 else 1 << 31  # a single stage gains nothing by chunks
        self._busy = False

    def submit(self, job: Job) -> None:
        """Puts it at the end of the queue. ``Outcomes.next`` is called as soon as it is the first."""
        self._line.append(job)
        if len(self._line) == 1:
            self._outcomes.next(job)
        self._start()

    def _start(self) -> None:
        if self._busy or not self._line or self.dead:
            return
        self._busy = True
        job = self._line[0]
        if job.ready_s > self._events.now_s:
            self._events.at(job.ready_s, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        if self.dead:
            return
        job = self._line.popleft()
        self._begin_prompt(job)
        self._events.at(self._send_through(job), lambda: self._end(job))
        self._events.at(self._free_s[0], self._free)
        if self._line:
            self._outcomes.next(self._line[0])

    def _send_through(self, job: Job) -> float:
        """Returns the time at which its last chunk has left the last stage."""
        tokens, step = job.arrival.tokens, self._chunk_tokens
        reused = tokens - job.left
        before_s = at_s = 0.0
        for end in (*range(reused + step, tokens, step), tokens):
            until_s = self._machine.compute_s(end, reused)
            held_s = (until_s - before_s) / len(self._free_s)
            before_s = until_s
            self.busy_s += held_s
            at_s = self._events.now_s
            for stage, free_s in enumerate(self._free_s):
                at_s = self._free_s[stage] = max(at_s, free_s) + held_s
        return at_s

    def _end(self, job: Job) -> None:
        if self.dead:
            return
        self._end_prompt(job)
        self._outcomes.computed(job)

    def _free(self) -> None:
        self._busy = False
        self._start()


class WholeEngine(_Engine):
    """Decodes requests whose prompts it or another instance computed. chunk_tokens 0: a prompt is computed
    whole, and running requests get no token meanwhile; otherwise a step is of at most so many tokens, one of
    each running request and what then fits of the prompts, in the order of arrival (vLLM's chunked prefill).
    A request that does not fit waits for room, and all requests behind it.
    """

    def __init__(self, place: int, surroundings: Surroundings, *, chunk_tokens: int) -> None:
        super().__init__(place, surroundings)
        self._chunk_tokens = chunk_tokens
        self._decoding = Decoding(self._machine)
        self._jobs: dict[int, Job] = {}
        self._room = self._machine.room_tokens
        self._version = 0
        self._partial: Job | None = None  # whose prompt is computed to a part
        self._in_step: list[Job] = []  # whose prompts are in the step that runs

    def slow(self, times: float) -> None:
        """Steps of those that decode, too, from the next event on."""
        super().slow(times)
        self._decoding.advance(self._events.now_s)
        self._decoding.machine = self._machine
        if not self._in_step:
            self._go_on()  # the next end comes at another time

    def gap_s(self, now_s: float) -> float:
        """Seconds between two tokens of the requests that decode now; 0 without any."""
        return self._decoding.current_gap_s(now_s)

    def submit(self, job: Job) -> None:
        """A request whose prompt is to be computed, or whose KV has arrived."""
        self._line.append(job)
        if len(self._line) == 1 and job.computed_s == math.inf:
            self._outcomes.next(job)
        if not self._in_step:
            self._go_on()

    def _go_on(self) -> None:
        """Starts the next step with prompts, or decodes until the next request ends."""
        if self.dead:
            return
        self._version += 1  # wake-ups that were planned before are void
        version = self._version
        now_s = self._events.now_s
        self._leave()
        if self._start_step():
            return
        wake_s = self._decoding.next_s()
        if self._line and self._line[0].ready_s > now_s:
            wake_s = min(wake_s, self._line[0].ready_s)
        if wake_s < math.inf:
            self._events.at(wake_s, lambda: self._go_on() if version == self._version else None)

    def _start_step(self) -> bool:
        """Whether a prompt may be computed now."""
        chunks: list[tuple[int, int]] = []
        loading_s = 0.0
        while (left := self._left(chunks)) > 0:
            job = self._partial or self._next()
            if job is None:
                break
            if job is not self._partial:
                loading_s += self._machine.reuse_token_s * (job.own + job.fetched)
            begin, tokens = job.arrival.tokens - job.left, min(job.left, left)
            chunks.append((begin, begin + tokens))
            job.left -= tokens
            self._partial = job if job.left else None
            self._in_step.append(job)
            if self._left(chunks) > 0:  # prompts behind it in this step find its blocks
                self._caches.keep(self.place, job.blocks, self._events.now_s)
        if not chunks:
            return False
        in_decode_step = self._chunk_tokens > 0 and len(self._decoding) > 0
        seconds = self._machine.chunks_s(chunks, in_decode_step=in_decode_step) + loading_s
        self.busy_s += seconds
        end_s = self._decoding.stall(seconds, self._events.now_s, step=self._chunk_tokens > 0)
        self._events.at(end_s, self._end_step)
        return True

    def _left(self, chunks: list[tuple[int, int]]) -> int:
        """Tokens of prompts that fit into a step beside these."""
        if not self._chunk_tokens:
            return 0 if chunks else 1 << 31
        return self._chunk_tokens - len(self._decoding) - sum(end - begin for begin, end in chunks)

    def _next(self) -> Job | None:
        """The first queued request whose prompt is to be computed, if it may begin; those before it, whose KV
        is here, join."""
        while self._line:
            job = self._line[0]
            alone = self._room == self._machine.room_tokens
            if job.ready_s > self._events.now_s or (job.context > self._room and not alone):
                return None
            self._line.popleft()
            self._room -= job.context
            if self._line and self._line[0].computed_s == math.inf:
                self._outcomes.next(self._line[0])
            if job.computed_s == math.inf:
                self._begin_prompt(job)
                return job
            self._join(job)
        return None

    def _end_step(self) -> None:
        if self.dead:
            return
        in_step, self._in_step = self._in_step, []
        for job in in_step:
            if not job.left:
                self._end_prompt(job)
                self._join(job)
        self._go_on()

    def _join(self, job: Job) -> None:
        now_s = job.first_s = self._events.now_s
        self._outcomes.began(job)
        more = job.arrival.answer_tokens - 1
        if more < 1:
            self._end(job)
            return
        self._jobs[job.name] = job
        self._decoding.join(job.name, job.arrival.tokens, more, now_s)

    def _leave(self) -> None:
        """Removes the requests whose last token has been made."""
        now_s = self._events.now_s
        while self._decoding.next_s() <= now_s + 1e-9:
            left = self._decoding.pop(now_s)
            job = self._jobs.pop(left.name)
            job.gap_s = left.gap_s
            self._end(job)

    def _end(self, job: Job) -> None:
        job.done_s = self._events.now_s
        self._room += job.context
        self._outcomes.ended(job)
