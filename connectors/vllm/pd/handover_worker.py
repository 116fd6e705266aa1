"""A worker's end of the hand-over: its transfer engine with the KV memory registered, its lease table, one
thread that receives messages, and the connections to others.

The worker's own thread calls ``begin``, ``pull`` and ``computed`` within a step and takes the ends with
``take_ended``; none of them waits. ``producer_worker`` and ``consumer_worker`` decide under one lock; this
file carries their decisions out.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from moonpool import _native
from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.device_memory import DeviceMemory
from moonpool.connectors.vllm.pd import bootstrap, wire
from moonpool.connectors.vllm.pd.consumer_worker import (
    DEVICE_PIECE_BLOCKS,
    OLDER,
    PIECE_BLOCKS,
    ConsumerWorker,
    Ended,
)
from moonpool.connectors.vllm.pd.copy_ranges import (
    Held,
    Table,
    bytes_of_groups,
    needed_blocks,
    pair_columns,
    ranges_of,
    tables_of,
)
from moonpool.connectors.vllm.pd.incoming import IncomingRequest, PartSource, Piece
from moonpool.connectors.vllm.pd.kv_transfer_params import LEFT, Meeting, Offer, Source
from moonpool.connectors.vllm.pd.lease_table import SCRATCH, LeaseTable
from moonpool.connectors.vllm.pd.leases import SLOTS
from moonpool.connectors.vllm.pd.peer_connection import PeerConnection, PeerConnections
from moonpool.connectors.vllm.pd.peers import Met, PeerFinder
from moonpool.connectors.vllm.pd.producer_worker import Outbox, ProducerWorker
from moonpool.connectors.vllm.pd.queued_forwards import QueuedForwards
from moonpool.connectors.vllm.pd.rank_pairs import Sizes
from moonpool.connectors.vllm.pd.step_plan import Grown, HandoverStep, Hold, Refuse
from moonpool.connectors.vllm.pd.wire import Description, Done, Gone, Heartbeat, Known, Progress, Want
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.core.errors import Closed, Error, Unavailable
from moonpool.core.service.data_tls import EngineTls
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.types import Batch, Column

HEARTBEAT_S = 1.0
# What a step copies itself: this takes less than waking a thread twice. In a step that computes nothing only
# requests that come meanwhile wait for it, some milliseconds.
INLINE_BYTES = 4 << 20
INLINE_IDLE_BYTES = 32 << 20
LAST_PIECE_S = 0.002
PIECE_BYTES = 8 << 20  # heartbeats wait for one piece at most: 0.7 s at 100 Mbit/s
# Between two pieces of a device's memory this thread waits for the device and looks at the lease, in which
# time it could have copied megabytes. 0.5 s at 1 Gbit/s, and as much as the card is given at once.
DEVICE_PIECE_BYTES = 64 << 20
OWN_SCRATCH = SCRATCH - 1
CLOSE_TIMEOUT_S = 10.0
DEVICE_LOOK_S = 0.1  # how often a thread that waits for the device looks whether to end


class LeaseOver(Refused):
    """The lease ended before the read: the bytes may be another request's KV."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """This worker's KV memory.

    engine_id: vLLM's name for this engine.
    fingerprint: of its KV, 32 bytes.
    spans: (address, bytes) of what to register.
    held: its objects of a block.
    sizes: how many workers this engine has.
    rank, tp_rank, pp_rank: which of them this is.
    has_windows: whether NULL_BLOCK stands for blocks that sliding windows do not need.
    """

    engine_id: str
    fingerprint: bytes
    spans: tuple[tuple[int, int], ...]
    held: Held
    sizes: Sizes
    rank: int
    tp_rank: int
    pp_rank: int
    has_windows: bool = False


class HandoverWorker:
    """This worker's end of all hand-overs."""

    def __init__(
        self,
        memory: KvMemory,
        *,
        listen: str,
        transports: Sequence[str] | None,
        tenant: str,
        silence_s: float,
        log: logging.Logger,
        device: DeviceMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: EngineTls | None = None,
    ) -> None:
        """device: on which the KV memory lies, None: on the host. tls: as of TransferEngine. Raises
        ConfigError for an address that cannot be listened on, Unavailable when the engine cannot move memory
        of the device."""
        self._memory = memory
        self._device = device
        self._before: dict[str, _native.Mark | Error] = {}  # of each pull: before it nothing is written
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._piece_ended = threading.Condition(self._lock)
        self._block_bytes = sum(row[2] for column in memory.held.rows for row in column)
        self._groups = 1 + max((column.group for column in memory.held.columns), default=-1)
        # By the number of a connection, for its description: what each request reads over it.
        self._tables: dict[int, tuple[Description, dict[PartSource, tuple[Table, ...]]]] = {}
        self._met: dict[Hashable, Met] = {}  # by the connection that asked the bootstrap page
        self._silence_s = silence_s
        self._unmet: list[IncomingRequest] = []  # those for which the bootstrap page was not read yet
        self._finder = PeerFinder(
            memory.sizes,
            tp_rank=memory.tp_rank,
            pp_rank=memory.pp_rank,
            columns=memory.held.columns,
            has_windows=memory.has_windows,
        )
        self._engine = TransferEngine(
            f"vllm-{memory.engine_id}-{memory.rank}",
            listen=listen,
            transports=transports,
            tenant=tenant,
            metadata="",
            tls=tls,
        )
        for address, length in memory.spans:
            self._engine.register((address, length))
        self._lease_table = LeaseTable(
            self._engine,
            Description(
                engine_id=memory.engine_id,
                fingerprint=memory.fingerprint,
                columns=[
                    (one.group, one.first_head, one.heads, one.first_layer, one.layers)
                    for one in memory.held.columns
                ],
                rows=memory.held.rows,
                slots=0,
                slot_count=SLOTS,
                counts_readers=True,
                layers=[list(each) for each in memory.held.layers],
            ),
        )
        self.address = self._engine.addresses[0]
        self._producer = ProducerWorker(self._lease_table.set, silence_s=silence_s, address=self.address)
        blocks_max, bytes_max = (
            (PIECE_BLOCKS, PIECE_BYTES) if device is None else (DEVICE_PIECE_BLOCKS, DEVICE_PIECE_BYTES)
        )
        piece_blocks = min(blocks_max, max(1, bytes_max // self._block_bytes))
        group_bytes = [0] * self._groups
        for column, rows in zip(memory.held.columns, memory.held.rows, strict=True):
            group_bytes[column.group] += sum(row[2] for row in rows)
        self._consumer = ConsumerWorker(
            reply=self.address,
            silence_s=silence_s,
            piece_blocks=piece_blocks,
            group_bytes=tuple(group_bytes),
        )
        self._connections = PeerConnections(self._engine, self._connection_ended, clock=clock)
        self._heartbeat_s = min(HEARTBEAT_S, silence_s / 4)
        self._forwards = None if device is None else QueuedForwards(self.revoke, log)
        self._next_heartbeat_s = 0.0
        self._closing = False
        self.dropped_messages = 0
        self._repeats = Repeats(clock)
        self._listener = threading.Thread(target=self._listen, name="moonpool-handover-listener", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Returns when nothing touches the KV memory any more."""
        with self._lock:
            self._closing = True
            connections = self._connections.all()
        for connection in connections:
            connection.stop()
        if self._forwards is not None:
            self._forwards.close(CLOSE_TIMEOUT_S)
        self._engine.close()
        for thread in connections:
            thread.join(CLOSE_TIMEOUT_S)
        self._listener.join(CLOSE_TIMEOUT_S)

    # A step, on the worker's thread

    def begin(self, step: HandoverStep) -> None:
        """Carries out the part of the step that must precede any use of memory: leases, holds, refusals."""
        with self._lock:
            self._send(self._producer.begin(step.opens, step.ends))
            if self._forwards is not None and self._forwards.is_lost:
                self._send(self._producer.revoke())  # decode computes what it would wait for
            for hold in step.holds:
                self._hold(hold)
            for request_id in step.drops:
                self._consumer.drop(request_id, self._clock())
            for refuse in step.refuses:
                self._refuse(refuse)
            self._tell()

    def pull(self, step: HandoverStep) -> None:
        """Starts the pulls of the step; take_ended reports each once, whatever becomes of it. This thread
        reads what it has time for: alone when that is little, else beside the connection's thread."""
        room = INLINE_IDLE_BYTES if step.is_idle else INLINE_BYTES
        for pull in step.pulls:
            if self._device is not None:
                self._before[pull.request_id] = self._device.before_pulls
            with self._lock:
                incoming = self._consumer.pull(pull, self._clock())
                keys = [] if incoming is None else list(incoming.parts)
                nbytes = pull.blocks * self._block_bytes // max(1, len(keys))
            for key in keys:
                with self._lock:
                    connection = self._connections.find(key)
                    reads_here = (
                        connection is not None
                        and nbytes <= room
                        and connection.is_memory
                        and self._device is None  # whose copies this thread would wait for
                    )
                    if not (reads_here and nbytes <= INLINE_BYTES):
                        self._read_on(pull.request_id, key)
                if connection is not None and reads_here:
                    room -= nbytes
                    with suppress(Error):  # the request has it
                        self._read(connection, pull.request_id, OWN_SCRATCH, _nothing)
                    if step.is_idle:
                        self._await_last_piece(pull.request_id)

    def revoke(self) -> None:
        """Invalidates all leases, after an unexpected exception in ``begin``."""
        with self._lock:
            self._send(self._producer.revoke())

    def fail_pulls(self, step: HandoverStep, why: str) -> None:
        """Ends the pulls of the step, after an unexpected exception in ``pull``."""
        with self._lock:
            for pull in step.pulls:
                self._consumer.fail_pull(pull, why, self._clock())
            self._tell()

    def computed(self, step: HandoverStep) -> None:
        """The forward of the step has ended; on a device, it is queued."""
        if not step.grown:
            return
        if self._device is None or self._forwards is None:
            self._grown(step.grown)
        else:
            self._forwards.then(self._device.mark(), lambda: self._grown(step.grown))

    def _grown(self, grown: tuple[Grown, ...]) -> None:
        with self._lock:
            self._send(self._producer.grown(grown))

    @property
    def has_news(self) -> bool:
        """Whether one of the take_... has something. Asked each step, so without the lock."""
        return self._consumer.has_news or self._producer.has_heartbeats

    def take_ended(self) -> list[Ended]:
        """Pulls that ended since the last call."""
        with self._lock:
            ended = self._consumer.take_ended()
        for one in ended:
            self._before.pop(one.pull.request_id, None)
        return ended

    def take_lost(self) -> set[str]:
        """Requests for which nothing will come, though nothing was pulled yet."""
        with self._lock:
            return self._consumer.take_lost()

    def take_heartbeats(self) -> tuple[set[int], dict[int, int]]:
        """See ProducerWorker.take_heartbeats."""
        with self._lock:
            return self._producer.take_heartbeats()

    @property
    def counters(self) -> dict[str, int]:
        """What the transfer engine moved, by transport."""
        return self._engine.metrics()

    # Decode: the requests that came, under the lock

    def _hold(self, hold: Hold) -> None:
        now_s = self._clock()
        source = hold.source
        key = (source.engine_id, source.bootstrap if isinstance(source, Meeting) else source.ranks)
        incoming = self._consumer.hold(hold, key, now_s)
        if incoming is None:
            return
        peers: Sequence[PartSource] = ()
        try:
            if isinstance(source, Offer):
                peers = self._finder.of_offer(source)
                self._meet(incoming, peers, now_s)
            else:
                self._unmet.append(incoming)
                self._when_found(source, lambda met: self._meet_found(met, incoming, source))
        except Refused as refusal:
            self._consumer.fail(incoming, str(refusal), now_s)
            self._log_refusal(str(refusal))
            self._refuse(Refuse(source, str(refusal), hold.taker))
        except Unavailable as error:
            self._consumer.fail(incoming, str(error), now_s)
            self._log_refusal(str(error))
            if isinstance(source, Offer) and not self._consumer.is_held(source):
                for peer in peers:  # those to which there is a connection
                    self._connections.send(peer.key, self._done(source, peer, str(error), hold.taker))

    def _meet(self, incoming: IncomingRequest, peers: Sequence[PartSource], now_s: float) -> None:
        """The workers that the KV of a request comes from are known. Raises Unavailable, after connecting to
        all others, which can be told so."""
        self._connections.check_room([peer.key for peer in peers])
        errors: list[Unavailable] = []
        for peer in peers:
            try:
                self._connections.get(peer.key, _always(peer.address), reads=True)
            except Unavailable as error:
                errors.append(error)
        if errors:
            raise errors[0]
        for key, want in self._consumer.meet(incoming, peers, now_s):
            self._connections.send(key, want)

    def _when_found(self, meeting: Meeting, then: Callable[[Met], None]) -> None:
        """Has ``then`` done, under the lock, once the prefill engine's workers are known. At once where they
        are: the connection that finds them reads blocks as well, and jobs wait for all reads before them.
        Raises Unavailable."""
        key = (meeting.engine_id, meeting.bootstrap)
        connection = self._connections.get(key, lambda: self._find(key, meeting), reads=True)

        def found(_: PeerConnection) -> None:
            with self._lock:
                then(self._met[key])

        if key in self._met:
            then(self._met[key])
        else:
            connection.post(found)

    def _refuse(self, refuse: Refuse) -> None:
        """Tells the prefill engine that this worker does not need the KV. Others of this engine may: of an
        offer that several requests bring."""
        source, why = refuse.source, refuse.why[: wire.WHY_MAX]
        if self._consumer.is_held(source):
            return  # by another request, which needs it
        if isinstance(source, Offer):
            try:
                peers = self._finder.of_offer(source)
            except Refused:  # by all workers of this engine: none reads
                ranks = source.ranks if self._memory.rank == 0 else ()
                self._send([(address, Done(source.lease, "", why, self.address)) for address in ranks])
            else:
                self._send([(peer.address, self._done(source, peer, why, refuse.taker)) for peer in peers])
        else:
            done = Done(0, source.transfer, why, self.address)
            with suppress(Unavailable):
                self._when_found(source, lambda met: self._tell_found(met, source, done))

    # In the concurrent form, on the thread of the connection that finds the prefill engine's workers

    def _find(self, key: Hashable, meeting: Meeting) -> str:
        """The address of one worker of the prefill engine; remembers the others. Raises Unavailable."""
        workers = bootstrap.find_workers(meeting.bootstrap, meeting.engine_id)
        met = self._finder.of_page(meeting.engine_id, workers, key)
        with self._lock:
            self._met[key] = met
        return met.told[0]

    # Once the bootstrap page was read, under the lock

    def _meet_found(self, met: Met, incoming: IncomingRequest, meeting: Meeting) -> None:
        """Asks the workers for the transfer, or tells them that it is not taken."""
        if all(each is not incoming for each in self._unmet):
            return  # it was done before
        self._unmet = [each for each in self._unmet if each is not incoming]
        now_s = self._clock()
        if not self._consumer.is_here(incoming):  # it left before it was met
            if not self._consumer.is_held(meeting):
                self._tell_left(met, incoming, LEFT)
            return
        if met.refusal:
            self._consumer.fail(incoming, met.refusal, now_s)
            self._log_refusal(met.refusal)
            self._send_done(met, Done(0, meeting.transfer, met.refusal[: wire.WHY_MAX], self.address))
            return
        try:
            self._meet(incoming, met.peers, now_s)
        except Unavailable as error:
            self._consumer.fail(incoming, str(error), now_s)
            self._tell_left(met, incoming, str(error))

    def _find_again(self, now_s: float) -> None:
        """Tries to tell the prefill engine of requests that ended while its page could not be read: each of
        its workers keeps the prompt until all that read from it have said that they do not."""
        self._unmet = [each for each in self._unmet if now_s - each.held_s <= self._silence_s]
        for incoming in list(self._unmet):
            source = incoming.hold.source
            if isinstance(source, Meeting) and not self._consumer.is_here(incoming):
                with suppress(Unavailable):
                    self._when_found(
                        source, functools.partial(self._meet_found, incoming=incoming, meeting=source)
                    )

    def _tell_found(self, met: Met, meeting: Meeting, done: Done) -> None:
        """A prompt is not taken."""
        if not self._consumer.is_held(meeting):
            self._send_done(met, done)

    def _tell_left(self, met: Met, incoming: IncomingRequest, why: str) -> None:
        """Says so for this worker alone: others of this engine may have been met."""
        source, taker = incoming.hold.source, incoming.hold.taker
        self._send([(peer.address, self._done(source, peer, why, taker)) for peer in met.peers])

    def _done(self, source: Source, peer: PartSource, why: str, taker: str) -> Done:
        """This worker needs nothing more of a prefill worker."""
        lease, transfer = (source.lease, "") if isinstance(source, Offer) else (0, source.transfer)
        return Done(lease, transfer, why[: wire.WHY_MAX], self.address, taker, peer.readers)

    def _send_done(self, met: Met, done: Done) -> None:
        self._send([(place, done) for place in met.told])

    def _log_refusal(self, why: str) -> None:
        count = self._repeats.due(why)
        if count:
            self._log.warning("moonpool: a prompt is not handed over: %s%s", why, times(count))

    def _read_on(self, request_id: str, key: Hashable) -> None:
        """Makes the connection read the blocks of a request that are ready at one prefill worker."""
        connection = self._connections.find(key)
        if connection is not None:
            connection.post(
                lambda connection: self._read(
                    connection, request_id, connection.number, lambda: self._between(connection)
                )
            )

    # On a connection's thread, or the worker's

    def _read(
        self, connection: PeerConnection, request_id: str, scratch: int, between: Callable[[], None]
    ) -> None:
        """Reads what is ready, piece by piece. Raises what the transfer raises, which ends the connection.
        scratch: which word this thread may use. between: called after each piece."""
        while True:
            with self._lock:
                piece = self._consumer.next_piece(request_id, connection.key)
            if piece is None:
                return
            nbytes, error, is_lease_over = 0, "it could not be read", False
            group_bytes: tuple[int, ...] = ()
            try:
                nbytes, group_bytes = self._read_piece(connection, piece, scratch)
                error = ""
            except Refused as refusal:
                error, is_lease_over = str(refusal), isinstance(refusal, LeaseOver)
            except Error as failure:
                error = str(failure)
                raise
            finally:  # in any case: until then its blocks count as being written to
                if error:
                    self._engine.wait_for_abandoned_copies()
                with self._lock:
                    self._consumer.read(
                        piece,
                        nbytes,
                        error,
                        self._clock(),
                        group_bytes=group_bytes,
                        is_lease_over=is_lease_over,
                    )
                    self._piece_ended.notify_all()
            between()

    def _between(self, connection: PeerConnection) -> None:
        """Sends what waits, after a piece that the connection's thread read."""
        with self._lock:
            self._tell()
        connection.speak()

    def _await_last_piece(self, request_id: str) -> None:
        """Waits for a piece that the connection's thread reads, if it is the last: shorter than vLLM's pause
        between two steps, which would follow."""
        with self._lock:
            self._piece_ended.wait_for(lambda: not self._consumer.is_read(request_id), LAST_PIECE_S)

    def _read_piece(
        self, connection: PeerConnection, piece: Piece, scratch: int
    ) -> tuple[int, tuple[int, ...]]:
        """The bytes that were read and valid, and the bytes of a block, per group. Raises LeaseOver when they
        may not be, Refused when they cannot be ours."""
        description = connection.description
        assert description is not None
        tables = self._tables_with(connection, description, piece.source)
        if len(piece.there) != len(piece.here) or piece.slot >= description.slot_count:
            raise Refused("the prefill engine's blocks are not of our KV cache groups")
        self._await_use(piece.request_id)
        here, there = piece.here, piece.there
        if self._memory.has_windows:
            here, there = needed_blocks(here, there)
        nbytes = 0
        if tables and any(here):
            columns = (cast(Column, column) for column in ranges_of(tables, here, there))
            nbytes = self._engine.transfer(Batch("read", connection.segment, *columns))
        word = self._lease_table.scratch_address(scratch)
        self._engine.read(connection.segment, word, description.slots + 8 * piece.slot, 8)
        if self._lease_table.scratch(scratch) != piece.lease:
            raise LeaseOver("the prefill engine gave the blocks away before they were read")
        return nbytes, bytes_of_groups(tables, self._groups)

    def _await_use(self, request_id: str) -> None:
        """Waits until the device has ended what was queued on the blocks of a pull before its step. Raises
        Error when it cannot."""
        mark = self._before.get(request_id)
        if mark is None:
            return
        if isinstance(mark, Error):
            raise mark
        while not mark.wait(DEVICE_LOOK_S):
            if self._closing:
                raise Refused("this engine is closed")

    def _tables_with(
        self, connection: PeerConnection, description: Description, source: PartSource
    ) -> tuple[Table, ...]:
        """What a request reads over a connection. Raises Refused for memory that does not go together with
        ours."""
        known = self._tables.get(connection.number)
        if known is None or known[0] is not description:
            known = self._tables[connection.number] = (description, {})
        if source in known[1]:
            return known[1][source]
        memory = self._memory
        key_engine = connection.key[0] if isinstance(connection.key, tuple) else ""
        if description.engine_id != key_engine:
            raise Refused(
                f"another engine ({description.engine_id}) lives at the prefill engine's address now"
            )
        if description.fingerprint != memory.fingerprint:
            raise Refused(
                f"the prefill engine serves another model, other weights, or KV of another form: its "
                f"fingerprint is {description.fingerprint.hex()[:16]}, ours {memory.fingerprint.hex()[:16]}"
            )
        if not description.counts_readers and (source.readers > 1 or source.cuts_layers):
            raise Refused(OLDER)
        there = Held(description.ranges, description.rows, description.layers)
        pairs = pair_columns(source.share, memory.held, there, cuts_layers=source.cuts_layers)
        tables = tables_of(pairs)
        known[1][source] = tables
        return tables

    def _connection_ended(self, connection: PeerConnection, why: str) -> None:
        with self._lock:
            self._connections.forget(connection, why)
            self._met.pop(connection.key, None)
            if not self._closing:
                self._consumer.fail_connection(connection.key, why or "the line was closed", self._clock())
                self._tell()

    # The listener

    def _listen(self) -> None:
        while not self._closing:
            try:
                for note in self._engine.notifications(timeout_s=self._heartbeat_s):
                    self._heard(note.peer, note.message)
                now_s = self._clock()
                if now_s >= self._next_heartbeat_s:
                    self._next_heartbeat_s = now_s + self._heartbeat_s
                    self._tick(now_s)
            except Closed:
                return
            except Exception:  # a thread's boundary: one message is lost, and its transfer times out
                self.dropped_messages += 1
                self._log.exception("moonpool: unexpected error while hearing other engines")
                time.sleep(self._heartbeat_s)

    def _heard(self, peer: str, text: bytes) -> None:
        try:
            message = wire.decode(text)
        except wire.Malformed:
            self.dropped_messages += 1
            return
        now_s = self._clock()
        with self._lock:
            if isinstance(message, Want):
                self._send(self._producer.want(message, now_s))
            elif isinstance(message, Heartbeat):
                self._send(self._producer.heartbeat(message, now_s))
            elif isinstance(message, Done):
                self._producer.done(message, now_s)
                if message.why:
                    self._was_refused(peer, message.why)
            elif isinstance(message, Progress):
                grown = self._consumer.progress(message, now_s)
                if grown is not None:
                    incoming, part = grown
                    self._read_on(incoming.hold.request_id, part.source.key)
            elif isinstance(message, Known):
                for key, want in self._consumer.known(message, now_s):
                    self._connections.send(key, want)
            elif isinstance(message, Gone):
                self._consumer.gone(message, now_s)
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
            self._producer.tick(now_s)
            self._find_again(now_s)
            for key, here in self._consumer.tick(now_s):
                self._connections.send(key, here)
            self._tell()

    # Sending, under the lock

    def _send(self, outbox: Outbox) -> None:
        """Sends to decode engines. One that cannot be reached has lost its hand-over and times out."""
        for address, message in outbox:
            try:
                self._connections.get(("", address), _always(address), reads=False).send(message)
            except Unavailable as error:
                self._log.debug("moonpool: %s was not told: %s", address, error)

    def _tell(self) -> None:
        """Sends to prefill engines which hand-overs are over, or are to be sent again."""
        for key, message in self._consumer.take_to_tell():
            self._connections.send(key, message)


def _nothing() -> None:
    """A step that reads sends nothing between pieces: that would wake a thread that competes with it. The
    next step comes at once and begins with what waits."""


def _always(address: str) -> Callable[[], str]:
    return lambda: address
