"""The state of one request.

    NEW ----ask----> LOOKING ----answer, some blocks pinned----> HIT ----admitted, must load----> LOADING -->
    SETTLED
                        |                                         |
                        +----nothing there, unknown, too late-----+----admitted, nothing to load---------->
                        SETTLED
                        |
                        +----admitted, nothing could be loaded----> COVERED ----answer, unknown----> SETTLED

A preempted request starts again from NEW: its blocks may be in the pool by then and no longer in the engine.

Invariants: a pin is held exactly in HIT and LOADING, and leaves the state exactly once, by the return value
of the method that gives it up. A request in LOADING must not be forgotten: its blocks are being written to.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from moonpool.connectors.files import File
from moonpool.connectors.vllm.load_decision import PROBE_LOAD, Choice
from moonpool.connectors.vllm.pd.neighbour_asks import Neighbour
from moonpool.connectors.vllm.pool import Ticket
from moonpool.connectors.vllm.requests.chain import Chain
from moonpool.connectors.vllm.requests.prefix_search import PrefixSearch
from moonpool.connectors.vllm.requests.switches import NO_SWITCH, Switches


class Phase(enum.Enum):
    """Where a request stands with the pool; the module's docstring has the transitions."""

    NEW = "new"
    LOOKING = "looking"
    HIT = "hit"
    LOADING = "loading"
    COVERED = "covered"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a query pinned: ``blocks`` leading blocks, readable with these descriptors while the pin is held.
    With sliding windows the descriptors of objects that such a prefix does not need are zeros."""

    blocks: int
    pin_id: int
    holders: bytes
    descriptors: bytes


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between its arrival and its end.

    chain: the names of its blocks.
    switches: what the proxy says of its use of the pool.
    neighbour: an engine whose own cache is still to be asked.
    adapter: the files that its LoRA adapter has for these names.
    search: of an engine with sliding windows, what the query asks for and the next one will.
    saved: the first block that still has to be saved; in COVERED not known yet.
    awaited: whether the scheduler has waited for the answer of its query.
    block_ids: one list per KV cache group, once the request is scheduled.
    load_until: the block before which a load of the hit ends; None: not decided yet.
    choice: what was decided of its last hit; None: it had none.
    offered_after: local tokens when the engine last asked what can be loaded.
    saves_answer: whether blocks of the answer are saved, too.
    local_tokens, pool_tokens, load_errors: of its first admission, for the answer and the metrics.
    """

    request_id: str
    chain: Chain
    switches: Switches = NO_SWITCH
    neighbour: Neighbour | None = None
    adapter: tuple[File, ...] = ()
    phase: Phase = Phase.NEW
    ticket: Ticket | None = None
    search: PrefixSearch | None = None
    asked_s: float = 0.0
    awaited: bool = False
    hit: Hit | None = None
    saved: int = 0
    saves_answer: bool = False
    block_ids: list[list[int]] = field(default_factory=list)
    load_first: int = 0
    load_blocks: int = 0
    load_good: int = 0
    load_until: int | None = None
    choice: Choice | None = None
    offered_after: int = 0
    preemptions: int = 0
    local_tokens: int = 0
    pool_tokens: int = 0
    load_errors: int = 0

    @property
    def is_probe(self) -> bool:
        """Whether its load is made to measure what loads take."""
        return self.choice is not None and self.choice.reason == PROBE_LOAD

    def asked(self, ticket: Ticket, now_s: float) -> None:
        """A query was handed over."""
        self.phase = Phase.LOOKING
        self.ticket = ticket
        self.asked_s = now_s
        self.awaited = False

    def asked_on(self, ticket: Ticket) -> None:
        """The query was answered, and its search goes on with another one."""
        self.ticket = ticket

    def answered(self, hit: Hit) -> None:
        """The query was answered with at least one block."""
        self.hit = hit
        self.load_until = None
        self.saved = hit.blocks
        self.phase = Phase.HIT

    def missed(self, saved: int) -> None:
        """Nothing is pinned. saved: blocks that need no saving all the same."""
        self.saved = saved
        self.phase = Phase.SETTLED

    def loadable_tokens(self, local_tokens: int, request_tokens: int, block_tokens: int) -> int:
        """Tokens that the pool has beyond the local ones; at least one token stays to be computed. 0 where
        these end within a block, which a vLLM may find whose groups' blocks differ in tokens."""
        if self.hit is None or self.phase is not Phase.HIT or local_tokens % block_tokens:
            return 0
        until = self.hit.blocks if self.load_until is None else self.load_until
        usable = min(until, (request_tokens - 1) // block_tokens) * block_tokens
        return max(usable - local_tokens, 0)

    def is_covered(self, local_tokens: int, block_tokens: int) -> bool:
        """Whether the engine has all blocks that have names: none is to be loaded, nor computed and saved."""
        return self.chain.blocks * block_tokens <= local_tokens

    def covered(self) -> None:
        """The engine did not wait for the answer of the query. It tells what needs no saving."""
        self.phase = Phase.COVERED

    def admitted_to_load(self, first: int, blocks: int) -> Hit:
        """The engine made room for blocks [first, first + blocks) of the prefix."""
        assert self.phase is Phase.HIT
        assert self.hit is not None
        self.phase = Phase.LOADING
        self.load_first = first
        self.load_blocks = blocks
        self.load_good = blocks
        return self.hit

    def loaded(self, block_tokens: int) -> int:
        """The load ended on all ranks, ``load_good`` leading blocks of it without an error. Returns the pin
        to release. The engine computes the other blocks, which must then be saved."""
        assert self.phase is Phase.LOADING
        if self.preemptions == 0:
            self.pool_tokens = self.load_good * block_tokens
            self.load_errors = self.load_blocks - self.load_good
        if self.load_good < self.load_blocks:
            self.saved = self.load_first + self.load_good
        return self.give_up_pin()

    def give_up_pin(self) -> int:
        """Settles the request. Returns the pin to release, or 0."""
        pin_id = self.hit.pin_id if self.hit is not None else 0
        self.hit = None
        self.phase = Phase.SETTLED
        return pin_id

    def restarted(self, preemptions: int) -> int:
        """The request was preempted and will ask again. Returns the pin to release, or 0."""
        pin_id = self.give_up_pin()
        self.preemptions = preemptions
        self.phase = Phase.NEW
        return pin_id
