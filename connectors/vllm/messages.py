"""What the two halves tell each other: plain values, pickled by vLLM.

    scheduler -> worker, each step          Step(loads, saves)
    worker -> scheduler, when there is any  Report(loaded, saved)
    worker -> scheduler, once at start      Handshake(...)

Only bytes, numbers and texts: nothing here knows a socket, a tensor or an address.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.connectors.vllm import compat
from moonpool.core.keys import Ranges


@dataclass(frozen=True, slots=True)
class Load:
    """Fill blocks of one request. ``descriptors`` go block by block, ``width`` objects each; ``first_names``
    are the names of the first block's objects, which tell which is which; ``block_ids`` holds one list per KV
    cache group, as long as the number of blocks. A width of 0 is a load that could not be planned: it has
    failed."""

    request_id: str
    width: int
    first_names: bytes
    holders: bytes
    descriptors: bytes
    block_ids: tuple[tuple[int, ...], ...]

    @property
    def blocks(self) -> int:
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class Save:
    """Store full blocks. ``names`` go block by block, ``width`` objects each; ``parents``: the names of the
    previous block of each object's column, of the same length; the first block of a chain has none, which
    zeros say."""

    job_id: int
    width: int
    names: bytes
    parents: bytes
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Step(compat.ConnectorMetadata):
    """The work of one engine step. NOTHING is the one that says nothing, also after it was pickled: most
    steps have no work, and a comparison with it is all that they cost."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Step, (self.loads, self.saves)) if self.loads or self.saves else (_nothing, ())


NOTHING = Step()


def _nothing() -> Step:
    return NOTHING


@dataclass(slots=True)
class Report(compat.WorkerMetadata):
    """loaded: request -> how many leading blocks of its load are good (the smallest over all ranks);
    saved: job -> how many ranks are done with it."""

    loaded: dict[str, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: compat.WorkerMetadata) -> Report:
        """Several ranks' reports of one step as one."""
        if isinstance(other, Report):
            for request_id, blocks in other.loaded.items():
                self.loaded[request_id] = min(blocks, self.loaded.get(request_id, blocks))
            for job_id, ranks in other.saved.items():
                self.saved[job_id] = self.saved.get(job_id, 0) + ranks
        return self


@dataclass(slots=True)
class Handshake(compat.HandshakeMetadata):
    """What one worker's KV memory looks like: the objects of a block that it holds, under which fingerprint;
    or, in ``refusal``, one sentence that says why the pool cannot be used with it."""

    fingerprint: bytes = b""
    columns: tuple[Ranges, ...] = ()
    bytes_per_block: int = 0
    refusal: str = ""
