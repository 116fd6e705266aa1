"""What share of a trace's prompt tokens a pool of a given size would have: one pool for all engines, whole
blocks, least recently used out first, as the pool's nodes do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.disagg_proxy.tools.simulator.eviction.recency import Lru
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Trace


class Row(NamedTuple):
    """hits: share of the prompts' tokens, 0 to 1."""

    blocks: int
    hits: float


def hits(trace: Trace, sizes: Sequence[int]) -> list[Row]:
    """sizes: in blocks of 512 tokens. A request's blocks are available to all later requests at once."""
    return [Row(blocks, _hits(trace, blocks)) for blocks in sizes]


def endless(trace: Trace) -> float:
    """The hit rate of a pool without a limit."""
    return _hits(trace, sum(len(row.blocks) for row in trace.rows))


def _hits(trace: Trace, blocks_max: int) -> float:
    cache = Lru(blocks_max)
    reused = tokens = 0
    for row in trace.rows:
        blocks = row.full_blocks
        reused += next((at for at, block in enumerate(blocks) if block not in cache), len(blocks))
        tokens += row.tokens
        cache.keep(row.blocks[: row.tokens // BLOCK_TOKENS], row.at_s)
    return reused * BLOCK_TOKENS / tokens
