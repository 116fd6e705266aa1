"""Metrics of a process as such: which build runs, since when, and what it takes of memory, files and CPU.

The names are those of Prometheus's own clients behind the prefix of the process:
``moonpool_node_process_start_time_seconds``. They are read anew at each scrape, and stand on the process's
own page alone: of several proxy processes each has its own.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool import __version__


class ProcessMetrics(Collector):
    """prefix: of the names, with its underscore."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._process = ProcessCollector(namespace=prefix.rstrip("_"), registry=None)

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        build = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily(f"{self._prefix}build", "The build that runs; always 1.", value=build)
        yield from self._process.collect()
