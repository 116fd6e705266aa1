"""Each process says on its page which build it is, since when it runs, and what it takes."""

from __future__ import annotations

import os
import platform
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool import __version__

from .live_metrics import live_pages


@pytest.mark.parametrize("kind", ["node", "master", "proxy"])
def test_a_live_page_describes_its_process(kind: str) -> None:
    page = getattr(live_pages(), kind)
    types = [line for line in page.splitlines() if line.startswith("# TYPE ")]
    assert sorted(set(types)) == sorted(types), "a family stands there twice"
    found = {
        sample.name.removeprefix(f"moonpool_{kind}_"): sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith(f"moonpool_{kind}_")
    }
    assert found["build_info"].value == 1
    assert found["build_info"].labels == {"version": __version__, "python": platform.python_version()}
    since_s = time.time() - found["process_start_time_seconds"].value
    assert 0 < since_s < os.times().elapsed
    assert found["process_resident_memory_bytes"].value > 10e6
    assert 3 < found["process_open_fds"].value < found["process_max_fds"].value
    assert found["process_cpu_seconds_total"].value > 0
