"""Hit rate over capacity: what one cache of each kind would have found of a trace's prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.simulator.eviction.cache import Cache
from moonpool.disagg_proxy.tools.simulator.eviction.clairvoyant import Clairvoyant
from moonpool.disagg_proxy.tools.simulator.eviction.frequency import Lfu, S3Fifo, Sieve
from moonpool.disagg_proxy.tools.simulator.eviction.recency import Batches, Fifo, Lru
from moonpool.disagg_proxy.tools.simulator.eviction.reuse_index import ReuseIndex
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival, Trace
from moonpool.disagg_proxy.tools.simulator.workers import get_shared, workers

CACHES: Mapping[str, Callable[[int], Cache]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
    "batches": Batches,
    "reuse_index": ReuseIndex,
}
CLAIRVOYANT = "clairvoyant"
CAPACITIES = (1_000, 3_000, 5_859, 10_000, 20_000, 30_000, 50_000, 100_000)  # blocks; 5,859 are 3 M tokens


class Question(NamedTuple):
    """whole: the partial last block of a prompt is never kept. ``reuse_index`` keeps none in any case."""

    cache: str
    blocks_max: int
    whole: bool = False


def make_cache(name: str, blocks_max: int) -> Cache:
    """Raises ConfigError that lists the names."""
    if name not in CACHES:
        raise ConfigError(
            f"there is no cache {name!r}; choose one of {', '.join(CACHES)}", operation="simulate"
        )
    return CACHES[name](blocks_max)


def hit_rate(rows: Sequence[Arrival], question: Question) -> float:
    """The share of all prompt tokens that the cache held, as leading blocks of their prompt."""
    whole = question.whole or question.cache == "reuse_index"
    prompts = [row.full_blocks if whole else row.blocks for row in rows]
    if question.cache == CLAIRVOYANT:
        cache: Cache = Clairvoyant(question.blocks_max, prompts)
    else:
        cache = make_cache(question.cache, question.blocks_max)
    hit = total = 0
    for row, blocks in zip(rows, prompts, strict=True):
        found = next((count for count, block in enumerate(blocks) if block not in cache), len(blocks))
        hit += min(found * BLOCK_TOKENS, row.tokens)
        total += row.tokens
        cache.keep(blocks, row.at_s)
    return hit / max(total, 1)


def study(trace: Trace, questions: Sequence[Question], *, processes: int = 1) -> Iterator[float]:
    """The hit rates in the order of the questions, as soon as each is known."""
    rows = list(trace.rows)
    if processes < 2:
        yield from map(partial(hit_rate, rows), questions)
        return
    with workers(processes, rows) as pool:
        yield from pool.map(_ask, questions)


def _ask(question: Question) -> float:
    return hit_rate(get_shared(), question)
