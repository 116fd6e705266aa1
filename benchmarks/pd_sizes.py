"""What a hand-over takes between engines of different tensor-parallel sizes, beside engines of equal ones.

    python -m benchmarks.pd_sizes [--quick] [--json FILE]

No engine: the connector's workers of a prefill engine in one process and of a decode engine in another, over
numpy memory in vLLM's layouts, 16 layers of 8 KV heads. A prompt is handed over in the two-step form; time:
from when all decode workers may read until the last of them has all of its heads. Figures are medians. The
other column is one worker to one in the same layouts, where each byte is read once, too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer
from moonpool.connectors.vllm.pd.step_plan import HandoverStep, Pull
from tests.connectors.vllm.pd.rank_memory import Shape
from tests.connectors.vllm.pd.rank_worlds import engine

HEADS = 8
SHAPE = Shape(layers=16, blocks=65, tokens=16, content=256)  # in float32: as of 512 numbers in FP16
BLOCKS = range(1, SHAPE.blocks)
SIZES = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4))
LAYOUTS = ("HND", "NHD")
TARGET = 1.3
WARM_UP_ROUNDS = 2


def prefill(tp_size: int, layout: str, pipe: Connection) -> None:
    """Offers its blocks as often as it is asked to; the process of a prefill engine."""
    with engine("P", tp_size, heads=HEADS, layout=layout, computed=True, shape=SHAPE) as made:
        for number in iter(pipe.recv, None):
            pipe.send(made.offer(BLOCKS, lease=1 + number, slot=number))


@contextmanager
def prefill_process(tp_size: int, layout: str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(tp_size, layout, there), daemon=True)
    process.start()
    try:
        yield here
        here.send(None)
        process.join(20)
    finally:
        process.kill()


def measure(sizes: tuple[int, int], layouts: tuple[str, str], transport: str, rounds: int) -> float:
    """Median milliseconds of a hand-over."""
    theirs, ours = sizes
    transports = ["tcp"] if transport == "tcp" else None
    taken_s = []
    with (
        prefill_process(theirs, layouts[0]) as pipe,
        engine("D", ours, heads=HEADS, layout=layouts[1], transports=transports, shape=SHAPE) as decode,
    ):
        for number in range(rounds + WARM_UP_ROUNDS):
            pipe.send(number)
            offer: Offer = pipe.recv()
            name = f"r{number}"
            decode.hold(offer, len(BLOCKS), name=name)
            pull = HandoverStep(pulls=(Pull(name, 0, (tuple(BLOCKS),)),))
            began_s = time.perf_counter()
            # A thread for each rank, which in an engine is a process.
            pulling = [threading.Thread(target=worker.pull, args=(pull,)) for worker in decode.workers]
            for thread in pulling:
                thread.start()
            ended = decode.ended()
            taken_s.append(time.perf_counter() - began_s)
            for thread in pulling:
                thread.join()
            assert all(each.good == len(BLOCKS) for each in ended), ended
            decode.drop(name=name)
    return 1e3 * statistics.median(taken_s[WARM_UP_ROUNDS:])


def rows_of(layouts: tuple[str, str], transport: str, rounds: int) -> list[Row]:
    taken = {sizes: measure(sizes, layouts, transport, rounds) for sizes in SIZES}
    equal = taken[1, 1]
    nbytes = SHAPE.layers * len(BLOCKS) * HEADS * SHAPE.tokens * SHAPE.content * 4
    return [
        Row(
            f"{sizes[0]} to {sizes[1]} ranks, {layouts[0]} to {layouts[1]}, {transport} [{nbytes >> 20} MiB]",
            ours,
            "ms",
            {"1 to 1": equal},
            None,
            f"<= {TARGET}x equal sizes",
            ours <= TARGET * equal,
        )
        for sizes, ours in taken.items()
        if sizes != (1, 1)
    ]


def main() -> None:
    parser = make_parser(__doc__, "fewer rounds, equal layouts only; under 60 s")
    options = parser.parse_args()
    pairs = list(itertools.product(LAYOUTS, repeat=2))
    rounds = 5 if options.quick else 25
    rows = [
        row
        for layouts in pairs
        for transport in ("memory", "tcp")
        if not options.quick or layouts[0] == layouts[1]
        for row in rows_of(layouts, transport, rounds)
    ]
    print_table("Hand-overs between engines of different sizes, medians", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
