"""Decode's half of the hand-over beside the memory: what is ready over there, what is to be read next, and
how each pull ended. Pure: plans, messages and ends of reads go in; messages and pieces to read come out. The
owner's lock guards it.

    a Take, block by block of what its request needs:

    | local prefix | good: here | claimed: being read | ready: complete over there | not computed yet |
    0            first                                                                           needed

Several threads may read pieces of one take at a time; what arrives behind a piece that is still read counts
when that has arrived, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from moonpool.connectors.vllm.pd.fields import LEFT, BlockIds, Offer, Source, slice_blocks
from moonpool.connectors.vllm.pd.plans import Hold, Pull
from moonpool.connectors.vllm.pd.wire import WHY_MAX, Done, Gone, Here, Known, Progress, Want

PIECE_BLOCKS = 16  # at most; between two pieces a pull can be given up, and messages go out


@dataclass(slots=True)
class Take:
    """key: of the line to the prefill engine; over: a lease that was seen to be; ready: ids over there of
    complete blocks, per group; pull: once there is room; good: leading blocks of it that are here; claimed:
    blocks of it that were given to be read; arrived: pieces behind a gap, start -> stop; again: pieces to be
    read once more; reading: how many are;
    known_s: when the prefill engine last said that it knows the transfer; error: why nothing more comes, or
    ""; is_private: that is nothing to tell the prefill engine; is_gone: which said itself that it is over."""

    hold: Hold
    key: Hashable
    known_s: float
    transfer: str = ""
    lease: int = 0
    over: int = 0
    slot: int = 0
    ready: list[list[int]] = field(default_factory=list)
    final: bool = False
    pull: Pull | None = None
    pulled_s: float = 0.0
    good: int = 0
    claimed: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    again: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    reading: int = 0
    error: str = ""
    is_private: bool = False
    is_gone: bool = False

    @property
    def ready_blocks(self) -> int:
        return min((len(ids) for ids in self.ready), default=0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks to read next, there and here, under a lease. start: which of the pull's blocks is the first."""

    request_id: str
    start: int
    lease: int
    slot: int
    there: BlockIds
    here: BlockIds

    @property
    def blocks(self) -> int:
        return len(self.here[0])


@dataclass(frozen=True, slots=True)
class Ended:
    """A pull is over: ``good`` leading blocks of it are here. error: why not all, or ""."""

    pull: Pull
    good: int
    bytes: int
    seconds: float
    error: str


class Takes:
    def __init__(self, *, reply: str, silence_s: float, piece_blocks: int = PIECE_BLOCKS) -> None:
        """reply: our own address; piece_blocks: that are read at once."""
        self._reply = reply
        self._piece_blocks = piece_blocks
        self._silence_s = silence_s
        self._takes: dict[str, Take] = {}
        self._by_transfer: dict[str, Take] = {}
        self._ended: list[Ended] = []
        self._lost: set[str] = set()
        self._to_tell: list[tuple[Hashable, Done | Want]] = []

    def __len__(self) -> int:
        return len(self._takes)

    # What the scheduler's half says

    def hold(self, hold: Hold, key: Hashable, now_s: float) -> Take | None:
        """A request came. Returns what it waits for, or None when that cannot be."""
        take = Take(hold, key, now_s)
        if isinstance(hold.source, Offer):
            take.lease, take.slot, take.final = hold.source.lease, hold.source.slot, True
            take.ready = [list(ids) for ids in hold.source.blocks]
        else:
            take.transfer = hold.source.transfer
            if take.transfer in self._by_transfer:
                self._lost.add(hold.request_id)
                return None
            self._by_transfer[take.transfer] = take
        self._takes[hold.request_id] = take
        return take

    def pull(self, pull: Pull, now_s: float) -> Take | None:
        """There is room for its blocks. None: it has ended, badly."""
        take = self._takes.get(pull.request_id)
        if take is None:
            self._ended.append(Ended(pull, 0, 0, 0.0, "the prefill engine was lost"))
            return None
        take.pull, take.pulled_s = pull, now_s
        self._settle(take, now_s)
        return take

    def fail_pull(self, pull: Pull, why: str, now_s: float) -> None:
        """After an exception somewhere in ``pull``: it ends once all the same, and not while it is read."""
        take = self._takes.get(pull.request_id)
        if take is not None:
            take.pull = pull
            self.fail(take, why, now_s)
        elif all(ended.pull is not pull for ended in self._ended):
            self._ended.append(Ended(pull, 0, 0, 0.0, why))

    def drop(self, request_id: str, now_s: float) -> None:
        """The request waits for it no more; a pull under way still ends once."""
        take = self._takes.get(request_id)
        if take is not None:
            take.is_private = True
            self.fail(take, LEFT, now_s)

    # What prefill engines say

    def progress(self, progress: Progress, now_s: float) -> Take | None:
        """More blocks are complete. Returns whose. When a message before this one was lost, asks for all of
        it once more."""
        take = self._by_transfer.get(progress.transfer)
        if take is None:
            return None
        if progress.prompt != take.hold.prompt:
            self.fail(take, "the prefill engine computes another prompt under this transfer_id", now_s)
            return None
        if progress.lease == take.over:
            return None  # it was on its way
        if progress.first == 0:
            take.ready = [[] for _ in progress.blocks]
        elif progress.lease != take.lease or progress.first > take.ready_blocks:
            self._to_tell.append((take.key, Want(take.transfer, self._reply)))  # what came before was lost
            return None
        if progress.first < take.ready_blocks or len(progress.blocks) != len(take.ready):
            self.fail(take, "the prefill engine contradicts itself", now_s)
            return None
        take.known_s = now_s
        take.lease, take.slot, take.final = progress.lease, progress.slot, progress.final
        for known, fresh in zip(take.ready, progress.blocks, strict=True):
            known.extend(fresh)
        self._settle(take, now_s)
        return take

    def known(self, known: Known, now_s: float) -> list[tuple[Hashable, Want]]:
        """The prefill engine knows these transfers. Asks again for those of which a message was lost, which
        happens when a line dies and is made anew."""
        again: list[tuple[Hashable, Want]] = []
        for transfer, lease, blocks in known.transfers:
            take = self._by_transfer.get(transfer)
            if take is None:
                continue
            take.known_s = now_s
            if blocks and lease != take.over and (blocks > take.ready_blocks or lease != take.lease):
                again.append((take.key, Want(transfer, self._reply)))
        return again

    def gone(self, gone: Gone, now_s: float) -> None:
        """Nothing more comes."""
        take = self._by_transfer.get(gone.transfer)
        if take is not None:
            take.is_gone = True
            self.fail(take, gone.why, now_s)

    # Reading

    def next_piece(self, request_id: str) -> Piece | None:
        """What to read next of this request; its reader calls ``read`` afterwards, whatever happened."""
        take = self._takes.get(request_id)
        if take is None or take.pull is None or take.error:
            return None
        first, ready = take.pull.first, min(take.ready_blocks - take.pull.first, take.pull.blocks)
        if take.again and take.again[-1][1] <= ready:
            start, stop = take.again.pop()
        else:
            start, stop = take.claimed, min(ready, take.claimed + self._piece_blocks)
            if stop <= start:
                return None
            take.claimed = stop
        take.reading += 1
        return Piece(
            request_id,
            start,
            take.lease,
            take.slot,
            slice_blocks(take.ready, first + start, first + stop),
            slice_blocks(take.pull.block_ids, start, stop),
        )

    def read(
        self, piece: Piece, nbytes: int, error: str, now_s: float, *, is_lease_over: bool = False
    ) -> None:
        """A piece was read. error: why not, or ""; it counts unless the lease was replaced meanwhile.
        is_lease_over: that is the error. Of a transfer the prefill engine then says more: it was preempted
        and begins anew, or nothing more comes."""
        take = self._takes.get(piece.request_id)
        if take is None:
            return
        take.reading -= 1
        if not error:
            take.arrived[piece.start] = piece.start + piece.blocks
            while take.good in take.arrived:
                take.good = take.arrived.pop(take.good)
            take.bytes += nbytes
        elif take.lease != piece.lease or (is_lease_over and take.transfer):
            take.again.append((piece.start, piece.start + piece.blocks))
            if take.lease == piece.lease:
                take.over, take.lease, take.ready, take.final = take.lease, 0, [], False
        else:
            take.error = take.error or error
        self._settle(take, now_s)

    def is_held(self, source: Source) -> bool:
        """Whether a request here takes this."""
        if isinstance(source, Offer):
            return any(take.lease == source.lease for take in self._takes.values())
        return source.transfer in self._by_transfer

    def is_read(self, request_id: str) -> bool:
        """Whether a piece of this request is being read."""
        take = self._takes.get(request_id)
        return take is not None and take.reading > 0

    # Ends

    def fail(self, take: Take, why: str, now_s: float) -> None:
        """Nothing more will come; what is here stays good."""
        take.error = take.error or why
        self._settle(take, now_s)

    def fail_line(self, key: Hashable, why: str, now_s: float) -> None:
        """The line to a prefill engine is dead."""
        for take in [take for take in self._takes.values() if take.key == key]:
            self.fail(take, why, now_s)

    def take_ended(self) -> list[Ended]:
        """Pulls that ended since the last call, each once."""
        ended, self._ended = self._ended, []
        return ended

    def take_lost(self) -> set[str]:
        """Requests for which nothing will come, known before there was room for them."""
        lost, self._lost = self._lost, set()
        return lost

    def take_to_tell(self) -> list[tuple[Hashable, Done | Want]]:
        """What prefill engines are to be told: they are needed no more, or are to say all of it again."""
        to_tell, self._to_tell = self._to_tell, []
        return to_tell

    @property
    def has_news(self) -> bool:
        return bool(self._ended or self._lost)

    # Time

    def tick(self, now_s: float) -> list[tuple[Hashable, Here]]:
        """Signs of life, by line; gives up on transfers that their prefill engine does not know."""
        for take in list(self._by_transfer.values()):
            if now_s - take.known_s > self._silence_s:
                self.fail(take, f"the prefill engine knew nothing of it for {self._silence_s:g} s", now_s)
        by_line: dict[Hashable, Here] = {}
        for take in self._takes.values():
            here = by_line.setdefault(take.key, Here(self._reply, [], []))
            if take.transfer:
                here.transfers.append(take.transfer)
            else:
                here.leases.append(take.lease)
        return list(by_line.items())

    # The parts

    def _settle(self, take: Take, now_s: float) -> None:
        """Ends a take that has all that it needs, or will not get it. Not while it is read: until then its
        blocks are written to."""
        if take.reading:
            return
        if take.pull is not None and take.good >= take.pull.blocks:
            take.error = ""
        elif not take.error and take.final and take.ready_blocks < take.hold.blocks:
            take.error = "the prefill engine offers too few blocks"
        elif not take.error:
            return
        del self._takes[take.hold.request_id]
        if take.transfer:
            del self._by_transfer[take.transfer]
        if not take.is_gone and not self.is_held(take.hold.source):  # by another request, of n=2 say
            why = "" if take.is_private else take.error[:WHY_MAX]
            self._to_tell.append((take.key, Done(take.lease, take.transfer, why, self._reply)))
        if take.pull is None:
            self._lost.add(take.hold.request_id)
        else:
            seconds = now_s - take.pulled_s
            self._ended.append(Ended(take.pull, take.good, take.bytes, seconds, take.error))
