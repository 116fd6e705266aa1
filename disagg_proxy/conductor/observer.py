"""The interface for other parts to follow the scheduler's requests: ``scheduler.subscribe(observer)``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.data_plane.observations import Observation


@dataclass(slots=True)
class InFlight:
    """One request from its dispatch to its end. Times in seconds.

    at_s:       when it was dispatched.
    prefill_s, ttft_s: predicted: of its prompt's computation, and to its first token.
    pool:       tokens that are fetched.
    ahead_s:    of the holder's other fetches.
    queued:     other prompts were computed before it.
    silent:     the end of its prefill will not be reported.
    pending_handover: another worker than the one that answers computes its prompt, and still has it.
    computed, decoding: how far it is.
    sound:      the time of its first token is plausible.
    has_neighbour: some of its prompt may come from another worker's own cache: its times teach nothing.
    decodes_s:  when its decode began, for an answer that is no stream; 0.0: not known.
    """

    choice: Choice
    asked: Request
    at_s: float
    prefill_s: float
    ttft_s: float
    pool: int
    ahead_s: float
    queued: bool
    silent: bool
    pending_handover: bool
    computed: bool = False
    decoding: bool = False
    sound: bool = True
    decodes_s: float = 0.0
    has_neighbour: bool = False


class Finished(NamedTuple):
    """A request at its end: what the data plane observed, its choice, and when it was dispatched."""

    observation: Observation
    choice: Choice
    asked: Request
    sent_s: float

    @property
    def reused(self) -> tuple[int, int]:
        """(tokens expected in the worker's own cache, further tokens expected from the pool)"""
        computes = self.choice.computes
        fetched = self.asked.from_pool(computes) if self.choice.fetch else 0
        return self.asked.own_at(computes), fetched

    @property
    def cached(self) -> int:
        """Cached tokens by the engine's report; -1: not reported."""
        apart = self.choice.prefill is not None
        observation = self.observation
        return observation.prefill_cached_tokens if apart else observation.cached_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first byte of the stream; NaN: not a stream."""
        observation = self.observation
        if not observation.stream or not observation.first_byte_s or observation.status != 200:
            return math.nan
        return observation.first_byte_s - observation.arrived_s

    @property
    def kept_s(self) -> float:
        """Seconds from arrival to sending, mostly in the queue."""
        return max(self.sent_s - self.observation.arrived_s, 0.0)

    @property
    def predicted_s(self) -> float:
        """The predicted TTFT, to compare with ``ttft_s``: the wait until sending plus the prediction made
        then. NaN: the policy predicts nothing."""
        found = self.choice.why.get("predicted_ttft_s", math.nan)
        return self.kept_s + float(found) if isinstance(found, float | int) else math.nan


class Observer:
    """Override the methods of interest. Each is called while the driver holds its lock, in the order of
    events; an exception goes to the scheduler's caller."""

    def on_dispatch(self, request: int, flight: InFlight, now_s: float) -> None:
        """A request is dispatched; an earlier attempt of it has left."""

    def on_prefilled(self, request: int) -> None:
        """The prefill worker has answered."""

    def on_decode(self, request: int, *, computed: bool) -> None:
        """Its answer is being decoded from now on. computed: its prefill has ended, too."""

    def on_finish(self, finished: Finished) -> None:
        """It has ended, with plausible times. ``on_leave`` follows."""

    def on_leave(self, request: int) -> None:
        """It has left the load accounting."""
