"""Decode's half of the hand-over beside the memory: which blocks are ready at the prefill engine, which are
read next, and how each pull ended. Pure: plans, messages and ends of reads go in; messages and pieces to read
come out. The owner's lock guards it.

A pull ends when each part of its request (``incoming``) has ended. What fails in one part ends the others,
because a block is of no use without all of its heads.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from moonpool.connectors.vllm.pd.incoming import IncomingPart, IncomingRequest, PartSource, Piece
from moonpool.connectors.vllm.pd.kv_transfer_params import LEFT, Offer, Source
from moonpool.connectors.vllm.pd.step_plan import Hold, Pull
from moonpool.connectors.vllm.pd.wire import WHY_MAX, Done, Gone, Heartbeat, Known, Progress, Want

PIECE_BLOCKS = 16  # at most; between two pieces a pull can be given up, and messages go out
DEVICE_PIECE_BLOCKS = 128  # the same, where the KV lies on a device
OLDER = "the prefill engine runs an older release, which hands over between equal parallel sizes only"
GAPS = "the prefill engine's workers do not hold all heads and layers of this one"


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

    def __init__(
        self,
        *,
        reply: str,
        silence_s: float,
        piece_blocks: int = PIECE_BLOCKS,
        group_bytes: tuple[int, ...] = (),
    ) -> None:
        """reply: the address of this worker.
        silence_s: seconds without a word of the prefill engine after which a transfer has failed.
        piece_blocks: blocks that are read at once.
        group_bytes: of a block here, per KV cache group, which all parts together must give; (): not known.
        """
        self._group_bytes = group_bytes
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
        """A request came; ``meet`` follows. Returns its state, or None when another request takes the same
        transfer.

        key: connection that finds the workers of the prefill engine.
        """
        incoming = IncomingRequest(hold, key, now_s)
        if not isinstance(hold.source, Offer):
            incoming.transfer = hold.source.transfer
            if incoming.transfer in self._by_transfer:
                self._lost.add(hold.request_id)
                return None
            self._by_transfer[incoming.transfer] = incoming
        self._requests[hold.request_id] = incoming
        return incoming

    def meet(
        self, incoming: IncomingRequest, sources: Sequence[PartSource], now_s: float
    ) -> list[tuple[Hashable, Want]]:
        """The workers of the prefill engine are known. Returns what to ask of each, in the concurrent
        form."""
        incoming.is_met = True
        for source in sources:
            part = incoming.parts[source.key] = IncomingPart(source, now_s)
            if isinstance(incoming.hold.source, Offer):
                part.lease, part.slot, part.final = (
                    incoming.hold.source.lease,
                    incoming.hold.source.slot,
                    True,
                )
                part.ready = [list(ids) for ids in incoming.hold.source.blocks]
        if not incoming.transfer:
            return []
        return [(source.key, self._want(incoming, source)) for source in sources]

    def is_here(self, incoming: IncomingRequest) -> bool:
        """Whether the request still waits for its KV."""
        return self._requests.get(incoming.hold.request_id) is incoming

    def pull(self, pull: Pull, now_s: float) -> IncomingRequest | None:
        """There is room for its blocks. None: it has ended, badly."""
        incoming = self._requests.get(pull.request_id)
        if incoming is None:
            self._ended.append(Ended(pull, 0, 0, 0.0, "the prefill engine was lost"))
            return None
        incoming.pull, incoming.pulled_s = pull, now_s
        for part in list(incoming.parts.values()):
            self._settle(incoming, part, now_s)
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
            self.fail(incoming, LEFT, now_s, is_private=True)

    # Messages of prefill engines

    def progress(self, progress: Progress, now_s: float) -> tuple[IncomingRequest, IncomingPart] | None:
        """More blocks are complete. Returns whose. When a message before this one was lost, asks for all of
        it once more."""
        incoming = self._by_transfer.get(progress.transfer)
        part = self._part_of(incoming, progress.worker, now_s)
        if incoming is None or part is None:
            return None
        if progress.prompt != incoming.hold.prompt:
            self.fail(incoming, "the prefill engine computes another prompt under this transfer_id", now_s)
            return None
        if progress.lease == part.over:
            return None  # it was on its way
        if part.lacks(progress):
            self._to_tell.append((part.source.key, self._want(incoming, part.source)))
            return None
        if not part.extend(progress, now_s):
            self.fail(incoming, "the prefill engine contradicts itself", now_s)
            return None
        self._settle(incoming, part, now_s)
        return incoming, part

    def known(self, known: Known, now_s: float) -> list[tuple[Hashable, Want]]:
        """The prefill engine knows these transfers. Asks again for those of which a message was lost, as
        happens when a connection ends and another is made."""
        again: list[tuple[Hashable, Want]] = []
        for transfer, lease, blocks in known.transfers:
            incoming = self._by_transfer.get(transfer)
            part = self._part_of(incoming, known.worker, now_s)
            if incoming is None or part is None:
                continue
            part.known_s = now_s
            if blocks and lease != part.over and (blocks > part.ready_blocks or lease != part.lease):
                again.append((part.source.key, self._want(incoming, part.source)))
        return again

    def gone(self, gone: Gone, now_s: float) -> None:
        """Nothing more comes."""
        incoming = self._by_transfer.get(gone.transfer)
        part = self._part_of(incoming, gone.worker, now_s)
        if incoming is not None and part is not None:
            part.is_gone = True
            self._fail_part(incoming, part, gone.why, now_s)

    # Reading

    def next_piece(self, request_id: str, key: Hashable) -> Piece | None:
        """What to read next of this request from one prefill worker; its reader calls ``read`` afterwards,
        whatever happened."""
        incoming = self._requests.get(request_id)
        part = None if incoming is None else incoming.parts.get(key)
        if incoming is None or incoming.pull is None or part is None:
            return None
        return part.next_piece(incoming.pull, self._piece_blocks)

    def read(
        self,
        piece: Piece,
        nbytes: int,
        error: str,
        now_s: float,
        *,
        group_bytes: tuple[int, ...] = (),
        is_lease_over: bool = False,
    ) -> None:
        """A piece was read.

        error: why it could not be read, or "".
        group_bytes: that are read of each block, per KV cache group.
        is_lease_over: whether the error is a lease that has ended. The prefill engine then sends more of a
            transfer (it was preempted and begins again) or ends it.
        """
        incoming = self._requests.get(piece.request_id)
        part = None if incoming is None else incoming.parts.get(piece.key)
        if incoming is None or part is None:
            return
        begins_again = is_lease_over and bool(incoming.transfer)
        part.read(piece, nbytes, error, group_bytes, begins_again=begins_again)
        self._settle(incoming, part, now_s)

    def is_held(self, source: Source) -> bool:
        """Whether a request here takes this."""
        if isinstance(source, Offer):
            return any(
                isinstance(each.hold.source, Offer) and each.hold.source.lease == source.lease
                for each in self._requests.values()
            )
        return source.transfer in self._by_transfer

    def is_read(self, request_id: str) -> bool:
        """Whether a piece of this request is being read."""
        incoming = self._requests.get(request_id)
        return incoming is not None and incoming.reading > 0

    # Ends

    def fail(self, incoming: IncomingRequest, why: str, now_s: float, *, is_private: bool = False) -> None:
        """No more blocks come; those that are here stay good. is_private: the prefill engine is not told
        why."""
        incoming.error = incoming.error or why
        for part in list(incoming.parts.values()):
            part.is_private |= is_private
            self._fail_part(incoming, part, why, now_s)
        self._end(incoming, now_s)

    def fail_connection(self, key: Hashable, why: str, now_s: float) -> None:
        """The connection to a prefill worker is dead."""
        for incoming in list(self._requests.values()):
            part = incoming.parts.get(key)
            if part is not None:
                self._fail_part(incoming, part, why, now_s)
            elif not incoming.is_met and incoming.key == key:
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
            known_s = min((part.known_s for part in incoming.parts.values()), default=incoming.held_s)
            if now_s - known_s > self._silence_s:
                self.fail(incoming, f"the prefill engine knew nothing of it for {self._silence_s:g} s", now_s)
        by_connection: dict[Hashable, Heartbeat] = {}
        for incoming in self._requests.values():
            for key, part in incoming.parts.items():
                here = by_connection.setdefault(key, Heartbeat(self._reply, [], []))
                if incoming.transfer:
                    here.transfers.append(incoming.transfer)
                else:
                    here.leases.append(part.lease)
        return list(by_connection.items())

    # The parts

    def _part_of(self, incoming: IncomingRequest | None, worker: str, now_s: float) -> IncomingPart | None:
        if incoming is None:
            return None
        if not worker and len(incoming.parts) > 1:
            self.fail(incoming, OLDER, now_s)
            return None
        return incoming.part_of(worker)

    def _want(self, incoming: IncomingRequest, source: PartSource) -> Want:
        return Want(incoming.transfer, self._reply, incoming.hold.taker, source.readers)

    def _fail_part(self, incoming: IncomingRequest, part: IncomingPart, why: str, now_s: float) -> None:
        part.error = part.error or why
        self._settle(incoming, part, now_s)

    def _settle(self, incoming: IncomingRequest, part: IncomingPart, now_s: float) -> None:
        """Ends a part that has all that its request needs, or will not get it. Not while it is read: until
        then its blocks are written to."""
        if part.reading or incoming.parts.get(part.source.key) is not part:
            return
        if incoming.pull is not None and part.good >= incoming.pull.blocks:
            part.error = ""
        elif not part.error and part.final and part.ready_blocks < incoming.hold.blocks:
            part.error = "the prefill engine offers too few blocks"
        elif not part.error:
            return
        incoming.end_part(part)
        if not part.is_gone and not self._is_shared(incoming, part):
            why = "" if part.is_private else part.error[:WHY_MAX]
            done = Done(
                part.lease, incoming.transfer, why, self._reply, incoming.hold.taker, part.source.readers
            )
            self._to_tell.append((part.source.key, done))
        if part.error:
            for other in list(incoming.parts.values()):
                other.is_private = True  # the worker where it failed is told why
                self._fail_part(incoming, other, part.error, now_s)
        self._end(incoming, now_s)

    def _is_shared(self, incoming: IncomingRequest, part: IncomingPart) -> bool:
        """Whether another request takes this part, for example of n=2."""
        found = (each.parts.get(part.source.key) for each in self._requests.values() if each is not incoming)
        return not incoming.transfer and any(
            other is not None and other.lease == part.lease for other in found
        )

    def _end(self, incoming: IncomingRequest, now_s: float) -> None:
        """Reports a request once, when none of its parts is left."""
        if incoming.parts or not self.is_here(incoming):
            return
        del self._requests[incoming.hold.request_id]
        if incoming.transfer:
            del self._by_transfer[incoming.transfer]
        if incoming.pull is None:
            self._lost.add(incoming.hold.request_id)
        else:
            good, seconds = incoming.good or 0, now_s - incoming.pulled_s
            error = incoming.error if good < incoming.pull.blocks else ""
            if good and self._group_bytes not in ((), incoming.group_bytes):
                good, error = 0, GAPS
            self._ended.append(Ended(incoming.pull, good, incoming.bytes, seconds, error))
