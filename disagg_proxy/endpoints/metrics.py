"""GET /metrics without blocking the event loop.

A thousand engines make six megabytes of text, which takes half a second. So the loop collects the values and
a thread formats them. One text is made at a time; an expensive text is served again for KEPT_S seconds,
however many clients scrape.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.conductor.plan import FAILED, Answer
from moonpool.disagg_proxy.data_plane.counters import Counters
from moonpool.disagg_proxy.endpoints.relay_metrics import CONTENT_TYPE, exposition, proxy_families

KEPT_S = 1.0
CHEAP_S = 0.05  # CPU seconds; a cheaper text is made for each scrape

_log = logging.getLogger("moonpool.proxy")


class MetricsEndpoint:
    """Runs on the event loop. look: returns the relay's counters. collectors: all other metrics."""

    def __init__(self, look: Callable[[], Counters], collectors: Sequence[Collector]) -> None:
        self._look = look
        self._collectors = tuple(collectors)
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._asking: list[Callable[[Answer], None]] = []
        self._kept: Answer | None = None
        self._kept_until_s = 0.0

    def answer(self, reply: Callable[[Answer], None]) -> None:
        """Answers GET /metrics. reply: called later, on the event loop."""
        if self._kept is not None and self._loop.time() < self._kept_until_s:
            return reply(self._kept)
        self._kept = None
        if self._asking:
            self._asking.append(reply)
            return
        counters = self._look()
        others = [metric for collector in self._collectors for metric in collector.collect()]
        self._asking.append(reply)
        self._thread.submit(self._make, counters, others)

    def close(self) -> None:
        """Waits for the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self, counters: Counters, others: list[Metric]) -> None:
        """Formats the text, on the thread."""
        began_s = time.thread_time()
        try:
            answer = Answer(200, exposition([*proxy_families(counters), *others]), CONTENT_TYPE)
        except Exception:  # the client is told at once
            _log.exception("the metrics could not be written")
            answer = FAILED
        self._loop.call_soon_threadsafe(self._made, answer, time.thread_time() - began_s)

    def _made(self, answer: Answer, took_s: float) -> None:
        if took_s >= CHEAP_S:
            self._kept, self._kept_until_s = answer, self._loop.time() + KEPT_S
        asking, self._asking = self._asking, []
        for reply in asking:
            reply(answer)
