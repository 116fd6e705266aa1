"""Loaded by a server of the benchmark, as a plug-in of SGLang: notes what each call of a HiCache backend
takes, one JSON line a call, in the file MOONPOOL_BENCHMARK_CALLS.

CPU is of the server's process without its main thread, which is SGLang's scheduler and never idle, and of the
processes that store: MOONPOOL_BENCHMARK_STORING, {backend's class: process ids}.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENTRY_POINT = "[sglang.srt.plugins]\nmoonpool_benchmark = moonpool_benchmark:register\n"
VERBS = {"batch_exists": "exists", "batch_get_v1": "get", "batch_set_v1": "set"}


def install(folder: Path) -> None:
    """Writes into ``folder`` what makes a server with it in PYTHONPATH load this module."""
    info = folder / "moonpool_benchmark-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moonpool-benchmark\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "moonpool_benchmark.py").write_text(Path(__file__).read_text())


def register() -> None:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    create = StorageBackendFactory.create_backend

    def created(*args: Any, **kwargs: Any) -> Any:
        backend = create(*args, **kwargs)
        pids = json.loads(os.environ["MOONPOOL_BENCHMARK_STORING"])[type(backend).__name__]
        for name, verb in VERBS.items():
            setattr(backend, name, noted(verb, getattr(backend, name), pids))
        return backend

    StorageBackendFactory.create_backend = created


def noted(verb: str, call: Callable[..., Any], pids: list[int]) -> Callable[..., Any]:
    from moonpool.core.bench.load import cpu_seconds

    scheduler = threading.main_thread().ident
    assert scheduler is not None
    clock = time.pthread_getcpuclockid(scheduler)

    def cpu_s() -> float:
        return time.process_time() - time.clock_gettime(clock) + cpu_seconds(pids)

    def timed(keys: list[str], *args: Any, **kwargs: Any) -> Any:
        before_s, started_s = cpu_s(), time.perf_counter()
        answer = call(keys, *args, **kwargs)
        wall_s = time.perf_counter() - started_s
        good = answer if isinstance(answer, int) else sum(map(bool, answer))
        line = {"verb": verb, "pages": good, "wall_s": wall_s, "cpu_s": cpu_s() - before_s}
        with open(os.environ["MOONPOOL_BENCHMARK_CALLS"], "a") as notes:
            notes.write(json.dumps(line) + "\n")
        return answer

    return timed
