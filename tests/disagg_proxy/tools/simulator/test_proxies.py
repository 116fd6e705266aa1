"""Several proxies in front of the same instances."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.disagg_proxy.conductor.arrival_rate import RemoteArrivals
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.runs import Plan, simulate
from tests.disagg_proxy.tools.simulator.clusters import unshared_prompts


def test_proxies_that_hear_of_each_other_late_do_not_all_choose_the_same_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterSettings(whole=8, tell_after_s=1.0, chunk_tokens=2048)
    plan = Plan(unshared_prompts(tmp_path, per_s=6.0), cluster, proxies=4)
    one_s = simulate(replace(plan, proxies=1)).results.ttft_mean_s
    drawn_s = simulate(plan).results.ttft_mean_s
    monkeypatch.setattr(RemoteArrivals, "unseen_s", lambda self, now_s: 0.0)
    herd_s = simulate(plan).results.ttft_mean_s
    print(f"one {one_s:.3f} s, four {drawn_s:.3f} s, four that take the least {herd_s:.3f} s")
    assert one_s < drawn_s < one_s + 0.7 * (herd_s - one_s)
