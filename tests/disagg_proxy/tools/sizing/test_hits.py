"""Hit rates that can be counted by hand, and against a cache that is plainly written."""

from __future__ import annotations

import random

from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival, Trace
from moonpool.disagg_proxy.tools.sizing.hits import endless, hits


def test_by_hand() -> None:
    rows = [
        Arrival(0.0, 1024, 1, [1, 2]),
        Arrival(1.0, 1024, 1, [1, 3]),  # finds 1
        Arrival(2.0, 1100, 1, [1, 2, 4]),  # finds 1 and 2, if they are still there
    ]
    trace = Trace("t", rows)
    assert endless(trace) == 3 * BLOCK_TOKENS / (1024 + 1024 + 1100)
    assert [row.hits for row in hits(trace, [0, 2, 3])] == [
        0.0,
        2 * BLOCK_TOKENS / 3148,  # 3 has driven 2 out
        endless(trace),
    ]


def test_the_last_token_is_always_computed() -> None:
    rows = [Arrival(0.0, 512, 1, [1]), Arrival(1.0, 512, 1, [1]), Arrival(2.0, 513, 1, [1, 2])]
    assert endless(Trace("t", rows)) == BLOCK_TOKENS / (512 + 512 + 513)


def test_against_a_plain_cache(rng: random.Random) -> None:
    rows = []
    for at in range(300):
        chain = [rng.randrange(4)]
        while rng.random() < 0.7:
            chain.append(chain[-1] * 3 + 4 + rng.randrange(3))
        rows.append(Arrival(float(at), len(chain) * BLOCK_TOKENS - rng.randrange(2), 1, chain))
    trace = Trace("t", rows)
    for size in (1, 5, 20, 80):
        kept: list[int] = []  # the least recently used first
        found = 0
        for row in rows:
            whole = row.blocks[: (row.tokens - 1) // BLOCK_TOKENS]
            found += next((at for at, block in enumerate(whole) if block not in kept), len(whole))
            for block in reversed(row.blocks[: row.tokens // BLOCK_TOKENS][:size]):
                if block in kept:
                    kept.remove(block)
                kept.append(block)
            kept = kept[-size:]
        tokens = sum(row.tokens for row in rows)
        assert hits(trace, [size])[0].hits == found * BLOCK_TOKENS / tokens
