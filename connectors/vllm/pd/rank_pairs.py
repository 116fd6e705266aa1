"""Which workers of a prefill engine each worker of a decode engine takes a prompt from, when the engines'
numbers of tensor-parallel ranks, or of pipeline stages, differ. Pure numbers, the same on all decode workers.

    4 KV heads, prefill of 2 ranks, decode of 4      prefill of 4 ranks, decode of 1, 2 KV heads

    prefill 0: h0 h1  --h0--> decode 0               prefill 0: h0 --h0--> decode 0
                      --h1--> decode 1               prefill 1: h0 ------> decode 0   a copy: nothing is read
    prefill 1: h2 h3  --h2--> decode 2               prefill 2: h1 --h1--> decode 0
                      --h3--> decode 3               prefill 3: h1 ------> decode 0   a copy: nothing is read

With more ranks than KV heads several ranks hold copies of a head (MLA: all ranks one latent). The decode
ranks that need it are spread over them. Each prefill worker has at least one decode worker, because each
keeps a lease that ends when its decode workers have said that they need nothing more.

Of pipeline stages one engine may have several and the other one: each stage has some layers of all heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.connectors.objects import Refused, heads_of_objects
from moonpool.core.store.keys import Ranges


@dataclass(frozen=True, slots=True)
class Sizes:
    """How an engine's model is split.

    kv_heads: KV heads of the whole model; 1 for MLA.
    tp_size, pp_size: tensor- and pipeline-parallel ranks.
    """

    kv_heads: int
    tp_size: int
    pp_size: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """What one decode worker takes of one prefill worker.

    tp_rank: of the prefill worker.
    first_head, heads: which heads of the whole model are read; no heads: another worker's copy is read.
    readers: decode workers that the prefill worker has, this one included.
    """

    tp_rank: int
    first_head: int
    heads: int
    readers: int

    def columns_of(self, columns: Sequence[Ranges]) -> tuple[int, ...]:
        """The places in ``columns`` of the objects that are read."""
        end = self.first_head + self.heads
        return tuple(
            place
            for place, one in enumerate(columns)
            if self.first_head <= one.first_head and one.first_head + one.heads <= end
        )


ALL_HEADS = Share(0, 0, 1 << 32, 1)


def prefill_sizes(sizes: Sizes, *, workers: int, tp_size: int, engine: str) -> Sizes:
    """The sizes of a prefill engine of so many workers, from which a decode engine of ``sizes`` can take
    prompts. Raises Refused when it cannot.

    tp_size: of the prefill engine, as it says; 0: it does not, and has as many stages as the decode engine.
    engine: the name of the prefill engine, for the message.
    """
    if tp_size < 1 or workers % tp_size:
        tp_size = max(1, workers // sizes.pp_size)
    theirs = Sizes(sizes.kv_heads, tp_size, workers // tp_size)
    if theirs.pp_size * tp_size != workers or (
        theirs.pp_size != sizes.pp_size and 1 not in (theirs.pp_size, sizes.pp_size)
    ):
        raise Refused(
            f"the prefill engine {engine} has {workers} workers in {theirs.pp_size} pipeline stages and this "
            f"one {sizes.pp_size} stages; a hand-over needs equal pipeline-parallel sizes, or one of them 1"
        )
    if tp_size == sizes.tp_size:
        return theirs
    if max(tp_size, sizes.tp_size) % min(tp_size, sizes.tp_size):
        raise Refused(
            f"the prefill engine {engine} has {tp_size} tensor-parallel ranks and this one {sizes.tp_size}; "
            f"a hand-over needs one of these to divide the other"
        )
    heads = sizes.kv_heads
    if any(heads % size and size % heads for size in (tp_size, sizes.tp_size)):
        raise Refused(
            f"the prefill engine {engine} has {tp_size} tensor-parallel ranks and this one {sizes.tp_size}, "
            f"over which {heads} KV heads are not split evenly"
        )
    cuts = {heads_of_objects(max(1, heads // size), heads) for size in (tp_size, sizes.tp_size)}
    if len(cuts) > 1:
        raise Refused(
            f"the blocks of the prefill engine {engine} with {tp_size} tensor-parallel ranks are cut "
            f"otherwise than those of this one with {sizes.tp_size}"
        )
    return theirs


def stages_of(theirs: Sizes, ours: Sizes, pp_rank: int) -> tuple[range, int]:
    """(pipeline stages of prefill that a decode worker of stage ``pp_rank`` takes layers from, stages of
    decode that take layers from each of these)."""
    if theirs.pp_size == ours.pp_size:
        return range(pp_rank, pp_rank + 1), 1
    return range(theirs.pp_size), ours.pp_size


@functools.lru_cache(256)
def shares_of(kv_heads: int, theirs: int, ours: int, rank: int) -> tuple[Share, ...]:
    """What decode rank ``rank`` of ``ours`` takes of each prefill rank of ``theirs``, by rank; sizes as
    ``prefill_tp_size`` lets through."""
    if theirs == ours:  # whatever heads these two have
        return (Share(rank, 0, ALL_HEADS.heads, 1),)
    pairs = ((other, _common(kv_heads, theirs, other, ours, rank)) for other in range(theirs))
    return tuple(
        Share(other, found[0], found[1], _readers(kv_heads, theirs, other, ours))
        for other, found in pairs
        if found is not None
    )


def _heads(kv_heads: int, size: int, rank: int) -> tuple[int, int]:
    """(first head, heads) of a rank."""
    return rank * kv_heads // size, max(1, kv_heads // size)


def _readers(kv_heads: int, theirs: int, rank: int, ours: int) -> int:
    return sum(_common(kv_heads, theirs, rank, ours, mine) is not None for mine in range(ours))


def _common(kv_heads: int, theirs: int, other: int, ours: int, rank: int) -> tuple[int, int] | None:
    """(first head, heads) that prefill rank ``other`` gives decode rank ``rank``; None: they do not speak."""
    (start, count), (first, heads) = _heads(kv_heads, theirs, other), _heads(kv_heads, ours, rank)
    begin, end = max(start, first), min(start + count, first + heads)
    if begin >= end:
        return None
    copies, copies_here = max(1, theirs // kv_heads), max(1, ours // kv_heads)
    place, place_here = other % copies, rank % copies_here
    read = place_here * copies // copies_here
    if place == read:
        return begin, end - begin
    return (begin, 0) if read < place < (place_here + 1) * copies // copies_here else None
