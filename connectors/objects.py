"""How the KV of a block (SGLang: a page) is cut into objects by heads (docs/keys.md), and which of them a
rank holds. The same for every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES, Ranges

TP_SIZE_MAX = 8
ROWS_MAX = 4096  # node.parts_max
Row = tuple[int, int, int]  # address in block 0, bytes from block to block, bytes


class Refused(Exception):
    """This engine's memory cannot be used with the pool; the message is one sentence that says why."""


def heads_per_object(kv_heads: int) -> int:
    """Heads that one object holds: at most an eighth of the model's, and a divisor of what a rank has under
    every tensor-parallel size up to 8 that divides them, so that no such size changes an object."""
    shares = [kv_heads // size for size in range(1, TP_SIZE_MAX + 1) if kv_heads % size == 0]
    common = math.gcd(*shares)
    limit = max(1, kv_heads // TP_SIZE_MAX)
    return max(heads for heads in range(1, limit + 1) if common % heads == 0)


def heads_of_objects(local_heads: int, kv_heads: int) -> int:
    """Heads that one object of a rank holds: heads_per_object(), or the largest part of it that divides what
    a rank of a larger tensor-parallel size has. Only sizes that cut alike share the names of such objects."""
    return math.gcd(local_heads, heads_per_object(kv_heads))


def first_head(kv_heads: int, local_heads: int, tp_rank: int, tp_size: int) -> int:
    """The number, in the whole model, of a rank's first KV head. Raises Refused for a split that is not
    even."""
    if local_heads == kv_heads:
        return 0
    if local_heads * tp_size == kv_heads:
        return tp_rank * local_heads
    if local_heads == 1 and kv_heads < tp_size and tp_size % kv_heads == 0:  # several ranks hold one head
        return tp_rank * kv_heads // tp_size
    raise Refused(f"{local_heads} KV heads on each of {tp_size} ranks do not make the model's {kv_heads}")


def holds_first_copy(kv_heads: int, local_heads: int, tp_rank: int, tp_size: int) -> bool:
    """Whether no lower rank holds the same heads; the one that does saves them for all."""
    return tp_rank == 0 or first_head(kv_heads, local_heads, tp_rank - 1, tp_size) != first_head(
        kv_heads, local_heads, tp_rank, tp_size
    )


def suffixes_of(ranges: Sequence[Ranges]) -> npt.NDArray[np.uint8]:
    """What distinguishes the names of the objects of one block: [object, byte]."""
    joined = b"".join(each.suffix() for each in ranges)
    return np.frombuffer(joined, np.uint8).reshape(-1, BLOCK_NAME_BYTES - DIGEST_BYTES)


def object_names(digests: bytes, suffixes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The names of the objects of these blocks: [block, object, byte]."""
    blocks = np.frombuffer(digests, np.uint8).reshape(-1, 1, DIGEST_BYTES)
    names = np.empty((len(blocks), len(suffixes), BLOCK_NAME_BYTES), np.uint8)
    names[:, :, :DIGEST_BYTES] = blocks
    names[:, :, DIGEST_BYTES:] = suffixes
    return names


def append_row(rows: list[Row], row: Row) -> None:
    """``row`` behind the others; neighbours are one row."""
    if rows and rows[-1][0] + rows[-1][2] == row[0] and rows[-1][1] == row[1]:
        rows[-1] = (rows[-1][0], row[1], rows[-1][2] + row[2])
    else:
        rows.append(row)
