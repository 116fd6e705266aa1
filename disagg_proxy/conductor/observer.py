"""What other parts may hear of the scheduler's requests: ``scheduler.subscribe(observer)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import Observation


@dataclass(slots=True)
class InFlight:
    """One request from its dispatch to its end. Times in seconds.

    at_s:       when it was dispatched.
    prefill_s, ttft_s: predicted: of its prompt's computation, and to its first token.
    pool:       tokens that are fetched.
    ahead_s:    of the holder's other fetches.
    queued:     others were computed before it.
    silent:     when its prefill ends will not be heard of.
    pending_handover: another worker than the one that answers computes its prompt, and still has it.
    computed, decoding: how far it is.
    sound:      the time of its first token can be.
    decodes_s:  since when, of an answer that comes whole; 0.0: not known.
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


class Finished(NamedTuple):
    """A request at its end: what the data plane saw, and what it was dispatched by and when."""

    observation: Observation
    choice: Choice
    asked: Request
    sent_s: float


class Observer:
    """Override what is to be heard. Each method is called while the driver holds its lock, in the order of
    what happens; what it raises goes to the scheduler's caller."""

    def on_dispatch(self, request: int, flight: InFlight, now_s: float) -> None:
        """A request goes out; an earlier attempt of it has left."""

    def on_prefilled(self, request: int) -> None:
        """The prefill worker has answered."""

    def on_decode(self, request: int, *, computed: bool) -> None:
        """Its answer is made from now on. computed: its prefill is over, too."""

    def on_finish(self, finished: Finished) -> None:
        """It is over, and its times can be. ``on_leave`` follows."""

    def on_leave(self, request: int) -> None:
        """It is not accounted for any more."""

    def on_trained(self, worker: Worker) -> None:
        """One of the worker's models knows more than a first guess."""
