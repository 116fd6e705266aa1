"""The KV accounts of the mock engine."""

from __future__ import annotations

import random

from moonpool.disagg_proxy.tools.mock_engine.batch import Batch, Job, State
from moonpool.disagg_proxy.tools.mock_engine.blocks import Blocks
from moonpool.disagg_proxy.tools.mock_engine.settings import Timing


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}/{place}".encode() for place in range(length)]


def test_a_prefix_that_was_computed_is_found_again() -> None:
    blocks = Blocks(10)
    assert blocks.take("a", chain("x", 4), 5) == 0
    blocks.publish("a", chain("x", 4))
    assert blocks.take("b", chain("x", 4), 5) == 4
    blocks.free("a")
    blocks.free("b")
    assert blocks.held == 0
    assert blocks.cached_prefix(chain("x", 6)) == 4
    blocks.check_integrity()


def test_leaves_of_the_oldest_go_first_and_what_is_held_stays() -> None:
    blocks = Blocks(8)
    for name in "xy":
        blocks.take(name, chain(name, 4), 4)
        blocks.publish(name, chain(name, 4))
    blocks.free("x")
    assert blocks.take("z", chain("z", 2), 2) == 0
    assert blocks.cached_prefix(chain("x", 4)) == 2
    assert blocks.cached_prefix(chain("y", 4)) == 4
    assert blocks.take("w", chain("w", 3), 3) is None
    blocks.check_integrity()


def test_random_stories_keep_the_accounts_straight() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        print("seed", seed)
        stored: set[bytes] = set()
        holders: dict[int, list[bytes]] = {}

        def changed(holder: object, places: object, removed: object, stored: set[bytes] = stored) -> None:
            assert isinstance(removed, list | tuple)
            stored.difference_update(removed)

        blocks = Blocks(30, changed)
        for number in range(300):
            if holders and rng.random() < 0.45:
                holder = rng.choice(list(holders))
                if rng.random() < 0.3:
                    blocks.hand(holder, number)
                    holders[number] = holders.pop(holder)
                else:
                    blocks.free(holder)
                    del holders[holder]
            else:
                digests = chain(rng.choice("abc"), rng.randrange(1, 12))
                before = blocks.held
                if blocks.take(number, digests, len(digests) + rng.randrange(3)) is None:
                    assert blocks.held == before
                else:
                    holders[number] = digests
                    blocks.publish(number, digests[: rng.randrange(len(digests) + 1)])
            blocks.check_integrity()
        for holder in holders:
            blocks.free(holder)
        assert blocks.held == 0


def test_a_batch_prefills_in_chunks_and_decodes_together() -> None:
    blocks = Blocks(100)
    batch = Batch(blocks, Timing(step_s=0.01, prefill_s_per_token=1e-3), block_tokens=16, budget=64)
    jobs = [Job("a", 100, chain("a", 6), 3), Job("b", 20, chain("b", 1), 2)]
    for job in jobs:
        batch.submit(job)
    assert batch.admit() == []
    steps = []
    while (seconds := batch.begin_step()) is not None:
        made = {job.name: count for job, count in batch.end_step()}
        steps.append((round(seconds, 4), made))
        for job in jobs:
            if job.state is State.DECODE and job.made == job.answer_tokens:
                batch.finish(job)
        batch.check_integrity()
    assert steps == [
        (0.074, {}),
        (0.066, {"a": 1, "b": 1}),
        (0.01, {"a": 1, "b": 1}),
        (0.01, {"a": 1}),
    ]
    assert blocks.held == 0
    assert blocks.cached == 7
