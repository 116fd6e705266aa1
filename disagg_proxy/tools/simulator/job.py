"""One request on its way through simulated instances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.tools.simulator.trace import Arrival


@dataclass(slots=True, eq=False)
class Job:
    """Times in seconds of the simulation, infinity until they are known.

    ready_s:  the fetched part of its prompt is there.        begun_s: its prefill began.
    computed_s: its prefill ended.                            first_s: its first token.
    there_s:  its KV is where it decodes.                     attempt: how often it was sent before.
    done_s:   its last token.                                 gap_s: the mean of its longest tenth of gaps.
    own, fetched: tokens that were reused, from the instance's own cache and from others'.
    proxy: the number of its proxy.
    blocks: of its prompt, those that a cache may keep.
    fetches: whether it is to fetch what others hold.
    why_not:  why it was refused, or given up; "" for neither.
    """

    name: int
    arrival: Arrival
    proxy: int = 0
    own: int = 0
    fetched: int = 0
    ready_s: float = 0.0
    begun_s: float = math.inf
    computed_s: float = math.inf
    there_s: float = math.inf
    first_s: float = math.inf
    done_s: float = math.inf
    gap_s: float = 0.0
    prefill_place: int = -1
    decode_place: int = -1
    predicted_ttft_s: float = math.nan
    fetches: bool = True
    why_not: str = ""
    choice: tuple[Request, Choice] | None = None  # by which it was sent
    attempt: int = 0
    expected: bool = False  # its prompt is on its way to prefill_place
    orphan: bool = False  # the instance that was to decode it is dead
    left: int = 0  # tokens of the prompt that are still to be computed, chunk by chunk
    blocks: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = self.arrival.full_blocks

    def restart(self) -> None:
        """Resets it for another attempt."""
        self.attempt += 1
        self.own = self.fetched = self.left = 0
        self.ready_s = 0.0
        self.orphan = False
        self.begun_s = self.computed_s = self.there_s = self.first_s = math.inf

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival, the waits in the proxy and of earlier attempts included; infinity without
        a first token."""
        return self.first_s - self.arrival.at_s

    @property
    def context(self) -> int:
        """Tokens of room that it needs while it decodes."""
        return self.arrival.tokens + self.arrival.answer_tokens
