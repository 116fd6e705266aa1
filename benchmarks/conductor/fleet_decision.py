"""One decision among a thousand engines, hashing included (benchmarks/decision.py has more)."""

from __future__ import annotations

from benchmarks.conductor import decision
from benchmarks.conductor.bed import Bed
from benchmarks.report import Row

ENGINES, TOKENS, BLOCK_TOKENS, BLOCKS_EACH = 1000, 4608, 64, 128
MOST_US = 400.0


def rows(bed: Bed) -> list[Row]:
    rounds = 3 if bed.quick else 21
    ours = decision.measure(ENGINES, TOKENS, BLOCK_TOKENS, BLOCKS_EACH, rounds, streams=False).cpu_us
    work = f"decision, CPU [{TOKENS:,} tokens, {ENGINES:,} engines, hashing included]"
    return [Row(work, ours, "us", {}, None, f"<= {MOST_US:g}", ours <= MOST_US)]
