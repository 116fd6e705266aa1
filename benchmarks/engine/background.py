"""Decode steps of one engine while other requests load from the pool and save to it.

A load brings a request whose last tokens are computed, a fresh prompt brings its prefill: steps with such
work are longer whatever the connector does. So only pure steps count, whose batch is the decoding requests
and nothing else; a pure step is busy when copies run beside it. What they cost is the difference between busy
pure steps and pure steps of the same engine in quiet.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.engine.card_driver import CardDriver

LOADS_IN_FLIGHT = 2
FRESH_EVERY = 16  # pure steps from the end of a save until the next fresh prompt
DRAIN_S = 10.0


@dataclass
class Request:
    """One in the background. core, wave: as the engine's core takes them. blocks: of the KV cache."""

    name: str
    core: Any
    wave: int
    is_load: bool
    blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Step:
    """seconds: of the engine's step. pure: the batch before it and its own were decode alone, since with
    asynchronous scheduling a step queues one batch and waits for the one before. loading: requests
    that load at its start and its end. saving: blocks that are held for their save at its start."""

    seconds: float
    pure: bool
    loading: int
    saving: int


class Background:
    """Steps the engine of a driver that decodes, and gives it requests between steps, made before."""

    def __init__(self, driver: CardDriver, requests: int) -> None:
        """requests: how many decode."""
        from vllm.v1.request import RequestStatus

        self._loads_now = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._driver, self._requests = driver, requests
        self._scheduler = driver.scheduler
        self._touched = False  # the card was idle while this process did something between steps
        self._running: list[Request] = []
        self._covered: list[float] = []  # of each load that has ended: the share of its prompt
        self._ended: set[str] = set()

    @property
    def is_quiet(self) -> bool:
        """Nothing but decode ran in the last two batches, and nothing is copied."""
        return self._is_pure and not self._running and self._copies() == (0, 0)

    @property
    def _is_pure(self) -> bool:
        return self._driver.batches == [(self._requests, self._requests)] * 2

    def step(self) -> Step:
        touched, self._touched = self._touched, False
        before = self._copies()
        started_s = time.perf_counter()
        outputs = self._driver.engine.step()
        seconds = time.perf_counter() - started_s
        self._ended = {output.request_id for output in outputs if output.finished}
        loading = min(before[0], self._copies()[0])
        return Step(seconds, self._is_pure and not touched, loading, before[1])

    def run_quiet(self, steps: int) -> dict[str, Any]:
        """seconds: of so many pure steps with nothing beside."""
        self._end_background()
        self.step()
        taken = [self.step() for _ in range(steps)]
        return {"seconds": [step.seconds for step in taken if step.pure]}

    def run(
        self, loads: list[list[int]], fresh: list[list[int]], steps: int, seconds: float
    ) -> dict[str, Any]:
        """Steps until so many pure steps were busy, or the seconds are over.

        loads: prompts in the pool, loaded in turn. fresh: prompts that are computed and saved, one after
        the other.

        seconds: of the pure steps that were busy; saving: how many of them beside a save; saving_of_all: how
        many steps of all kinds; steps: how many there were; all_seconds: of all of them; loads, fresh: how
        many ran; covered: the least share of a prompt that a load brought.
        """
        turn = itertools.cycle(loads)
        unused = [self._prepare(prompt, is_load=False) for prompt in fresh]
        ready = [self._prepare(next(turn), is_load=True) for _ in range(4 * LOADS_IN_FLIGHT)]
        self._covered = []
        taken: list[Step] = []
        busy: list[Step] = []
        counts = {True: 0, False: 0}
        since_save = 0
        deadline_s = time.monotonic() + seconds
        while len(busy) < steps and time.monotonic() < deadline_s:
            step = self.step()
            taken.append(step)
            if step.pure and (step.loading or step.saving):
                busy.append(step)
            self._note_blocks()
            self._let_go()
            since_save = 0 if step.saving else since_save + step.pure
            if not step.pure or self._touched:
                continue
            in_flight = sum(request.is_load for request in self._running)
            if not ready:
                ready = [self._prepare(next(turn), is_load=True) for _ in range(4 * LOADS_IN_FLIGHT)]
                self._touched = True
            elif in_flight < LOADS_IN_FLIGHT:
                counts[True] += self._start(ready.pop(0))
            elif unused and since_save >= FRESH_EVERY and in_flight == len(self._running):
                since_save = 0
                counts[False] += self._start(unused.pop(0))
        self._end_background()
        return {
            "seconds": [step.seconds for step in busy],
            "saving": sum(bool(step.saving) for step in busy),
            "saving_of_all": sum(bool(step.saving) for step in taken),
            "steps": len(taken),
            "all_seconds": [step.seconds for step in taken],
            "loads": counts[True],
            "fresh": counts[False],
            "covered": min(self._covered, default=0.0),
        }

    def _prepare(self, prompt: list[int], is_load: bool) -> Request:
        """A request with its blocks hashed, which the core has not yet: that costs milliseconds."""
        core, made = self._driver.core, []
        core.add_request = lambda request, wave=0: made.append((request, wave))
        try:
            name = self._driver.add(prompt, 1)
        finally:
            del core.add_request
        ((request, wave),) = made
        return Request(name, request, wave, is_load)

    def _start(self, request: Request) -> int:
        self._running.append(request)
        self._driver.core.add_request(request.core, request.wave)
        return 1

    def _copies(self) -> tuple[int, int]:
        """Requests that load, and blocks that are held for their save alone: a connector either keeps the
        whole request after its end, or has references of its own on its blocks."""
        requests = self._scheduler.requests.values()
        loading = sum(request.status is self._loads_now for request in requests)
        ended = sum(request.is_finished() for request in requests)
        manager = self._scheduler.kv_cache_manager
        pool, kinds = manager.block_pool, manager.coordinator.single_type_managers
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is vLLM's own
        owned = sum(len(blocks) for kind in kinds for blocks in kind.req_to_blocks.values())
        return loading, ended + max(used - owned, 0)

    def _note_blocks(self) -> None:
        """Of a load all are there from its begin; one that the connector declined takes them by and by."""
        for request in self._running:
            loading = request.core.status is self._loads_now
            if request.is_load and not request.core.is_finished() and not (loading and request.blocks):
                groups = self._scheduler.kv_cache_manager.get_block_ids(request.core.request_id)
                request.blocks = {block for group in groups for block in group}

    def _let_go(self) -> None:
        """Forgets requests that have ended. The prefix cache forgets what a load brought, or the next load of
        the same prompt would be none."""
        for request in [request for request in self._running if request.name in self._ended]:
            self._running.remove(request)
            if request.is_load:
                computed = self._driver.scheduled.get(request.core.request_id, 0)
                self._covered.append(1 - computed / request.core.num_prompt_tokens)
                self._scheduler.kv_cache_manager.block_pool.evict_blocks(request.blocks)
                self._touched = True

    def _end_background(self) -> None:
        """Steps until nothing but decode is left. Raises RuntimeError."""
        deadline_s = time.monotonic() + DRAIN_S
        while not self.is_quiet:
            self.step()
            self._note_blocks()
            self._let_go()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"loads and saves have not ended {DRAIN_S:g} s after the last one")
