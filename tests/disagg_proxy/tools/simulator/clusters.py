"""Clusters and traces for the simulator's tests."""

from __future__ import annotations

import random

from moonpool.disagg_proxy.tools.simulator.machine import Machine
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival

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
