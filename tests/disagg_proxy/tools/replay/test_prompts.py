"""Prompts have in common what the trace says, and nothing else."""

from __future__ import annotations

import random

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.replay.prompts import Prompts
from moonpool.disagg_proxy.tools.simulator.trace import Arrival


def arrival(tokens: int, blocks: list[int]) -> Arrival:
    return Arrival(0.0, tokens, 1, blocks)


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    shorter = min(len(left), len(right))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)


def test_the_same_id_is_the_same_tokens_and_another_is_not() -> None:
    prompts = Prompts()
    first = prompts.make(arrival(1300, [1, 2, 3]))
    second = prompts.make(arrival(1500, [1, 2, 4]))
    assert (len(first.ids), len(second.ids)) == (1300, 1500)
    assert 1024 <= common(first.ids, second.ids) < 1028  # by chance a token more
    assert first.ids == Prompts().make(arrival(1300, [1, 2, 3])).ids
    assert common(first.ids, Prompts(seed=1).make(arrival(1300, [1, 2, 3])).ids) < 4
    assert min(first.ids + second.ids) >= 1000
    assert max(first.ids + second.ids) <= 29_999


def test_lengths_are_scaled_and_cut_and_still_begin_alike() -> None:
    prompts = Prompts(block_tokens=32, first_id=0, last_id=255, input_max=100)
    first = prompts.make(arrival(1024 + 16, [1, 2, 3]))
    second = prompts.make(arrival(3000, [1, 2, 4, 5, 6, 7]))
    assert len(first.ids) == 64 + 1
    assert len(second.ids) == 100
    assert 64 <= common(first.ids, second.ids) <= 65
    assert max(first.ids + second.ids) <= 255


@pytest.mark.parametrize("block_tokens", [512, 100, 16, 1])
def test_reusable_is_what_an_endless_cache_would_have(rng: random.Random, block_tokens: int) -> None:
    prompts = Prompts(block_tokens=block_tokens, last_id=1 << 30, input_max=700)
    seen: list[list[int]] = []
    for _ in range(60):
        chain = [rng.randrange(3)]
        while rng.random() < 0.8:
            chain.append(chain[-1] * 3 + 3 + rng.randrange(2))  # a tree: each id has one predecessor
        tokens = 512 * len(chain) - rng.choice((0, 0, 1, 511, rng.randrange(512)))
        made = prompts.make(arrival(tokens, chain))
        whole = block_tokens * ((len(made.ids) - 1) // block_tokens)
        longest = 0
        for other in seen:
            kept = other[: len(other) // block_tokens * block_tokens]
            longest = max(longest, min(common(made.ids, kept) // block_tokens * block_tokens, whole))
        assert made.reusable == longest
        seen.append(made.ids)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_tokens": 0},
        {"block_tokens": 513},
        {"first_id": 5, "last_id": 5},
        {"first_id": -1},
        {"last_id": 1 << 31},
        {"input_max": -1},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Prompts(**wrong)  # type: ignore[arg-type]
