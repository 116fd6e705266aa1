"""What each kind of cache keeps, on sequences that can be followed by hand, and what all have in common."""

import functools
import random
from collections.abc import Callable

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.simulator.eviction.cache import Cache
from moonpool.disagg_proxy.tools.simulator.eviction.clairvoyant import Clairvoyant
from moonpool.disagg_proxy.tools.simulator.eviction.frequency import Lfu, S3Fifo, Sieve
from moonpool.disagg_proxy.tools.simulator.eviction.recency import Batches, Fifo, Lru
from moonpool.disagg_proxy.tools.simulator.eviction.reuse_index import ReuseIndex
from moonpool.disagg_proxy.tools.simulator.eviction.study import CACHES, Question, hit_rate, make_cache, study
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival, Trace


def hits(cache: Cache, blocks: list[int]) -> int:
    """Of prompts of one block each."""
    found = 0
    for at, block in enumerate(blocks):
        found += block in cache
        cache.keep([block], float(at))
    return found


def best_hits(blocks: list[int], blocks_max: int) -> int:
    """By trying everything: a cache may go on with any part of what it held and the block."""

    @functools.cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(blocks):
            return 0
        hit = blocks[at] in held
        grown = held | {blocks[at]}
        kept = [grown] if len(grown) <= blocks_max else [grown - {out} for out in grown]
        return hit + max(best(at + 1, each) for each in kept)

    return best(0, frozenset())


def test_the_clairvoyant_cache_finds_as_much_as_can_be_found(rng: random.Random) -> None:
    for _ in range(60):
        blocks = [rng.randrange(6) for _ in range(18)]
        blocks_max = rng.randrange(1, 4)
        found = hits(Clairvoyant(blocks_max, [[block] for block in blocks]), blocks)
        assert found == best_hits(blocks, blocks_max)
        assert all(hits(make(blocks_max), blocks) <= found for make in CACHES.values())


@pytest.mark.parametrize(
    ("make", "uses", "kept"),
    [
        (Lru, [1, 2, 3, 1, 4], {3, 1, 4}),
        (Fifo, [1, 2, 3, 1, 4], {2, 3, 4}),
        (Lfu, [1, 1, 2, 2, 3, 4], {1, 2, 4}),  # 3 is as rare as 4, and was used before it
        (Sieve, [1, 2, 3, 1, 4], {1, 3, 4}),  # 1 is marked: the hand passes it and takes 2
        (Sieve, [1, 2, 3, 1, 4, 5], {1, 4, 5}),  # and goes on from there
    ],
)
def test_what_goes_is_what_the_policy_says(
    make: Callable[[int], Cache], uses: list[int], kept: set[int]
) -> None:
    cache = make(3)
    hits(cache, uses)
    assert {block for block in range(9) if block in cache} == kept


def test_s3fifo_lets_a_scan_pass_and_takes_back_what_it_remembers() -> None:
    cache = S3Fifo(10)
    hits(cache, [1, 2, 1, 2])
    hits(cache, list(range(100, 130)))
    assert 1 in cache  # used again while it was new: it is in the main queue
    assert 2 in cache
    assert 115 not in cache
    hits(cache, [119])  # a ghost: into the main queue at once
    hits(cache, list(range(200, 230)))
    assert 119 in cache


def test_batches_go_when_nine_tenths_are_full() -> None:
    cache = Batches(100)
    assert hits(cache, list(range(90))) == 0
    assert len(cache) == 90
    hits(cache, [90])
    assert len(cache) == 86
    assert [block in cache for block in (0, 4, 5, 90)] == [False, False, True, True]


def chains(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that share beginnings: a true prefix tree."""
    ends: list[list[int]] = [[0]]
    made = []
    for number in range(count):
        start = rng.choice(ends)[: rng.randrange(1, 9)]
        prompt = start + [1000 + 20 * number + place for place in range(rng.randrange(6))]
        ends.append(prompt)
        made.append(prompt)
    return made


@pytest.mark.parametrize("name", [*CACHES, "clairvoyant"])
@pytest.mark.parametrize("blocks_max", [0, 1, 7, 40])
def test_what_a_cache_says_of_its_changes_is_what_it_holds(
    name: str, blocks_max: int, rng: random.Random
) -> None:
    prompts = chains(rng, 300)
    cache = Clairvoyant(blocks_max, prompts) if name == "clairvoyant" else make_cache(name, blocks_max)
    held: set[int] = set()
    now_s = 0.0
    for number, prompt in enumerate(prompts):
        now_s += rng.random() * 10
        new, gone = cache.keep(prompt, now_s)
        assert not held & set(new)
        assert set(gone) <= held
        assert len(new) == len(set(new))
        held |= set(new)
        held -= set(gone)
        assert len(cache) == len(held) <= blocks_max
        assert all(block in cache for block in held)
        assert {block for block in prompt if block in cache} == held & set(prompt)
        if isinstance(cache, ReuseIndex):
            cache.check_integrity()
        if number == 200:
            assert set(cache.clear()) == held
            held.clear()
            assert len(cache) == 0


def test_the_hit_rate_is_of_all_tokens_and_ends_at_the_first_gap() -> None:
    rows = [
        Arrival(0.0, 2 * BLOCK_TOKENS + 10, 1, (1, 2, 3)),
        Arrival(1.0, 3 * BLOCK_TOKENS, 1, (1, 2, 4)),
        Arrival(2.0, 2 * BLOCK_TOKENS + 10, 1, (1, 2, 3)),
    ]
    total = 7 * BLOCK_TOKENS + 20
    every = hit_rate(rows, Question("lru", 100))
    assert every == pytest.approx((2 * BLOCK_TOKENS + 2 * BLOCK_TOKENS + 10) / total)
    whole = hit_rate(rows, Question("lru", 100, whole=True))
    assert whole == pytest.approx(4 * BLOCK_TOKENS / total)
    assert hit_rate(rows, Question("lru", 0)) == 0.0
    assert hit_rate([], Question("fifo", 5)) == 0.0


def test_a_study_is_the_same_in_one_process_and_in_two(rng: random.Random) -> None:
    rows = [
        Arrival(float(at), len(prompt) * BLOCK_TOKENS, 1, prompt)
        for at, prompt in enumerate(chains(rng, 100))
    ]
    trace = Trace("made", rows)
    questions = [Question(name, 20) for name in (*CACHES, "clairvoyant")]
    alone = list(study(trace, questions))
    assert alone == list(study(trace, questions, processes=2))
    assert max(alone) > 0


def test_a_cache_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of lru, fifo"):
        make_cache("mru", 10)
