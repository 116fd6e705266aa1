"""Clusters and traces for the simulator's tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from moonpool.disagg_proxy.tools.simulator.machine import Machine
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival

from ..replay.beds import write_trace

# A token of a prompt is a millisecond, a step of decode 10 ms, a token of KV a byte, the link 1 MB/s.
PLAIN = Machine(
    prefill_s=0.0,
    prefill_token_s=0.001,
    prefill_token2_s=0.0,
    reuse_token_s=0.0,
    step_s=0.01,
    step_request_s=0.0,
    step_token_s=0.0,
    kv_bytes=1,
    cache_tokens=100 * BLOCK_TOKENS,
    room_tokens=100_000,
    link_bytes_s=1e6,
    handover_s=0.0,
)


def at_random(rng: random.Random, count: int, per_s: float) -> list[Arrival]:
    """Some prompts begin alike."""
    arrivals = []
    at_s = 0.0
    for number in range(count):
        at_s += rng.expovariate(per_s)
        tokens = rng.randrange(1, 4000)
        shared = rng.randrange(5) * 100
        blocks = tuple(
            shared + place if place < 3 else 1000 + 10 * number + place
            for place in range(-(-tokens // BLOCK_TOKENS))
        )
        arrivals.append(Arrival(at_s, tokens, rng.randrange(0, 200), blocks))
    return arrivals


def unshared_prompts(folder: Path, *, per_s: float, long_share: float = 0.0) -> Path:
    """A trace of 2,000 prompts of up to 20,000 tokens, of which no two begin alike; this share of them has
    100,000 tokens."""
    random_ = random.Random(20261127)

    def rows() -> Iterator[tuple[float, int, int, list[int]]]:
        at_s, block = 0.0, 0
        for _ in range(2000):
            at_s += random_.expovariate(per_s)
            tokens = int(min(max(random_.lognormvariate(8.0, 0.8), 100), 20_000))
            if random_.random() < long_share:
                tokens = 100_000
            count = -(-tokens // BLOCK_TOKENS)
            yield at_s, tokens, 20, list(range(block, block + count))
            block += count

    return write_trace(folder, *rows())


def one_prefix(folder: Path, *, per_s: float) -> Path:
    """A trace of 2,000 prompts that have all but their last tokens, 4,096 of them, in common."""
    random_ = random.Random(20261127)

    def rows() -> Iterator[tuple[float, int, int, list[int]]]:
        at_s, shared = 0.0, list(range(8))
        for number in range(2000):
            at_s += random_.expovariate(per_s)
            yield at_s, 8 * BLOCK_TOKENS + random_.randrange(1, BLOCK_TOKENS), 20, [*shared, 100 + number]

    return write_trace(folder, *rows())
