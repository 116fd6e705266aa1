"""Groups of layers that keep a state in the place of KV: Mamba, linear attention, short convolutions.

A state is of fixed size, however long the sequence, and each step overwrites it. With prefix caching
(mamba_cache_mode "align") vLLM lets prefill steps end at block boundaries and begins a new block behind each,
so a block that a step has left at its boundary keeps the state of exactly that prefix: a snapshot.

    blocks of 4 tokens      step 1: tokens 0..7      step 2: tokens 8..9
    slots of the request    [null, snapshot of 8]    [null, snapshot of 8, state of 10]

To go on at a length a group needs the snapshot of that length, and no other block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from moonpool.connectors.vllm.reach import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class State:
    """What one layer of such a group has in a block.

    form: kind, shapes and types of its numbers; states of unlike forms are not comparable.
    bytes: without the padding to the size of an attention block.
    """

    form: str
    bytes: int


def read_state(spec: Any) -> State:
    """The state that vLLM's MambaSpec describes."""
    kind = getattr(spec, "mamba_type", "")
    parts = [
        f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return State(f"{getattr(kind, 'name', kind)} {' + '.join(parts)}", size)


def snapshots(
    block_ids: Sequence[int], computed: int, scheduled: int, block_tokens: int, told: Mapping[int, int]
) -> list[int]:
    """A request's blocks of a group with states when a step ends, NULL_BLOCK in the place of those that hold
    no snapshot then. The block behind which the step began is one, and the block behind which it ends, each
    if that is a block boundary; and what vLLM tells, which may write more of them in one step.

    computed: tokens of the request when the step ends.
    scheduled: those of them that the step computes.
    told: from the tokens of a snapshot to its block.
    """
    kept = [NULL_BLOCK] * len(block_ids)
    ends = dict.fromkeys((computed - scheduled, computed)) | dict(told)
    for tokens, block_id in ends.items():
        block = tokens // block_tokens - 1
        if tokens % block_tokens == 0 and 0 <= block < len(kept):
            kept[block] = block_ids[block] if block_id is None else block_id
    return kept
