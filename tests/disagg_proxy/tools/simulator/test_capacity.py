import json
import math
import random
from pathlib import Path

import pytest

from moonpool.disagg_proxy.tools.simulator.capacity import SPEED_MAX, capacity
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES
from moonpool.disagg_proxy.tools.simulator.results import Slo
from moonpool.disagg_proxy.tools.simulator.runs import Plan, simulate
from tests.disagg_proxy.tools.simulator.clusters import PLAIN


@pytest.fixture
def plan(tmp_path: Path, rng: random.Random) -> Plan:
    """Half a second of prompt each second, one instance."""
    rows = [
        {
            "timestamp": 1000 * number + rng.randrange(900),
            "input_length": 500,
            "output_length": 1,
            "hash_ids": [number],
        }
        for number in range(400)
    ]
    path = tmp_path / "even.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return Plan(path, ClusterSettings(prefill=1, machine=PLAIN), "round_robin")


@pytest.mark.parametrize("begin", [0.3, 1.9, 30.0])
@pytest.mark.parametrize("step", [1.05, 2.0])
def test_the_greatest_speed_is_found_from_wherever_one_begins(plan: Plan, begin: float, step: float) -> None:
    slo = Slo(2.0)
    tried: dict[float, float] = {}
    found = capacity(
        Plan(plan.trace, plan.cluster, plan.policy, speed=begin), slo, step=step, tried=tried.__setitem__
    )
    assert 1.9 < found < 2.2
    assert tried[found] >= 0.9
    assert all(share < 0.9 for speed, share in tried.items() if speed > found)
    assert min(speed for speed in tried if speed > found) <= found * 1.02


def test_what_is_never_good_enough_has_no_capacity(plan: Plan) -> None:
    assert capacity(plan, Slo(0.1)) == 0.0


def test_what_is_always_good_enough_has_no_end(plan: Plan) -> None:
    tried: list[float] = []
    assert capacity(plan, Slo(1e9), tried=lambda speed, good: tried.append(speed)) == math.inf
    assert max(tried) == SPEED_MAX


def test_one_seed_is_one_result(plan: Plan) -> None:
    once, again = simulate(plan).results, simulate(plan).results
    assert once.ttft_s == again.ttft_s


def test_eight_bit_numbers_on_the_newer_machine_are_worth_their_peak_rates() -> None:
    old, new = MACHINES["paper"], MACHINES["h100_fp8"]
    assert old.compute_s(30_000) / new.compute_s(30_000) == pytest.approx(1979 / 312)
    assert 2 < old.step_of_s(50, 500_000) / new.step_of_s(50, 500_000) < 3.3
    assert new.room_tokens - old.room_tokens == int(70e9 / 327_680)
