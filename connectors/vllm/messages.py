"""What the two halves tell each other: plain values, pickled by vLLM.

    scheduler -> worker, each step          Step(loads, saves, handover, greets)
    worker -> scheduler, when there is any  Report(loaded, saved, ...)
    worker -> scheduler, once at start      Handshake(...)

Only bytes, numbers and texts: nothing here knows a socket, a tensor or an address.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.connectors.files import File
from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.pd.step_plan import HandoverStep
from moonpool.core.store.keys import Ranges


@dataclass(frozen=True, slots=True)
class Load:
    """Fill blocks of one request.

    width: objects of a block; 0: the load could not be planned and has failed.
    first_names: names of the first block's objects, which tell which column is which.
    holders: incarnation of each node that holds objects, 16 bytes each.
    descriptors: where the objects are, block by block, ``width`` each.
    block_ids: one list per part of a block (group_blocks.py; where all groups are alike that is one per KV
        cache group), as long as the number of blocks; NULL_BLOCK where a sliding window or a state needs no
        block, and nothing is loaded.
    piece: number of a part of a hit for which the request does not wait (meetings.py); 0: it waits.
    """

    request_id: str
    width: int
    first_names: bytes
    holders: bytes
    descriptors: bytes
    block_ids: tuple[tuple[int, ...], ...]
    piece: int = 0

    @property
    def blocks(self) -> int:
        """Blocks to load."""
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class Save:
    """Store full blocks.

    width: objects of a block.
    names: of the objects, block by block, ``width`` each.
    parents: for each object the name of the same column one block earlier; zeros in the first block of a
        chain, and of sliding windows and states.
    block_ids: one list per part of a block; NULL_BLOCK for a block that is not saved.
    adapter: files of the LoRA adapter that the names stand for, to be checked when the step was computed:
        vLLM may read them again in any step.
    keep_s: their soft pin in the node's memory, seconds; 0: none.
    """

    job_id: int
    width: int
    names: bytes
    parents: bytes
    block_ids: tuple[tuple[int, ...], ...]
    adapter: tuple[File, ...] = ()
    keep_s: float = 0.0


@dataclass(slots=True)
class Step(compat.ConnectorMetadata):
    """The work of one engine step. NOTHING is the only empty one, also after pickling: most steps have no
    work, and cost one comparison with it.

    greets: whether the workers are to report their handshakes, which vLLM did not deliver.
    """

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    handover: HandoverStep | None = None
    greets: bool = False

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.handover or self.greets)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Step, (self.loads, self.saves, self.handover, self.greets)) if self else (_nothing, ())


NOTHING = Step()


def _nothing() -> Step:
    return NOTHING


@dataclass(frozen=True, slots=True)
class LoadTime:
    """What one rank's load took.

    seconds: of the native thread, without what it waited for.
    memory_bytes, network_bytes: that came from memory of this host, and from another host.
    failed_bytes: that did not come.
    from_network: whether any of them were another host's.
    notice_s: seconds from its end until the worker saw it; None: other loads were under way.
    """

    seconds: float
    memory_bytes: int = 0
    network_bytes: int = 0
    failed_bytes: int = 0
    from_network: bool = False
    notice_s: float | None = None


@dataclass(frozen=True, slots=True)
class PieceEnd:
    """A piece of a hit has been loaded, or not.

    ranks: that report it.
    good: leading blocks that came on each of them.
    took: what it took on the slowest of them; None: nothing to measure.
    """

    ranks: int
    good: int
    took: LoadTime | None = None

    def __add__(self, other: PieceEnd) -> PieceEnd:
        """Of several ranks as one."""
        both = [took for took in (self.took, other.took) if took is not None]
        slowest = max(both, key=lambda took: took.seconds, default=None)
        return PieceEnd(self.ranks + other.ranks, min(self.good, other.good), slowest)


@dataclass(slots=True)
class Report(compat.WorkerMetadata):
    """What the workers tell the scheduler's half after a step; reports of ranks add up.

    loaded: request -> leading blocks of its load, or of its hand-over, that are good (the minimum over all
        ranks).
    load_times: request -> what its load took on the slowest rank.
    saved: job -> number of ranks that are done with it.
    handshakes: of ranks that were pending until now.
    heartbeats: leases whose decode engine sent one.
    handed: lease -> number of ranks that handed all of it over.
    lost: requests whose prefill engine was lost before there was room for them.
    pieces: ends of pieces of hits, by number.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    handshakes: list[Handshake] = field(default_factory=list)
    heartbeats: set[int] = field(default_factory=set)
    handed: dict[int, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    load_times: dict[str, LoadTime] = field(default_factory=dict)
    pieces: dict[int, PieceEnd] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.loaded
            or self.saved
            or self.handshakes
            or self.heartbeats
            or self.handed
            or self.lost
            or self.pieces
        )

    def aggregate(self, other: compat.WorkerMetadata) -> Report:
        """Several ranks' reports of one step as one."""
        if isinstance(other, Report):
            for request_id, blocks in other.loaded.items():
                self.loaded[request_id] = min(blocks, self.loaded.get(request_id, blocks))
            for request_id, took in other.load_times.items():
                known = self.load_times.get(request_id, took)
                self.load_times[request_id] = max(known, took, key=lambda load: load.seconds)
            for job_id, ranks in other.saved.items():
                self.saved[job_id] = self.saved.get(job_id, 0) + ranks
            for lease_id, ranks in other.handed.items():
                self.handed[lease_id] = self.handed.get(lease_id, 0) + ranks
            for number, end in other.pieces.items():
                self.pieces[number] = self.pieces[number] + end if number in self.pieces else end
            self.handshakes += other.handshakes
            self.heartbeats |= other.heartbeats
            self.lost |= other.lost
        return self


@dataclass(slots=True)
class Handshake(compat.HandshakeMetadata):
    """What one worker tells the scheduler's half when it starts, or later if it was pending.

    columns, fingerprint: the objects of a block that this worker holds, and the fingerprint they are stored
        under.
    refusal: one sentence why the pool cannot be used with this worker, or "".
    pending: what the worker waits for before it knows; it then reports a handshake with a step.
    handover_address: where other engines reach it; "" when it hands nothing over.
    rank, tp_rank, pp_rank: which worker it is.
    """

    fingerprint: bytes = b""
    columns: tuple[Ranges, ...] = ()
    bytes_per_block: int = 0
    refusal: str = ""
    pending: str = ""
    handover_address: str = ""
    rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0
