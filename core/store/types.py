"""The values that the store takes and returns; all immutable but Pin, which is a resource."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from moonpool._native import Pin as NativePin

Key: TypeAlias = "bytes | str"
Keys: TypeAlias = "list[bytes] | list[str] | list[Key] | tuple[Key, ...]"
Part: TypeAlias = "Buffer | tuple[int, int] | Any"
"""Bytes-like, an (address, length), or anything with DLPack or an array interface, on the CPU or a card."""
Object: TypeAlias = "Part | list[Part]"
"""The bytes of one object: one part, or a list of parts that are concatenated."""


class BufferRange(NamedTuple):
    """A range of this process's memory. ``held`` keeps it there: no thread may free, move or resize it."""

    address: int
    length: int
    writable: bool
    held: object


class PutStatus(enum.Enum):
    """The outcome of a put."""

    STORED = "stored"
    EXISTS = "exists"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PutResult:
    """STORED; EXISTS (the old bytes stay); or REFUSED with the reason, in one sentence.

    replicas: in how many nodes the bytes lie now, of other hosts first. reason: also why there are fewer than
    asked for, and after a replacement which nodes may still have an older value (see Unsure).
    """

    status: PutStatus
    reason: str = ""
    replicas: int = 1

    def __bool__(self) -> bool:
        """True when the key now has an object: stored by this call or before."""
        return self.status is not PutStatus.REFUSED


STORED = PutResult(PutStatus.STORED)
EXISTS = PutResult(PutStatus.EXISTS)


class Presence(enum.Enum):
    """HIT and MISS are statements about now; UNKNOWN: the node did not answer, treat it as a miss."""

    HIT = "hit"
    MISS = "miss"
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        return self is Presence.HIT


@dataclass(frozen=True, slots=True)
class Unsure:
    """What ``remove`` says of a key that some node may still have; false where a bool is wanted.

    nodes: which, in words. Where a master gave the removal its place, they drop their copies before any other
    host reads them again; "while the master is away": until the key is removed once more.
    """

    nodes: str

    def __bool__(self) -> bool:
        return False


class Pin:
    """A right to read some objects, kept until it is released, dropped, or its store is closed.

    A pinned object stays readable (``store.get(keys, pin=pin)``) even when it is removed or replaced
    meanwhile.
    """

    __slots__ = ("_native",)

    def __init__(self, native: NativePin) -> None:
        self._native = native

    def release(self) -> None:
        """Gives the right back; harmless the second time."""
        self._native.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Prefix:
    """How much of a chain is here: its first ``blocks`` blocks, pinned under ``pin`` unless that is None.

    holders, hosts and tiers have one element for each block: the name of the node that has its first object,
    the id of that node's host, and where it lies there. Nodes of different hosts may have the same name; name
    and host id together are one node of the cluster, as the master's /nodes shows it. A node inside this
    process has no host id ("").

    why: why the answer may be too small ("" when the node answered).
    """

    blocks: int
    pin: Pin | None = None
    holders: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    why: str = ""
    hosts: tuple[str, ...] = ()


def prefix_of(
    blocks: int, pin: NativePin | None, nodes: Sequence[tuple[str, str]], why: str, *, holder: str
) -> Prefix:
    """The native answer as a value; nodes: name and host id for each block. A block whose holder has no name
    is the caller's own node's, ``holder``. What is pinned is in memory."""
    return Prefix(
        blocks,
        None if pin is None else Pin(pin),
        tuple(name or holder for name, _ in nodes),
        ("dram",) * blocks,
        why,
        tuple(host for _, host in nodes),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One object as ``list`` shows it: size in bytes, checksum, and how many readers hold it now."""

    key: bytes
    size: int
    generation: int
    crc32c: int
    pins: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One node's copy of an object. node, host, address: of the node, as the master's /nodes shows it.

    tiers: "dram", "ssd" or both. size in bytes. generation: another one is another object, within one life of
    the node. pins: how many readers hold it in memory now. grouped: others are evicted with it. soft_pinned:
    it is evicted after all that is not.
    """

    node: str
    host: str
    address: str
    tiers: tuple[str, ...]
    size: int
    generation: int
    crc32c: int
    pins: int
    grouped: bool = False
    soft_pinned: bool = False


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """An object without its bytes: size in bytes, and its copies, the own node's first.

    An object that is striped over nodes has the size of the whole; the copies are those of its manifest.
    """

    size: int
    copies: tuple[Copy, ...]

    @property
    def pinned(self) -> bool:
        """Whether a pin keeps a copy in memory."""
        return any(copy.pins for copy in self.copies)


_TIERS = ((), ("dram",), ("ssd",), ("dram", "ssd"))


def stat_of(answer: tuple[int, Sequence[tuple[Any, ...]]] | None) -> ObjectStat | None:
    """The native answer for one key as a value; None is a miss."""
    if answer is None:
        return None
    size, rows = answer
    return ObjectStat(size, tuple(_copy_of(*row) for row in rows))


def _copy_of(
    node: str, host: str, address: str, size: int, generation: int, crc: int, pins: int, where: int, keep: int
) -> Copy:
    tiers = _TIERS[where & 3]
    return Copy(node, host, address, tiers, size, generation, crc, pins, bool(keep & 1), bool(keep & 2))


_RESULTS: Sequence[PutResult] = (STORED, EXISTS)
_REMOVED, _UNSURE = 1, 2
_PRESENCES: Sequence[Presence] = (Presence.MISS, Presence.HIT, Presence.UNKNOWN)


def put_results(
    outcomes: bytes,
    refusal: str,
    copies: bytes = b"",
    short_of_copies: str = "",
    unsure: Sequence[str] = (),
    *,
    replicas: int = 1,
) -> list[PutResult]:
    """The native outcome bytes (0 stored, 1 exists, 2 refused) as results; copies: of each, or empty: one;
    unsure: of each the nodes that may have an older value, or empty: none of all.
    """
    if unsure:
        made = put_results(outcomes, refusal, copies, short_of_copies, replicas=replicas)
        return [_with_doubt(result, nodes) for result, nodes in zip(made, unsure, strict=True)]
    if not copies:
        return [_RESULTS[o] if o < 2 else PutResult(PutStatus.REFUSED, refusal, 0) for o in outcomes]
    results = []
    for outcome, n in zip(outcomes, copies, strict=True):
        if outcome >= len(_RESULTS):
            results.append(PutResult(PutStatus.REFUSED, refusal, 0))
        else:
            short = short_of_copies if n < replicas else ""
            results.append(PutResult(_RESULTS[outcome].status, short, n))
    return results


def _with_doubt(result: PutResult, nodes: str) -> PutResult:
    if not nodes:
        return result
    doubt = f"an older value may still be on {nodes}"
    return replace(result, reason=f"{result.reason}; {doubt}" if result.reason else doubt)


def removals(flags: bytes, unsure: Sequence[str]) -> list[bool | Unsure]:
    """The native flags (0 no node had it, 1 removed, 2 not known to be gone) as values."""
    return [Unsure(unsure[i]) if flag == _UNSURE else flag == _REMOVED for i, flag in enumerate(flags)]


def presences(flags: bytes) -> list[Presence]:
    """The native flags (0 not here, 1 here, 2 not known) as values."""
    return [_PRESENCES[flag] for flag in flags]
