"""The values that ``TransferEngine`` and ``AsyncTransferEngine`` take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

if TYPE_CHECKING:
    from moonpool.core.transfer.segment import Segment

Op: TypeAlias = Literal["read", "write"]
# Memory of this process that is registered: an address, a Region (from its start), or an object inside one.
Local: TypeAlias = Any
# One address for each slice; a numpy array of uint64 costs the least.
Column: TypeAlias = Sequence[int]


class Priority(IntEnum):
    """A background slice starts only when no foreground slice to the same peer waits."""

    FOREGROUND = 0
    BACKGROUND = 1


class SliceState(IntEnum):
    """State of one slice; the numbers are those of the native engine."""

    WAITING = 0
    DONE = 1
    FAILED = 2  # part of its bytes may have been written
    CANCELLED = 3  # likewise


class TransferState(Enum):
    """State of a transfer: of all its slices together."""

    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Slice(NamedTuple):
    """One range to move: ``length`` bytes between ``local`` and the address ``remote`` of a peer."""

    op: Op
    segment: Segment
    local: Local
    remote: int
    length: int


@dataclass(frozen=True, slots=True)
class PeerRail:
    """A network card here and one of the peer, of which a path has one or several.

    port:   of this host, as "mlx5_0:1".
    path:   for people, with the peer's side.
    state:  "up"; "down": it is connected when there is more to carry, and after a fault not before some time;
            "connecting"; "ending".
    why:    it is not up; "": it is.
    pieces: a large slice is cut into several. With ``bytes``: carried since the peer was opened.
    faults: times that it failed since then; its pieces went another way.
    bytes_per_s: as measured of late; 0: not yet.
    """

    port: str
    path: str
    state: str
    why: str
    bytes: int
    pieces: int
    faults: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PeerPath:
    """How one transport reaches a peer.

    path:      for people, as "tcp 10.0.0.7:7720"; "": there is none, and ``why`` says the reason.
    unreached: kinds of the peer's memory ("host", "host_arena", "device") that the path does not reach, each
               with the reason.
    jobs:      how many transfers were timed to know its cost, which is ``slice_s`` for each slice and
               ``byte_s`` for each byte, in seconds, of late. With 0 jobs nothing is known.
    remarks:   for people: parts of the path that are not used, as addresses of a port, each with the reason.
    rails:     of "rdma" and "efa".
    """

    transport: str
    path: str
    why: str
    unreached: dict[str, str]
    jobs: int = 0
    slice_s: float = 0.0
    byte_s: float = 0.0
    remarks: str = ""
    rails: tuple[PeerRail, ...] = ()


class TransferOptions(TypedDict, total=False):
    """How slices are moved; every verb that moves bytes takes these keywords.

    priority:   ``Priority.BACKGROUND`` lets foreground slices go first.
    deadline_s: the longest wait without progress in seconds: each byte that moves restarts it. None: the
                engine's ``timeout_s``.
    notify:     a message for each peer of the transfer, delivered after the data.
    """

    priority: int
    deadline_s: float | None
    notify: bytes | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Many slices, by column: cheaper than as many ``Slice`` objects.

    ``local`` and ``remote`` are addresses, one for each slice. ``segment``, ``op`` and ``lengths`` are one
    for each slice too, or one for all. Columns of numbers may be numpy arrays of uint64.
    """

    op: Op | Sequence[Op]
    segment: Segment | Sequence[Segment]
    local: Column
    remote: Column
    lengths: Column | int


class RemoteRegion(NamedTuple):
    """Memory that a peer registered.

    kind:      "host_arena" for memory that its engine allocated, which others on its host can map; "host" for
               other memory; "file" for a file, in which addresses are offsets. Later versions may list more
               kinds, which nothing here reaches.
    location:  a label: text of its owner, such as "cpu:0". No transport reads it.
    transport: what moves bytes between here and there, "" for nothing.
    """

    address: int
    length: int
    kind: str
    location: str
    transport: str

    def at(self, offset: int) -> int:
        """The address of a byte of it."""
        return offset_in(self.address, self.length, offset)


class Notification(NamedTuple):
    """A message from a peer. ``peer`` is the name that it gave its engine."""

    peer: str
    message: bytes


def offset_in(address: int, length: int, offset: int) -> int:
    """``address + offset``. Raises InvalidArgument when that lies outside of ``length`` bytes."""
    if 0 <= offset < length:
        return address + offset
    from moonpool.core.errors import InvalidArgument

    raise InvalidArgument(f"offset {offset} lies outside of a region of {length} bytes")
