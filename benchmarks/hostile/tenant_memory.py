"""Two tenants of one node: one floods it with puts and reads, the other one reads what it has, and puts what
it misses, as a cache is used."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

from benchmarks.hostile.bed import MIB, TOKEN, Setting
from benchmarks.hostile.tenant_flood import NOWHERE, THREADS
from benchmarks.processes import PYTHON, Failed, Process
from benchmarks.report import Row
from moonpool import Store

SHARE_MIB, FLOODED_MIB = 64, 192
OBJECT_BYTES = 128 << 10
OBJECTS = 640  # 80 MiB, more than the share
SETTINGS = """
[cluster]
tenants_file = "{tenants}"
[node]
dram = "16MiB"
listen = "off"
http = "off"
tenants = {{ quiet = "{share}MiB", flood = "{flooded}MiB" }}
"""
ROW = '[[tenants]]\nname = "{name}"\nrole = "writer"\nkeys = ["the-key-of-{name}-of-this-benchmark"]\n'
P99_MAX, HITS_MIN = 1.5, 0.97


class Quiet:
    """The tenant that is to notice nothing."""

    def __init__(self, path: str) -> None:
        self.store = Store(path, tenant="quiet", token=TOKEN.encode())
        self.content = bytes(OBJECT_BYTES)
        self.into = bytearray(OBJECT_BYTES)

    def use(self, seconds: float) -> tuple[float, float]:
        """(p99 of a read that hits, in us; hit rate) of reads whose keys are Pareto-distributed."""
        rng = random.Random(1)
        took_us: list[float] = []
        reads = 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            key = f"k{int((rng.paretovariate(0.6) - 1) * 40) % OBJECTS}"
            reads += 1
            began_s = time.perf_counter()
            found = self.store.get(key, self.into)
            took = time.perf_counter() - began_s
            if found is None:
                self.store.put(key, self.content)
            else:
                took_us.append(took * 1e6)
        return statistics.quantiles(took_us, n=100)[-1], len(took_us) / reads


def tenant_memory(setting: Setting) -> list[Row]:
    """The quiet tenant alone with its share, beside a process that takes as much of the machine, and beside
    the flood."""
    seconds = setting.long(20.0, 2.0)
    tenants, config = setting.folder / "tenants.toml", setting.folder / "node.toml"
    tenants.touch(mode=0o600)
    tenants.write_text(
        ROW.format(name="quiet")
        + f'dram_min = "{SHARE_MIB}MiB"\n'
        + ROW.format(name="flood")
        + f'dram_min = "{MIB}"\ndram_max = "{SHARE_MIB + FLOODED_MIB}MiB"\n'
    )
    config.write_text(SETTINGS.format(tenants=tenants, share=SHARE_MIB, flooded=FLOODED_MIB))
    _, path = setting.node("shared", "--config", config)
    quiet = Quiet(path)
    setting.stack.callback(quiet.store.close)
    quiet.use(seconds / 2)
    alone_us, alone_hits = quiet.use(seconds)
    results = {}
    for name, socket in (("machine", NOWHERE), ("flood", path)):
        process = _flood(setting.folder, name, socket)
        try:
            process.wait_for_output("floods")
            quiet.use(seconds / 4)
            before = quiet.store.stat()["stored_bytes_total"]
            results[name] = quiet.use(seconds)
            flooded = quiet.store.stat()["stored_bytes_total"] - before
        finally:
            process.stop()
    beside_us, hits = results["flood"]
    slower, fewer = beside_us / alone_us, hits / alone_hits
    rate = flooded / seconds / 1e9  # what the quiet tenant puts is less than 1 % of it
    if rate < 0.01:
        raise Failed(f"there was no flood: {rate:.3f} GB/s")
    work = f"a tenant puts {rate:.2g} GB/s on {THREADS} threads and reads them: another one's"
    return [
        Row(
            f"{work} p99 of a read [{OBJECT_BYTES >> 10} KiB], {beside_us:.0f} us, in times of alone",
            slower, "x", {}, results["machine"][0] / alone_us,
            f"at most {P99_MAX}x", None if setting.quick else slower <= P99_MAX,
        ),
        Row(
            f"{work} hit rate, {hits:.3f}, in times of alone with its share",
            fewer, "x", {}, None, f"at least {HITS_MIN}x", None if setting.quick else fewer >= HITS_MIN,
        ),
    ]  # fmt: skip


def _flood(folder: Path, name: str, socket: str) -> Process:
    command = [PYTHON, "-m", "benchmarks.hostile.tenant_flood", socket, "flood"]
    return Process(command, folder / f"{name}.log", extra={"MOONPOOL_CLUSTER_TOKEN": TOKEN})
