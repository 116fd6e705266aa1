"""Decode's half of the hand-over beside the memory: which blocks are ready at the prefill engine, which are
read next, and how each pull ended. Pure: plans, messages and ends of reads go in; messages and pieces to read
come out. The owner's lock guards it.

    an IncomingRequest, block by block of what its request needs:

    | local prefix | good: here | claimed: being read | ready: complete at prefill | not computed yet |
    0            first                                                                           needed

Several threads may read pieces of one request at a time. A piece that arrives behind one that is still being
read counts when that one has arrived, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from moonpool.connectors.vllm.pd.kv_transfer_params import LEFT, BlockIds, Offer, Source, slice_blocks
from moonpool.connectors.vllm.pd.step_plan import Hold, Pull
from moonpool.connectors.vllm.pd.wire import WHY_MAX, Done, Gone, Heartbeat, Known, Progress, Want

PIECE_BLOCKS = 16  # at most; between two pieces a pull can be given up, and messages go out
DEVICE_PIECE_BLOCKS = 128  # the same, where the KV lies on a device


@dataclass(slots=True)
class IncomingRequest:
    """A request whose KV comes from a prefill engine.

    hold: what the request needs, and from where.
    key: connection to the prefill engine's worker.
    known_s: when the prefill engine last said that it knows the transfer, in seconds of the clock.
    transfer: id in the concurrent form; "" in the two-step form.
    lease, slot: under which the blocks are kept; 0 until the prefill engine has told it.
    over: the last lease that was seen to have ended.
    ready: remote ids of complete blocks, per KV cache group.
    final: whether ``ready`` is all that comes.
    pull: the local blocks, once there is room; pulled_s: when.
    good: leading blocks of the pull that are here.
    claimed: leading blocks of the pull that were given to readers.
    arrived: pieces behind a gap, first block -> end.
    again: pieces to be read once more, as (first block, end).
    bytes: that were read. reading: pieces under way.
    error: why nothing more comes, or "".
    is_private: whether ``error`` concerns this engine alone, so that the prefill engine is not told.
    is_gone: whether the prefill engine itself ended the transfer.
    """

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
        """Leading blocks that are complete at the prefill engine, in all groups."""
        return min((len(ids) for ids in self.ready), default=0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks to read next, at the prefill engine and here, under a lease.

    start: index in the pull of the first of them.
    """

    request_id: str
    start: int
    lease: int
    slot: int
    there: BlockIds
    here: BlockIds

    @property
    def blocks(self) -> int:
        """Blocks of the piece."""
        return len(self.here[0])


@dataclass(frozen=True, slots=True)
class Ended:
    """A pull that has ended.

    good: leading blocks of it that are here.
    error: why not all, or "".
    """

    pull: Pull
    good: int
    bytes: int
    seconds: float
    error: str


class ConsumerWorker:
    """The requests whose KV comes from prefill engines, and the pieces to read next."""

    def __init__(self, *, reply: str, silence_s: float, piece_blocks: int = PIECE_BLOCKS) -> None:
        """reply: the address of this worker.
        silence_s: seconds without a word of the prefill engine after which a transfer has failed.
        piece_blocks: blocks that are read at once.
        """
        self._reply = reply
        self._piece_blocks = piece_blocks
        self._silence_s = silence_s
        self._requests: dict[str, IncomingRequest] = {}
        self._by_transfer: dict[str, IncomingRequest] = {}
        self._ended: list[Ended] = []
        self._lost: set[str] = set()
        self._to_tell: list[tuple[Hashable, Done | Want]] = []

    def __len__(self) -> int:
        return len(self._requests)

    # Events of the scheduler's half

    def hold(self, hold: Hold, key: Hashable, now_s: float) -> IncomingRequest | None:
        """A request came. Returns its state, or None when another request takes the same transfer."""
        incoming = IncomingRequest(hold, key, now_s)
        if isinstance(hold.source, Offer):
            incoming.lease, incoming.slot, incoming.final = hold.source.lease, hold.source.slot, True
            incoming.ready = [list(ids) for ids in hold.source.blocks]
        else:
            incoming.transfer = hold.source.transfer
            if incoming.transfer in self._by_transfer:
                self._lost.add(hold.request_id)
                return None
            self._by_transfer[incoming.transfer] = incoming
        self._requests[hold.request_id] = incoming
        return incoming

    def pull(self, pull: Pull, now_s: float) -> IncomingRequest | None:
        """There is room for its blocks. None: it has ended, badly."""
        incoming = self._requests.get(pull.request_id)
        if incoming is None:
            self._ended.append(Ended(pull, 0, 0, 0.0, "the prefill engine was lost"))
            return None
        incoming.pull, incoming.pulled_s = pull, now_s
        self._settle(incoming, now_s)
        return incoming

    def fail_pull(self, pull: Pull, why: str, now_s: float) -> None:
        """``pull`` raised: the pull ends once all the same, and not while it is read."""
        incoming = self._requests.get(pull.request_id)
        if incoming is not None:
            incoming.pull = pull
            self.fail(incoming, why, now_s)
        elif all(ended.pull is not pull for ended in self._ended):
            self._ended.append(Ended(pull, 0, 0, 0.0, why))

    def drop(self, request_id: str, now_s: float) -> None:
        """The engine waits for the request no more; a pull under way still ends once."""
        incoming = self._requests.get(request_id)
        if incoming is not None:
            incoming.is_private = True
            self.fail(incoming, LEFT, now_s)

    # Messages of prefill engines

    def progress(self, progress: Progress, now_s: float) -> IncomingRequest | None:
        """More blocks are complete. Returns whose. When a message before this one was lost, asks for all of
        it once more."""
        incoming = self._by_transfer.get(progress.transfer)
        if incoming is None:
            return None
        if progress.prompt != incoming.hold.prompt:
            self.fail(incoming, "the prefill engine computes another prompt under this transfer_id", now_s)
            return None
        if progress.lease == incoming.over:
            return None  # it was on its way
        if progress.first == 0:
            incoming.ready = [[] for _ in progress.blocks]
        elif progress.lease != incoming.lease or progress.first > incoming.ready_blocks:
            self._to_tell.append(
                (incoming.key, Want(incoming.transfer, self._reply))
            )  # what came before was lost
            return None
        if progress.first < incoming.ready_blocks or len(progress.blocks) != len(incoming.ready):
            self.fail(incoming, "the prefill engine contradicts itself", now_s)
            return None
        incoming.known_s = now_s
        incoming.lease, incoming.slot, incoming.final = progress.lease, progress.slot, progress.final
        for known, fresh in zip(incoming.ready, progress.blocks, strict=True):
            known.extend(fresh)
        self._settle(incoming, now_s)
        return incoming

    def known(self, known: Known, now_s: float) -> list[tuple[Hashable, Want]]:
        """The prefill engine knows these transfers. Asks again for those of which a message was lost, as
        happens when a connection ends and another is made."""
        again: list[tuple[Hashable, Want]] = []
        for transfer, lease, blocks in known.transfers:
            incoming = self._by_transfer.get(transfer)
            if incoming is None:
                continue
            incoming.known_s = now_s
            if (
                blocks
                and lease != incoming.over
                and (blocks > incoming.ready_blocks or lease != incoming.lease)
            ):
                again.append((incoming.key, Want(transfer, self._reply)))
        return again

    def gone(self, gone: Gone, now_s: float) -> None:
        """Nothing more comes."""
        incoming = self._by_transfer.get(gone.transfer)
        if incoming is not None:
            incoming.is_gone = True
            self.fail(incoming, gone.why, now_s)

    # Reading

    def next_piece(self, request_id: str) -> Piece | None:
        """What to read next of this request; its reader calls ``read`` afterwards, whatever happened."""
        incoming = self._requests.get(request_id)
        if incoming is None or incoming.pull is None or incoming.error:
            return None
        first, ready = (
            incoming.pull.first,
            min(incoming.ready_blocks - incoming.pull.first, incoming.pull.blocks),
        )
        if incoming.again and incoming.again[-1][1] <= ready:
            start, stop = incoming.again.pop()
        else:
            start, stop = incoming.claimed, min(ready, incoming.claimed + self._piece_blocks)
            if stop <= start:
                return None
            incoming.claimed = stop
        incoming.reading += 1
        return Piece(
            request_id,
            start,
            incoming.lease,
            incoming.slot,
            slice_blocks(incoming.ready, first + start, first + stop),
            slice_blocks(incoming.pull.block_ids, start, stop),
        )

    def read(
        self, piece: Piece, nbytes: int, error: str, now_s: float, *, is_lease_over: bool = False
    ) -> None:
        """A piece was read. It counts unless the lease was replaced meanwhile.

        error: why it could not be read, or "".
        is_lease_over: whether the error is a lease that has ended. The prefill engine then sends more of a
            transfer (it was preempted and begins again) or ends it.
        """
        incoming = self._requests.get(piece.request_id)
        if incoming is None:
            return
        incoming.reading -= 1
        if not error:
            incoming.arrived[piece.start] = piece.start + piece.blocks
            while incoming.good in incoming.arrived:
                incoming.good = incoming.arrived.pop(incoming.good)
            incoming.bytes += nbytes
        elif incoming.lease != piece.lease or (is_lease_over and incoming.transfer):
            incoming.again.append((piece.start, piece.start + piece.blocks))
            if incoming.lease == piece.lease:
                incoming.over, incoming.lease, incoming.ready, incoming.final = incoming.lease, 0, [], False
        else:
            incoming.error = incoming.error or error
        self._settle(incoming, now_s)

    def is_held(self, source: Source) -> bool:
        """Whether a request here takes this."""
        if isinstance(source, Offer):
            return any(incoming.lease == source.lease for incoming in self._requests.values())
        return source.transfer in self._by_transfer

    def is_read(self, request_id: str) -> bool:
        """Whether a piece of this request is being read."""
        incoming = self._requests.get(request_id)
        return incoming is not None and incoming.reading > 0

    # Ends

    def fail(self, incoming: IncomingRequest, why: str, now_s: float) -> None:
        """No more blocks come; those that are here stay good."""
        incoming.error = incoming.error or why
        self._settle(incoming, now_s)

    def fail_connection(self, key: Hashable, why: str, now_s: float) -> None:
        """The connection to a prefill engine is dead."""
        for incoming in [incoming for incoming in self._requests.values() if incoming.key == key]:
            self.fail(incoming, why, now_s)

    def take_ended(self) -> list[Ended]:
        """Pulls that ended since the last call, each once."""
        ended, self._ended = self._ended, []
        return ended

    def take_lost(self) -> set[str]:
        """Requests for which nothing will come, known before there was room for them."""
        lost, self._lost = self._lost, set()
        return lost

    def take_to_tell(self) -> list[tuple[Hashable, Done | Want]]:
        """Messages for prefill engines: a hand-over is over, or its messages are to be sent again."""
        to_tell, self._to_tell = self._to_tell, []
        return to_tell

    @property
    def has_news(self) -> bool:
        """Whether a pull has ended or a request was lost. Read without the lock."""
        return bool(self._ended or self._lost)

    # Time

    def tick(self, now_s: float) -> list[tuple[Hashable, Heartbeat]]:
        """Heartbeats, by connection; gives up on transfers that their prefill engine does not know."""
        for incoming in list(self._by_transfer.values()):
            if now_s - incoming.known_s > self._silence_s:
                self.fail(incoming, f"the prefill engine knew nothing of it for {self._silence_s:g} s", now_s)
        by_connection: dict[Hashable, Heartbeat] = {}
        for incoming in self._requests.values():
            here = by_connection.setdefault(incoming.key, Heartbeat(self._reply, [], []))
            if incoming.transfer:
                here.transfers.append(incoming.transfer)
            else:
                here.leases.append(incoming.lease)
        return list(by_connection.items())

    # The parts

    def _settle(self, incoming: IncomingRequest, now_s: float) -> None:
        """Ends a request that has all that it needs, or will not get it. Not while it is read: until then its
        blocks are written to."""
        if incoming.reading:
            return
        if incoming.pull is not None and incoming.good >= incoming.pull.blocks:
            incoming.error = ""
        elif not incoming.error and incoming.final and incoming.ready_blocks < incoming.hold.blocks:
            incoming.error = "the prefill engine offers too few blocks"
        elif not incoming.error:
            return
        del self._requests[incoming.hold.request_id]
        if incoming.transfer:
            del self._by_transfer[incoming.transfer]
        if not incoming.is_gone and not self.is_held(
            incoming.hold.source
        ):  # by another request, for example of n=2
            why = "" if incoming.is_private else incoming.error[:WHY_MAX]
            self._to_tell.append((incoming.key, Done(incoming.lease, incoming.transfer, why, self._reply)))
        if incoming.pull is None:
            self._lost.add(incoming.hold.request_id)
        else:
            seconds = now_s - incoming.pulled_s
            self._ended.append(Ended(incoming.pull, incoming.good, incoming.bytes, seconds, incoming.error))
