"""What the scheduler's halves tell the worker about hand-overs in a step: plain values, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.connectors.vllm.pd.kv_transfer_params import BlockIds, Source


@dataclass(frozen=True, slots=True)
class Open:
    """Prefill: a lease is valid from now on.

    lease, slot: its id, and where the lease table has it.
    transfer: id under which decode waits for it in the concurrent form; else "".
    prompt: digest of its prompt, 32 bytes.
    confirms: whether the workers report that it is valid.
    """

    lease: int
    slot: int
    transfer: str
    prompt: bytes
    confirms: bool = False


@dataclass(frozen=True, slots=True)
class Grown:
    """Prefill, concurrent form: when this step ends, more blocks of a lease are complete.

    first: index of the first of them.
    block_ids: their ids, per KV cache group.
    final: whether these are the last.
    """

    lease: int
    first: int
    block_ids: BlockIds
    final: bool


@dataclass(frozen=True, slots=True)
class End:
    """Prefill: the lease is over; its blocks may be used again as soon as this step begins."""

    lease: int
    why: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Decode: a request came whose KV is at ``source``.

    prompt: digest of its prompt, 32 bytes.
    blocks: how many blocks it needs.
    taker: what tells this engine's workers from those of other decode engines; "": it has one worker.
    """

    request_id: str
    source: Source
    prompt: bytes
    blocks: int
    taker: str = ""


@dataclass(frozen=True, slots=True)
class Pull:
    """Decode: room was made for block ``first`` and following, counted from the first one that is offered.

    is_cached: whether they are of a neighbour's own cache, not of a prefill.
    """

    request_id: str
    first: int
    block_ids: BlockIds
    is_cached: bool = False

    @property
    def blocks(self) -> int:
        """Blocks to pull in each group."""
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decode: what ``source`` offers is not taken; ``why`` is for the prefill engine.

    taker: as in Hold.
    """

    source: Source
    why: str
    taker: str = ""


@dataclass(frozen=True, slots=True)
class HandoverStep:
    """What the workers are told of hand-overs in one step.

    drops: requests whose hand-over the engine waits for no more.
    voids: those of them whose pull, when it is under way, counts for nothing.
    is_idle: whether the step computes nothing, so that no request waits for it.
    """

    opens: tuple[Open, ...] = ()
    grown: tuple[Grown, ...] = ()
    ends: tuple[End, ...] = ()
    holds: tuple[Hold, ...] = ()
    pulls: tuple[Pull, ...] = ()
    drops: tuple[str, ...] = ()
    refuses: tuple[Refuse, ...] = ()
    voids: tuple[str, ...] = ()
    is_idle: bool = False

    def __bool__(self) -> bool:
        gives = self.opens or self.grown or self.ends
        return bool(gives or self.holds or self.pulls or self.drops or self.refuses)
