"""A transfer: its arguments as columns for the native engine, and its states and end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool.core.errors import Error, InvalidArgument, Timeout, TransferError
from moonpool.core.store.buffers import memory_of
from moonpool.core.store.device_memory import device_memory_of
from moonpool.core.transfer.region import Region
from moonpool.core.transfer.types import Batch, Local, Slice, SliceState, TransferState

if TYPE_CHECKING:
    from moonpool import _native
    from moonpool.core.transfer.segment import Segment

_OPS = {"read": "r", "write": "w"}
# A waiting thread wakes this often to check for Ctrl-C.
WAIT_PIECE_S = 0.25


class Columns(NamedTuple):
    """The first arguments of the native ``transfer`` and ``submit``."""

    segments: int | Sequence[int]
    ops: str | bytes
    local: Any
    remote: Any
    lengths: Any

    @property
    def asked(self) -> int:
        """Bytes, of all slices."""
        return int(sum(self.lengths))


def columns_of(slices: Batch | Sequence[Slice]) -> Columns:
    """Raises InvalidArgument for no slices, columns of different lengths and for ops that are neither read
    nor write.
    """
    if isinstance(slices, Batch):
        return _columns_of_batch(slices)
    if not slices:
        raise InvalidArgument("a transfer needs at least one slice", operation="transfer")
    try:
        ops = "".join(_OPS[item.op] for item in slices)
        segments = [item.segment.handle for item in slices]
    except (AttributeError, KeyError) as error:
        raise InvalidArgument(
            'a transfer takes Slices or a Batch, whose op is "read" or "write"', operation="transfer"
        ) from error
    local = [local_address(item.local, item.length) for item in slices]
    first, same_op = segments[0], ops.count(ops[0]) == len(ops)
    return Columns(
        first if segments.count(first) == len(segments) else segments,
        ops[0] if same_op else ops.encode(),
        local,
        [item.remote for item in slices],
        [item.length for item in slices],
    )


def _columns_of_batch(batch: Batch) -> Columns:
    op, segment, lengths = batch.op, batch.segment, batch.lengths
    columns: list[Any] = [batch.local, batch.remote]
    if isinstance(op, str):
        ops: str | bytes = op_letter(op)
    else:
        ops = "".join(map(op_letter, op)).encode()
        columns.append(ops)
    if isinstance(segment, Sequence):
        segments: int | list[int] = [item.handle for item in segment]
        columns.append(segments)
    else:
        segments = segment.handle
    if not hasattr(lengths, "__len__"):
        lengths = [index(lengths)] * len(batch.local)
    columns.append(lengths)
    counts = {len(column) for column in columns}
    if len(counts) != 1 or 0 in counts:
        raise InvalidArgument(
            f"the columns of a batch have different lengths, or none: {sorted(counts)}", operation="transfer"
        )
    return Columns(segments, ops, batch.local, batch.remote, lengths)


def op_letter(op: str) -> str:
    """The operation as the native engine takes it. Raises InvalidArgument for an unknown one."""
    try:
        return _OPS[op]
    except KeyError:
        raise InvalidArgument(f'an op is "read" or "write", not {op!r}', operation="transfer") from None


def local_address(local: Local, length: int) -> int:
    """The address of ``local``, which must have room for ``length`` bytes."""
    if isinstance(local, int):
        return local
    if isinstance(local, Region):
        address, room = local.address, local.length
    else:
        address, room, *_ = device_memory_of(local) or memory_of(local)
    if length > room:
        raise InvalidArgument(f"{length} bytes do not fit into {room} bytes of local memory")
    return address


def one_slice(segment: Segment, op: str, local: Local, remote: int, length: int | None) -> Columns:
    """Of ``read`` and ``write``. Without a length it is all of ``local``."""
    if length is None:
        if isinstance(local, int):
            raise InvalidArgument("give a length with an address")
        length = (
            local.length
            if isinstance(local, Region)
            else (device_memory_of(local) or memory_of(local)).length
        )
    return Columns(segment.handle, op, [local_address(local, length)], [remote], [length])


class Status(NamedTuple):
    """The native engine's answer about a ticket."""

    state: str
    bytes_done: int
    states: bytes
    error: str
    path: str
    peer: str
    cause: str
    settled: bool


class TransferBase:
    """A submitted transfer. Dropping the reference changes nothing: it goes on.

    Its ticket occupies an entry of the engine's table until it is released, and releasing a running one would
    cancel it; so each facade releases it after its end.
    """

    __slots__ = ("_final", "_native", "_ticket", "bytes_total")

    def __init__(self, native: _native.Engine, ticket: int, bytes_total: int) -> None:
        self._native = native
        self._ticket = ticket
        self._final: Status | None = None
        self.bytes_total = bytes_total

    @property
    def state(self) -> TransferState:
        """The state of the whole transfer now."""
        return TransferState(self._look().state)

    @property
    def done(self) -> bool:
        """Whether it ended, well or not. It never touches local memory afterwards."""
        return self._final is not None or self._look().state != "waiting"

    @property
    def bytes_done(self) -> int:
        """Bytes of the slices that are done."""
        return self._look().bytes_done

    @property
    def slices(self) -> list[SliceState]:
        """The state of each slice, in the order in which they were given."""
        return [SliceState(state) for state in self._look().states]

    @property
    def error(self) -> TransferError | None:
        """Why it failed or was cancelled; None while it waits, and when all slices are done."""
        status = self._look()
        if status.state in ("waiting", "done"):
            return None
        return TransferError(
            status.error,
            operation="transfer",
            peer=status.peer or None,
            path=status.path or None,
            bytes=self.bytes_total,
            bytes_done=status.bytes_done,
            states=status.states,
            settled=status.settled,
            cause=status.cause or None,
        )

    def cancel(self) -> None:
        """Asks for its end; slices that are on their way may still be done. Does nothing after its end."""
        if self._final is None:
            self._native.cancel(self._ticket)

    def __repr__(self) -> str:
        status = self._look()
        return f"{type(self).__name__}({status.state}, {status.bytes_done} of {self.bytes_total} bytes)"

    def _look(self) -> Status:
        if self._final is not None:
            return self._final
        status = Status(*self._native.status(self._ticket))
        if status.state != "waiting":
            self._final = status
            self._forget()
        return status

    def _forget(self) -> None:
        self._native.release(self._ticket)

    def _outcome(self) -> int:
        error = self.error
        if error is not None:
            raise error
        return self._look().bytes_done


class Abandoned:
    """Tickets whose Transfer was garbage collected; the next submit after their end releases them."""

    def __init__(self, native: _native.Engine) -> None:
        self._native = native
        self.tickets: set[int] = set()

    def add(self, ticket: int) -> None:
        """On any thread, at any time: the garbage collector calls it."""
        self.tickets.add(ticket)  # first: an end before the look would else keep the ticket for ever
        with suppress(Error):  # closed, forked, or released by sweep() meanwhile
            if self._native.wait(ticket, 0):
                self._release(ticket)

    def sweep(self) -> None:
        """Releases the tickets of transfers that have ended."""
        for ticket in self._native.poll():
            self._release(ticket)

    def _release(self, ticket: int) -> None:
        if ticket in self.tickets:
            self.tickets.discard(ticket)
            self._native.release(ticket)


class Transfer(TransferBase):
    """What ``TransferEngine.submit`` gives."""

    __slots__ = ("_abandoned",)

    def __init__(self, native: _native.Engine, ticket: int, bytes_total: int, abandoned: Abandoned) -> None:
        super().__init__(native, ticket, bytes_total)
        self._abandoned = abandoned

    def __del__(self) -> None:
        # When the interpreter ends, its engine ends with it, and an error could not be made any more.
        if self._final is None and not sys.is_finalizing():
            self._abandoned.add(self._ticket)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ended within ``timeout_s``; None: however long it makes progress."""
        if self._final is not None:
            return True
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_PIECE_S if give_up_s is None else give_up_s - time.monotonic()
            if self._native.wait(self._ticket, max(0.0, min(left_s, WAIT_PIECE_S))):
                return True
            if left_s <= 0:
                return False

    def result(self, timeout_s: float | None = None) -> int:
        """Its bytes, once all are transferred.

        Raises TransferError when it failed or was cancelled, Timeout when it did not end within ``timeout_s``
        (and goes on).
        """
        if not self.wait(timeout_s):
            raise Timeout(f"the transfer did not end within {timeout_s} s, and goes on", operation="transfer")
        return self._outcome()
