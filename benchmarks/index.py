"""The prefix index: what a question, an event, a block and a decision cost, beside Dynamo's RadixTree.

    python -m benchmarks.index [--peers-venv DIR] [--quick] [--json FILE]

CPU time of the process, medians over rounds; README.md explains the rows. The peer needs a venv with
ai-dynamo-runtime; without one its column says "not run".
"""

from __future__ import annotations

import array
import json
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.conductor import decision
from benchmarks.options import make_parser
from benchmarks.report import NOT_RUN, Row, print_table, write_json
from moonpool import _native
from moonpool.core.service.kv_event_publisher import Batch, BlockStored

WORKERS = 16
QUESTION_BLOCKS = 128
EVENT_BLOCKS = 64
DECISION_TOKENS = 4608
PEER = "dynamo"
PEER_SCRIPT = Path(__file__).parent / "conductor" / "radix_tree.py"
PEER_TIMEOUT_S = 120


class Bed:
    """An index of 16 engines with a shared prompt, and each with many blocks of its own."""

    def __init__(self, block_tokens: int, blocks_each: int) -> None:
        self.rng = random.Random(1)
        self.block_tokens = block_tokens
        self.index = _native.PrefixIndex(block_tokens, blocks_max=WORKERS * blocks_each * 2)
        self.prompt = array.array("I", self.tokens(QUESTION_BLOCKS))
        for worker in range(WORKERS):
            share = (QUESTION_BLOCKS - 4 * worker) * block_tokens
            self.index.ingest(worker, self.event(self.prompt[:share].tolist()))
        before = self.index.stats()
        for worker in range(WORKERS):
            for _ in range(blocks_each // EVENT_BLOCKS):
                self.index.ingest(worker, self.event())
        after = self.index.stats()
        self.bytes_per_block = (after["memory_bytes"] - before["memory_bytes"]) / (
            after["entries"] - before["entries"]
        )

    def tokens(self, blocks: int) -> list[int]:
        return [self.rng.randrange(50_000) for _ in range(blocks * self.block_tokens)]

    def event(self, tokens: list[int] | None = None) -> bytes:
        tokens = tokens or self.tokens(EVENT_BLOCKS)
        hashes = [self.rng.randrange(1 << 63) for _ in range(len(tokens) // self.block_tokens)]
        stored = BlockStored(hashes, None, tokens, self.block_tokens, medium="GPU")
        return msgspec.msgpack.encode(Batch(time.time(), [stored]))


def cpu_us(call: Callable[[], object], times: int, rounds: int) -> float:
    """Median over the rounds, microseconds of CPU for one call."""
    found = []
    for _ in range(rounds):
        start_s = time.thread_time()
        for _ in range(times):
            call()
        found.append((time.thread_time() - start_s) / times * 1e6)
    return statistics.median(found)


def question_us(bed: Bed, seconds: float, *, telling: bool) -> tuple[float, float]:
    """Wall time of questions, median and 99 in 100; ``telling``: while another thread brings in events. What
    else the machine does is in it, so the two belong together."""
    keys = bed.index.keys(bed.prompt)
    events = [bed.event() for _ in range(200)]
    stop = threading.Event()

    def tell() -> None:
        while telling and not stop.is_set():
            for worker, event in enumerate(events):
                bed.index.ingest(worker % WORKERS, event)

    thread = threading.Thread(target=tell)
    thread.start()
    found = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        start_s = time.perf_counter()
        bed.index.match(keys)
        found.append((time.perf_counter() - start_s) * 1e6)
        time.sleep(0.0005)  # as requests come, not as a loop
    stop.set()
    thread.join()
    return statistics.median(found), statistics.quantiles(found, n=100)[98]


def measure(block_tokens: int, quick: bool, peer: dict[str, float]) -> list[Row]:
    rounds, times = (5, 200) if quick else (21, 1000)
    bed = Bed(block_tokens, 2048 if quick else 16_384)
    keys = bed.index.keys(bed.prompt)
    asked = bed.prompt[:DECISION_TOKENS] if block_tokens == 64 else array.array("I", bed.tokens(288))
    asked = asked[:DECISION_TOKENS]
    events = iter([bed.event() for _ in range(rounds * 20)])
    raw = array.array("I", bed.tokens(EVENT_BLOCKS))
    ingest = cpu_us(lambda: bed.index.ingest(3, next(events)), 20, rounds)
    sha = cpu_us(lambda: bed.index.keys(raw), 20, rounds)
    decide = cpu_us(lambda: bed.index.match(bed.index.keys(asked)), times // 4, rounds)
    decide_sha = cpu_us(lambda: bed.index.keys(asked), times // 4, rounds)
    whole = decision.measure(WORKERS, DECISION_TOKENS, block_tokens, 2048, rounds).cpu_us
    match = cpu_us(lambda: bed.index.match(keys), times, rounds)
    quiet = question_us(bed, 1.0 if quick else 5.0, telling=False)
    loud = question_us(bed, 1.0 if quick else 5.0, telling=True)
    assert bed.index.check_integrity()

    def row(work: str, ours: float, unit: str, name: str, target: str, most: float | None) -> Row:
        other: float | str = peer.get(name, NOT_RUN) if name else ""
        met = None if most is None else ours <= most
        return Row(f"{work} [blocks of {block_tokens}]", ours, unit, {PEER: other}, None, target, met)

    decision_most = 150.0 if block_tokens == 64 else 150.0 + decide_sha
    decision_target = "<= 150" if block_tokens == 64 else "<= 150 beyond SHA-256"
    return [
        row(f"longest match of {QUESTION_BLOCKS} blocks, {WORKERS} engines", match, "us", "match", "<= 8", 8),
        row(f"event of {EVENT_BLOCKS} blocks, whole", ingest, "us", "ingest", "", None),
        row("  of it SHA-256", sha, "us", "", "", None),
        row("  beyond SHA-256", ingest - sha, "us", "", "<= 60", 60),
        row("memory of a block at a holder", bed.bytes_per_block, "bytes", "", "<= 100", 100),
        row(
            f"whole decision, {DECISION_TOKENS:,} tokens, {WORKERS} engines, first sight",
            whole,
            "us",
            "",
            decision_target,
            decision_most,
        ),
        row("  of it the index's part", decide, "us", "decision", "", None),
        row("    of that SHA-256", decide_sha, "us", "", "", None),
        row("question alone, median wall", quiet[0], "us", "", "", None),
        row("question alone, p99 wall", quiet[1], "us", "", "", None),
        row("question during ingest, median wall", loud[0], "us", "", "", None),
        row("question during ingest, p99 wall", loud[1], "us", "", "", None),
    ]


def peer_figures(venv: str | None, block_tokens: int) -> dict[str, float]:
    if venv is None:
        return {}
    command = [f"{venv}/bin/python", str(PEER_SCRIPT), str(WORKERS), str(QUESTION_BLOCKS), str(block_tokens)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
    if result.returncode != 0:
        print(f"{PEER}: {result.stderr.strip().splitlines()[-1:]}")
        return {}
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = make_parser(__doc__, "fewer blocks and rounds", "a venv with ai-dynamo-runtime")
    options = parser.parse_args()
    rows = []
    for block_tokens in (64, 16):
        rows += measure(block_tokens, options.quick, peer_figures(options.peers_venv, block_tokens))
    print_table("prefix index", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
