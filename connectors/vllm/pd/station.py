"""A worker's end of the hand-over: its transfer engine with the KV memory registered, its page, one thread
that hears messages, and the lines to others.

The worker's own thread calls ``begin``, ``pull`` and ``computed`` within a step and takes the ends with
``take_ended``; none of them waits. What happens when is decided in ``gives`` and ``takes``, under one lock;
this file carries their effects out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.pd import bootstrap, wire
from moonpool.connectors.vllm.pd.copies import Table, pair_rows, ranges_of, tables_of
from moonpool.connectors.vllm.pd.fields import LEFT, Offer, Source
from moonpool.connectors.vllm.pd.gives import Gives, Outbox
from moonpool.connectors.vllm.pd.leases import SLOTS
from moonpool.connectors.vllm.pd.lines import Line, Lines
from moonpool.connectors.vllm.pd.page import SCRATCH, Page
from moonpool.connectors.vllm.pd.plans import HandoverStep, Hold, Refuse
from moonpool.connectors.vllm.pd.takes import PIECE_BLOCKS, Ended, Piece, Take, Takes
from moonpool.connectors.vllm.pd.wire import Description, Done, Gone, Here, Known, Progress, Want
from moonpool.connectors.vllm.pool import Rows
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.core.errors import Closed, Error, Unavailable
from moonpool.core.store.keys import Ranges
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.types import Batch, Column

SIGN_S = 1.0
# What a step copies itself: this takes less than waking a thread twice. In a step that computes nothing only
# requests that come meanwhile wait for it, some milliseconds.
INLINE_BYTES = 4 << 20
INLINE_IDLE_BYTES = 32 << 20
LAST_PIECE_S = 0.002
PIECE_BYTES = 8 << 20  # signs of life wait for no more, whatever moves it: 0.7 s at 100 Mbit/s
OWN_SCRATCH = SCRATCH - 1
CLOSE_TIMEOUT_S = 10.0


class LeaseOver(Refused):
    """What was read may be another request's KV by now."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """This worker's KV. spans: (address, bytes) of what to register; columns, rows: see pool.PartTable."""

    engine_id: str
    fingerprint: bytes
    spans: tuple[tuple[int, int], ...]
    columns: tuple[Ranges, ...]
    rows: Rows
    rank: int
    tp_rank: int
    pp_rank: int


class Station:
    def __init__(
        self,
        memory: KvMemory,
        *,
        listen: str,
        transports: Sequence[str] | None,
        tenant: str,
        silence_s: float,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for an address that cannot be listened on."""
        self._memory = memory
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._piece_ended = threading.Condition(self._lock)
        self._block_bytes = sum(row[2] for column in memory.rows for row in column)
        self._tables: dict[int, tuple[Description, tuple[Table, ...]]] = {}
        self._engine = TransferEngine(
            f"vllm-{memory.engine_id}-{memory.rank}", listen=listen, transports=transports, tenant=tenant
        )
        for address, length in memory.spans:
            self._engine.register((address, length))
        self._page = Page(
            self._engine,
            Description(
                engine_id=memory.engine_id,
                fingerprint=memory.fingerprint,
                columns=[
                    (one.group, one.first_head, one.heads, one.first_layer, one.layers)
                    for one in memory.columns
                ],
                rows=memory.rows,
                slots=0,
                slot_count=SLOTS,
            ),
        )
        self.address = self._engine.addresses[0]
        self._gives = Gives(self._page.set, silence_s=silence_s)
        piece_blocks = min(PIECE_BLOCKS, max(1, PIECE_BYTES // self._block_bytes))
        self._takes = Takes(reply=self.address, silence_s=silence_s, piece_blocks=piece_blocks)
        self._lines = Lines(self._engine, self._line_ended, clock=clock)
        self._sign_s = min(SIGN_S, silence_s / 4)
        self._next_sign_s = 0.0
        self._closing = False
        self.dropped_messages = 0
        self._repeats = Repeats(clock)
        self._ear = threading.Thread(target=self._listen, name="moonpool-handover-ear", daemon=True)
        self._ear.start()

    def close(self) -> None:
        """Returns when nothing touches the KV memory any more."""
        with self._lock:
            self._closing = True
            lines = self._lines.all()
        for line in lines:
            line.stop()
        self._engine.close()
        for thread in lines:
            thread.join(CLOSE_TIMEOUT_S)
        self._ear.join(CLOSE_TIMEOUT_S)

    # A step, on the worker's thread

    def begin(self, step: HandoverStep) -> None:
        """Before anything of the step touches memory."""
        with self._lock:
            self._send(self._gives.begin(step.opens, step.ends))
            for hold in step.holds:
                self._hold(hold)
            for request_id in step.drops:
                self._takes.drop(request_id, self._clock())
            for refuse in step.refuses:
                self._refuse(refuse)
            self._tell()

    def pull(self, step: HandoverStep) -> None:
        """Starts the pulls of the step; each is reported by take_ended once, whatever becomes of it. This
        thread reads what it has time for: alone when that is little, else side by side with the line's."""
        room = INLINE_IDLE_BYTES if step.is_idle else INLINE_BYTES
        for pull in step.pulls:
            nbytes = pull.blocks * self._block_bytes
            with self._lock:
                take = self._takes.pull(pull, self._clock())
                line = None if take is None else self._lines.find(take.key)
                reads_here = line is not None and nbytes <= room and line.is_memory
                if take is not None and not (reads_here and nbytes <= INLINE_BYTES):
                    self._read_on(take)
            if line is not None and reads_here:
                room -= nbytes
                with suppress(Error):  # it is said in the take
                    self._read(line, pull.request_id, OWN_SCRATCH, _nothing)
                if step.is_idle:
                    self._await_last_piece(pull.request_id)

    def revoke(self) -> None:
        """After an unexpected exception in ``begin``: no lease is valid any more."""
        with self._lock:
            self._send(self._gives.revoke())

    def fail_pulls(self, step: HandoverStep, why: str) -> None:
        """After an unexpected exception in ``pull``: those of the step end once all the same."""
        with self._lock:
            for pull in step.pulls:
                self._takes.fail_pull(pull, why, self._clock())
            self._tell()

    def computed(self, step: HandoverStep) -> None:
        """The forward of the step has ended."""
        if step.grown:
            with self._lock:
                self._send(self._gives.grown(step.grown))

    @property
    def has_news(self) -> bool:
        """Whether one of the take_... has something. Asked each step, so without the lock."""
        return self._takes.has_news or self._gives.has_signs

    def take_ended(self) -> list[Ended]:
        """Pulls that ended since the last call."""
        with self._lock:
            return self._takes.take_ended()

    def take_lost(self) -> set[str]:
        """Requests for which nothing will come, though nothing was pulled yet."""
        with self._lock:
            return self._takes.take_lost()

    def take_signs(self) -> tuple[set[int], dict[int, int]]:
        """See Gives.take_signs."""
        with self._lock:
            return self._gives.take_signs()

    @property
    def counters(self) -> dict[str, int]:
        """What the transfer engine moved, by transport."""
        return self._engine.metrics()

    # Decode: the requests that came, under the lock

    def _hold(self, hold: Hold) -> None:
        now_s = self._clock()
        source = hold.source
        key = self._key_of(source)
        take = self._takes.hold(hold, key, now_s)
        if take is None:
            return
        try:
            line = self._lines.get(key, lambda: self._find(source), reads=True)
        except Unavailable as error:
            self._takes.fail(take, str(error), now_s)
            return
        if take.transfer:
            line.send(Want(take.transfer, self.address))

    def _refuse(self, refuse: Refuse) -> None:
        """Tells the prefill engine, whose workers may be more or fewer than ours, that it need not wait."""
        source, why = refuse.source, refuse.why[: wire.WHY_MAX]
        if self._takes.is_held(source):
            return  # by another request, which needs it
        if isinstance(source, Offer):
            if self._memory.rank == 0:
                done = Done(source.lease, "", why, self.address)
                self._send([(address, done) for address in source.ranks])
        else:
            with suppress(Unavailable):
                line = self._lines.get(self._key_of(source), lambda: self._find(source), reads=True)
                line.send(Done(0, source.transfer, why, self.address))

    def _key_of(self, source: Source) -> Hashable:
        """Of the line to our counterpart there."""
        if isinstance(source, Offer):
            return (source.engine_id, source.ranks[self._memory.rank])
        return (source.engine_id, source.bootstrap)

    def _find(self, source: Source) -> str:
        """The address of our counterpart there. On a line's thread; raises Unavailable."""
        if isinstance(source, Offer):
            return source.ranks[self._memory.rank]
        return bootstrap.find_worker(
            source.bootstrap, source.engine_id, tp_rank=self._memory.tp_rank, pp_rank=self._memory.pp_rank
        )

    def _read_on(self, take: Take) -> None:
        """Has the line look what there is to read of a take."""
        line = self._lines.find(take.key)
        if line is not None:
            request_id = take.hold.request_id
            line.post(lambda line: self._read(line, request_id, line.number, lambda: self._between(line)))

    # On a line's thread, or the worker's

    def _read(self, line: Line, request_id: str, scratch: int, between: Callable[[], None]) -> None:
        """Reads what is ready, piece by piece. Raises what the transfer raises, which ends the line. scratch:
        which word this thread may use; between: called after each piece."""
        while True:
            with self._lock:
                piece = self._takes.next_piece(request_id)
            if piece is None:
                return
            nbytes, error, is_lease_over = 0, "it could not be read", False
            try:
                nbytes = self._read_piece(line, piece, scratch)
                error = ""
            except Refused as refusal:
                error, is_lease_over = str(refusal), isinstance(refusal, LeaseOver)
            except Error as failure:
                error = str(failure)
                raise
            finally:  # whatever happened: until this is said, its blocks count as being written to
                with self._lock:
                    self._takes.read(piece, nbytes, error, self._clock(), is_lease_over=is_lease_over)
                    self._piece_ended.notify_all()
            between()

    def _between(self, line: Line) -> None:
        """After a piece that the line's thread read: what others wait for."""
        with self._lock:
            self._tell()
        line.speak()

    def _await_last_piece(self, request_id: str) -> None:
        """When all that is left is on its way on the line's thread: shorter than vLLM's pause between two
        steps, which would follow."""
        with self._lock:
            self._piece_ended.wait_for(lambda: not self._takes.is_read(request_id), LAST_PIECE_S)

    def _read_piece(self, line: Line, piece: Piece, scratch: int) -> int:
        """The bytes that were read and valid. Raises LeaseOver when they may not be, Refused when they cannot
        be ours."""
        description = line.description
        assert description is not None
        tables = self._tables_with(line, description)
        if len(piece.there) != len(piece.here) or piece.slot >= description.slot_count:
            raise Refused("the prefill engine's blocks are not of our KV cache groups")
        columns = (cast(Column, column) for column in ranges_of(tables, piece.here, piece.there))
        nbytes = self._engine.transfer(Batch("read", line.segment, *columns))
        word = self._page.scratch_address(scratch)
        self._engine.read(line.segment, word, description.slots + 8 * piece.slot, 8)
        if self._page.scratch(scratch) != piece.lease:
            raise LeaseOver("the prefill engine gave the blocks away before they were read")
        return nbytes

    def _tables_with(self, line: Line, description: Description) -> tuple[Table, ...]:
        known = self._tables.get(line.number)
        if known is not None and known[0] is description:
            return known[1]
        memory = self._memory
        key_engine = line.key[0] if isinstance(line.key, tuple) else ""
        if description.engine_id != key_engine:
            raise Refused(
                f"another engine ({description.engine_id}) lives at the prefill engine's address now"
            )
        if description.fingerprint != memory.fingerprint:
            raise Refused(
                f"the prefill engine serves another model, other weights, or KV of another form: its "
                f"fingerprint is {description.fingerprint.hex()[:16]}, ours {memory.fingerprint.hex()[:16]}"
            )
        if description.ranges != memory.columns or len(description.rows) != len(memory.rows):
            raise Refused(
                "the prefill engine's worker holds other heads or layers than ours; a hand-over needs equal "
                "tensor- and pipeline-parallel sizes"
            )
        tables = tables_of(pair_rows(memory.columns, memory.rows, description.rows))
        self._tables[line.number] = (description, tables)
        return tables

    def _line_ended(self, line: Line, why: str) -> None:
        with self._lock:
            self._lines.forget(line, why)
            if not self._closing:
                self._takes.fail_line(line.key, why or "the line was closed", self._clock())
                self._tell()

    # The ear

    def _listen(self) -> None:
        while not self._closing:
            try:
                for note in self._engine.notifications(timeout_s=self._sign_s):
                    self._heard(note.peer, note.message)
                now_s = self._clock()
                if now_s >= self._next_sign_s:
                    self._next_sign_s = now_s + self._sign_s
                    self._tick(now_s)
            except Closed:
                return
            except Exception:  # a thread's boundary: one message is lost, what it was about times out
                self.dropped_messages += 1
                self._log.exception("moonpool: unexpected error while hearing other engines")
                time.sleep(self._sign_s)  # should it last

    def _heard(self, peer: str, text: bytes) -> None:
        try:
            message = wire.decode(text)
        except wire.Malformed:
            self.dropped_messages += 1
            return
        now_s = self._clock()
        with self._lock:
            if isinstance(message, Want):
                self._send(self._gives.want(message, now_s))
            elif isinstance(message, Here):
                self._send(self._gives.here(message, now_s))
            elif isinstance(message, Done):
                self._gives.done(message, now_s)
                if message.why:
                    self._was_refused(peer, message.why)
            elif isinstance(message, Progress):
                take = self._takes.progress(message, now_s)
                if take is not None:
                    self._read_on(take)
            elif isinstance(message, Known):
                for key, want in self._takes.known(message, now_s):
                    line = self._lines.find(key)
                    if line is not None:
                        line.send(want)
            elif isinstance(message, Gone):
                self._takes.gone(message, now_s)
            self._tell()

    def _was_refused(self, peer: str, why: str) -> None:
        """A client that leaves is no fault of anything, and there are many."""
        count = self._repeats.due(why)
        if count:
            self._log.log(
                logging.INFO if why == LEFT else logging.WARNING,
                "moonpool: %s did not take a prompt over: %s%s",
                " ".join(peer.split()),
                " ".join(why.split()),
                times(count),
            )

    def _tick(self, now_s: float) -> None:
        with self._lock:
            self._gives.tick(now_s)
            for key, here in self._takes.tick(now_s):
                line = self._lines.find(key)
                if line is not None:
                    line.send(here)
            self._tell()

    # Sending, under the lock

    def _send(self, outbox: Outbox) -> None:
        """To decode engines. One that cannot be reached has lost its hand-over, and finds out by itself."""
        for address, message in outbox:
            try:
                self._lines.get(("", address), _always(address), reads=False).send(message)
            except Unavailable as error:
                self._log.debug("moonpool: %s was not told: %s", address, error)

    def _tell(self) -> None:
        """Tells prefill engines what is needed no more, or once more."""
        for key, message in self._takes.take_to_tell():
            line = self._lines.find(key)
            if line is not None:
                line.send(message)


def _nothing() -> None:
    """A step that reads says nothing meanwhile: it would wake a thread that takes turns with it. The next
    step comes at once, and begins with what is over."""


def _always(address: str) -> Callable[[], str]:
    return lambda: address
