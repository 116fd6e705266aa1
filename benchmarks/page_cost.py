"""What the page at /ui costs the proxy: for each request on the thread that decides, for each request on the
event loop, and for each page of a thousand instances.

    python -m benchmarks.page_cost [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.observer import Finished
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import Observation
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.ui.history import FRESH_MAX, LAST_MAX, History

INSTANCES = 1_000
TURNS, QUICK_TURNS = 200, 20


def over() -> Finished:
    values = dict.fromkeys(Observation._fields, 0)
    values |= {"arrived_s": 10.0, "first_byte_s": 10.5, "last_byte_s": 12.0, "stream": 1, "status": 200}
    values |= {"prompt_tokens": 4600, "cached_tokens": 2000, "trace_id": bytes(16)}
    why = {"predicted_ttft_s": 0.4, "wait_s": 0.1, "prefill_s": 0.3, "own_tokens": 2000, "reason": "match"}
    asked = Request(4600, [1000] * INSTANCES, 3000)
    return Finished(Observation(**values), Choice(Worker(3, "engine-3"), None, 0.3, why), asked, 10.0)


def each_us(work: Callable[[], object], count: int, turns: int) -> float:
    """The median turn's CPU time for one of ``count``, in microseconds."""
    taken_us = []
    for _ in range(turns):
        began_s = time.thread_time()
        work()
        taken_us.append((time.thread_time() - began_s) / count * 1e6)
    return statistics.median(taken_us)


def of_a_request(turns: int) -> tuple[float, float]:
    """(on the thread that decides, on the event loop)"""
    history = History(float, dict)
    finished = over()

    def end() -> None:
        ended = history.on_finish
        for _ in range(FRESH_MAX):
            ended(finished)

    ending = each_us(end, FRESH_MAX, turns)

    def end_and_gather() -> None:
        end()
        history.gather(10.0)

    return ending, each_us(end_and_gather, FRESH_MAX, turns) - ending


async def of_a_page() -> tuple[float, float, int]:
    """(milliseconds of CPU of a page, of one step's gauges, its bytes)"""
    specs = tuple(
        EngineSpec(f"engine-{place}", f"http://127.0.0.1:{20_000 + place}") for place in range(INSTANCES)
    )
    proxy = Proxy(ProxySettings(port=0, engines=specs, policy="conductor"))
    made = over()
    for _ in range(LAST_MAX):
        proxy.ui.history.on_finish(made)
    proxy.ui.gather()
    pages, gauges = [], []
    for _ in range(20):
        proxy.relay.advance_clock_for_test(1.1)  # else the last page is given again
        began_s = time.thread_time()
        page = proxy.ui.page()
        pages.append(time.thread_time() - began_s)
        began_s = time.thread_time()
        proxy.ui.wait_s()
        gauges.append(time.thread_time() - began_s)
    await proxy.close()
    return statistics.median(pages) * 1e3, statistics.median(gauges) * 1e3, len(page)


def main() -> None:
    parser = make_parser(__doc__, "fewer turns")
    options = parser.parse_args()
    deciding_us, gathering_us = of_a_request(QUICK_TURNS if options.quick else TURNS)
    page_ms, gauges_ms, size = asyncio.run(of_a_page())
    rows = [
        _row("a request, on the thread that decides", deciding_us, "us"),
        _row("a request, on the event loop", gathering_us, "us"),
        _row(f"a page [{INSTANCES:,} instances, {size:,} bytes]", page_ms, "ms"),
        _row("the longest line of it, each 5 s", gauges_ms, "ms"),
    ]
    print_table("CPU time of the proxy's page", rows)
    write_json(options.json, rows)


def _row(work: str, ours: float, unit: str) -> Row:
    return Row(work, ours, unit, {}, None, "", None)


if __name__ == "__main__":
    main()
