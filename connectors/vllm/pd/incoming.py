"""A request whose KV comes from a prefill engine, as a decode worker sees it: one part for each worker of
that engine that this one takes heads from (``rank_pairs``), or whose lease it ends. Pure values.

    a part, block by block of what its request needs:

    | local prefix | good: here | claimed: being read | ready: complete at prefill | not computed yet |
    0            first                                                                           needed

Several threads may read pieces of one part at a time. A piece that arrives behind one that is still being
read counts when that one has arrived, too. A block counts when all parts of it are here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import zip_longest

from moonpool.connectors.vllm.pd.kv_transfer_params import BlockIds, slice_blocks
from moonpool.connectors.vllm.pd.rank_pairs import ALL_HEADS, Share
from moonpool.connectors.vllm.pd.step_plan import Hold, Pull
from moonpool.connectors.vllm.pd.wire import Progress

UNEVEN = "the prefill engine's worker gave other heads or layers in one piece than in another"


@dataclass(frozen=True, slots=True)
class PartSource:
    """One worker of a prefill engine, and what a request takes of it. Two requests may take different shares
    over one connection: each belongs to what its own offer or page says of the engine.

    key: of the connection to it.
    address: by which its messages tell it from the engine's other workers.
    readers: workers of this decode engine that take a prompt from it.
    share: the heads that are read.
    cuts_layers: whether one of the two engines has pipeline stages, and the other has not.
    """

    key: Hashable
    address: str
    readers: int = 1
    share: Share = ALL_HEADS
    cuts_layers: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks to read next, at one prefill worker and here, under a lease.

    source: the prefill worker, and what is read of its blocks.
    start: index in the pull of the first of them.
    """

    request_id: str
    source: PartSource
    start: int
    lease: int
    slot: int
    there: BlockIds
    here: BlockIds

    @property
    def blocks(self) -> int:
        """Blocks of the piece."""
        return len(self.here[0])

    @property
    def key(self) -> Hashable:
        """The connection to the prefill worker."""
        return self.source.key


@dataclass(slots=True)
class IncomingPart:
    """What comes of one prefill worker.

    known_s: when that worker last said that it knows the transfer, in seconds of the clock.
    lease, slot: under which the blocks are kept; 0 until the prefill engine has told it.
    over: the last lease that was seen to have ended.
    ready: remote ids of complete blocks, per KV cache group.
    final: whether ``ready`` is all that comes.
    good: leading blocks of the pull that are here.
    claimed: leading blocks of the pull that were given to readers.
    arrived: pieces behind a gap, first block -> end.
    again: pieces to be read once more, as (first block, end).
    bytes: that were read, group_bytes: of each block, per KV cache group. reading: pieces under way.
    error: why nothing more comes, or "".
    is_private: whether ``error`` concerns this engine alone, so that the prefill worker is not told.
    is_gone: whether the prefill worker itself ended the transfer.
    """

    source: PartSource
    known_s: float
    lease: int = 0
    over: int = 0
    slot: int = 0
    ready: list[list[int]] = field(default_factory=list)
    final: bool = False
    good: int = 0
    claimed: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    again: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    group_bytes: tuple[int, ...] = ()
    reading: int = 0
    error: str = ""
    is_private: bool = False
    is_gone: bool = False

    @property
    def ready_blocks(self) -> int:
        """Leading blocks that are complete at the prefill worker, in all groups."""
        return min((len(ids) for ids in self.ready), default=0)

    def lacks(self, progress: Progress) -> bool:
        """Whether a message before this one was lost."""
        return progress.first > 0 and (progress.lease != self.lease or progress.first > self.ready_blocks)

    def extend(self, progress: Progress, now_s: float) -> bool:
        """More blocks are complete. False: it contradicts what was said before."""
        if progress.first == 0:
            self.ready = [[] for _ in progress.blocks]
        if progress.first < self.ready_blocks or len(progress.blocks) != len(self.ready):
            return False
        self.known_s = now_s
        self.lease, self.slot, self.final = progress.lease, progress.slot, progress.final
        for known, fresh in zip(self.ready, progress.blocks, strict=True):
            known.extend(fresh)
        return True

    def next_piece(self, pull: Pull, blocks_max: int) -> Piece | None:
        """What to read next of it; ``read`` follows for each."""
        if self.error:
            return None
        first, ready = pull.first, min(self.ready_blocks - pull.first, pull.blocks)
        if self.again and self.again[-1][1] <= ready:
            start, stop = self.again.pop()
        else:
            start, stop = self.claimed, min(ready, self.claimed + blocks_max)
            if stop <= start:
                return None
            self.claimed = stop
        self.reading += 1
        return Piece(
            pull.request_id,
            self.source,
            start,
            self.lease,
            self.slot,
            slice_blocks(self.ready, first + start, first + stop),
            slice_blocks(pull.block_ids, start, stop),
        )

    def read(
        self, piece: Piece, nbytes: int, error: str, group_bytes: tuple[int, ...], *, begins_again: bool
    ) -> None:
        """A piece was read. It counts unless the lease was replaced meanwhile.

        error: why it could not be read, or "".
        group_bytes: of each of its blocks, per KV cache group; the same in each piece.
        begins_again: whether the error is a lease that has ended, after which more may come.
        """
        self.reading -= 1
        if not error and self.group_bytes not in ((), group_bytes):
            self.error = self.error or UNEVEN
        elif not error:
            self.arrived[piece.start] = piece.start + piece.blocks
            while self.good in self.arrived:
                self.good = self.arrived.pop(self.good)
            self.bytes += nbytes
            self.group_bytes = group_bytes
        elif self.lease != piece.lease or begins_again:
            self.again.append((piece.start, piece.start + piece.blocks))
            if self.lease == piece.lease:
                self.over, self.lease, self.ready, self.final = self.lease, 0, [], False
        else:
            self.error = self.error or error


@dataclass(slots=True)
class IncomingRequest:
    """A request whose KV comes from a prefill engine.

    hold: what the request needs, and from where.
    key: connection that finds the workers of the prefill engine.
    held_s: when it came, in seconds of the clock.
    transfer: id in the concurrent form; "" in the two-step form.
    parts: by connection, without those that have ended.
    is_met: whether the prefill engine's workers are known.
    pull: the local blocks, once there is room; pulled_s: when.
    good: leading blocks that the parts that ended have.
    bytes: that they read, group_bytes: of each block, per KV cache group.
    error: why they do not have all, or "".
    """

    hold: Hold
    key: Hashable
    held_s: float
    transfer: str = ""
    parts: dict[Hashable, IncomingPart] = field(default_factory=dict)
    is_met: bool = False
    pull: Pull | None = None
    pulled_s: float = 0.0
    good: int | None = None
    bytes: int = 0
    group_bytes: tuple[int, ...] = ()
    error: str = ""

    @property
    def reading(self) -> int:
        """Pieces under way."""
        return sum(part.reading for part in self.parts.values())

    def part_of(self, worker: str) -> IncomingPart | None:
        """The part of which a message of ``worker`` is; None: of none. A release that does not name its
        workers has one for each of ours."""
        if not worker and len(self.parts) == 1:
            return next(iter(self.parts.values()))
        return next((part for part in self.parts.values() if part.source.address == worker), None)

    def end_part(self, part: IncomingPart) -> None:
        """Nothing more comes of it, and nothing of it is being read."""
        del self.parts[part.source.key]
        self.good = part.good if self.good is None else min(self.good, part.good)
        self.bytes += part.bytes
        pairs = zip_longest(self.group_bytes, part.group_bytes, fillvalue=0)
        self.group_bytes = tuple(ours + theirs for ours, theirs in pairs)
        self.error = self.error or part.error
