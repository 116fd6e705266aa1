"""Hit rate over capacity: our caches beside what was published of both traces, and beside the bound."""

from __future__ import annotations

from benchmarks.conductor.bed import Bed
from benchmarks.report import Row
from moonpool.disagg_proxy.tools.simulator.eviction.study import CAPACITIES, CLAIRVOYANT, Question, study

# Share of all prompt tokens, by CAPACITIES; measured by an independent simulator (100 lines each).
TABLES: dict[str, dict[str, tuple[float, ...]]] = {
    "conversation": {
        "lru": (0.045, 0.067, 0.139, 0.216, 0.294, 0.332, 0.362, 0.371),
        "batches": (0.044, 0.062, 0.117, 0.195, 0.278, 0.320, 0.359, 0.370),
        "fifo": (0.044, 0.065, 0.127, 0.185, 0.262, 0.300, 0.340, 0.363),
        "lfu": (0.049, 0.077, 0.099, 0.134, 0.214, 0.281, 0.351, 0.370),
        "sieve": (0.049, 0.077, 0.099, 0.134, 0.214, 0.281, 0.351, 0.370),
        "s3fifo": (0.058, 0.097, 0.161, 0.206, 0.257, 0.291, 0.350, 0.370),
        CLAIRVOYANT: (0.194, 0.300, 0.360, 0.374, 0.374, 0.374, 0.374, 0.374),
    },
    "synthetic": {
        "lru": (0.086, 0.194, 0.315, 0.432, 0.582, 0.636, 0.651),
        "batches": (0.077, 0.179, 0.288, 0.399, 0.555, 0.624, 0.651),
        "lfu": (0.043, 0.131, 0.247, 0.365, 0.603, 0.637, 0.651),
        "s3fifo": (0.091, 0.201, 0.324, 0.440, 0.605, 0.637, 0.651),
        CLAIRVOYANT: (0.282, 0.455, 0.560, 0.629, 0.651, 0.651, 0.651),
    },
}
WITHIN = 0.003
QUICK = ("lru", CLAIRVOYANT)
SHOWN = (1_000, 3_000, 5_859, 10_000)
BYPASS = ("lru", "s3fifo", CLAIRVOYANT)


def rows(bed: Bed) -> list[Row]:
    made = [_difference(bed, "synthetic")] if bed.quick else [_difference(bed, name) for name in TABLES]
    return made + _reuse_index(bed, "synthetic" if bed.quick else "conversation")


def _difference(bed: Bed, name: str) -> Row:
    table = {cache: known for cache, known in TABLES[name].items() if not bed.quick or cache in QUICK}
    questions = [
        Question(cache, blocks_max)
        for cache, known in table.items()
        for blocks_max in CAPACITIES[: len(known)]
    ]
    found = study(bed.trace(name), questions, processes=bed.processes)
    wanted = [rate for known in table.values() for rate in known]
    most = max(abs(rate - known) for rate, known in zip(found, wanted, strict=True))
    return Row(
        f"largest difference to the known hit rates, {name} [{len(table)} caches, 1 k to 100 k blocks]",
        most,
        "",
        {},
        None,
        f"<= {WITHIN}",
        most <= WITHIN,
    )


def _reuse_index(bed: Bed, name: str) -> list[Row]:
    sizes = SHOWN[1:3] if bed.quick else SHOWN
    questions = [Question(cache, size) for size in sizes for cache in ("reuse_index", *BYPASS)]
    found = iter(study(bed.trace(name), questions, processes=bed.processes))
    made = []
    for size in sizes:
        ours, *others = [next(found) * 100 for _ in range(1 + len(BYPASS))]
        beside = dict(zip(BYPASS, others, strict=True))
        bound = beside.pop(CLAIRVOYANT)
        made.append(
            Row(
                f"hit rate of the reuse index, {name} [{size:,} blocks of 512 tokens]",
                ours,
                "%",
                dict(beside),
                bound,
                "above LRU and S3-FIFO",
                ours > max(beside.values()),
            )
        )
    return made
