"""Tenants that wait get the same service, and none saves up."""

from __future__ import annotations

import random

import pytest

from moonpool.disagg_proxy.conductor.fairness import IDLE_MAX, Fairness

SEED = 20261121


def serve(fairness: Fairness, sizes: dict[str, int], count: int) -> dict[str, int]:
    """Everybody always has a request waiting; so many are served. Tokens by tenant."""
    served = dict.fromkeys(sizes, 0)
    for tenant in sizes:
        fairness.waits(tenant)
    for _ in range(count):
        tenant = min(sizes, key=fairness.served)
        fairness.waits(tenant)
        fairness.goes(tenant)
        fairness.charge(tenant, sizes[tenant])
        served[tenant] += sizes[tenant]
    return served


def test_tenants_with_longer_prompts_get_no_more_tokens() -> None:
    served = serve(Fairness(), {"short": 100, "long": 10_000}, 5_000)
    assert served["short"] == pytest.approx(served["long"], abs=10_000)


def test_who_comes_later_begins_where_the_others_are() -> None:
    fairness = Fairness()
    fairness.waits("old")
    fairness.charge("old", 1_000_000)
    fairness.waits("new")
    assert fairness.served("new") == 1_000_000
    fairness.charge("new", 10, answer=10)
    assert fairness.served("new") == 1_000_030


def test_an_idle_cluster_gives_nobody_a_lead() -> None:
    fairness = Fairness()
    fairness.waits("a")
    fairness.charge("a", 500)
    fairness.goes("a")
    fairness.waits("b")
    fairness.waits("a")
    assert fairness.served("b") == fairness.served("a") == 500


def test_who_leaves_the_line_early_takes_nobody_back() -> None:
    fairness = Fairness()
    fairness.waits("early")
    fairness.waits("old")
    fairness.charge("old", 500)
    fairness.goes("old")
    fairness.goes("early")  # its client left
    fairness.waits("new")
    assert fairness.served("new") == 500


def test_tenants_that_never_come_back_leave_nothing_behind() -> None:
    fairness, chance = Fairness(), random.Random(SEED)
    for number in range(20_000):
        name = f"t{number}"
        fairness.waits(name)
        fairness.charge(name, chance.randrange(1_000))
        fairness.goes(name)
    assert len(fairness._served) <= 2 * IDLE_MAX + 1
    fairness.goes("nobody")
    fairness.charge("nobody", -5, answer=-5)
    assert fairness.served("nobody") == 0.0


def test_tenants_that_never_wait_leave_nothing_behind_either() -> None:
    fairness = Fairness()
    fairness.waits("waits")
    for number in range(20_000):
        fairness.charge(f"t{number}", 100)
        fairness.charge("often", 1)
    assert len(fairness._served) <= 2 * IDLE_MAX + 2
    assert fairness.served("often") == 20_000  # who is served all the time is not forgotten
    assert fairness.served("t0") == 0.0
    assert fairness.served("t19999") == 100.0
    fairness.charge("waits", 7)
    for number in range(20_000):
        fairness.charge(f"u{number}", 100)
    assert fairness.served("waits") == 7.0
