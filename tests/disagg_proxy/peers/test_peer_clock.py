"""How late another proxy's messages are taken to be."""

from __future__ import annotations

import math

import pytest

from moonpool.disagg_proxy.peers.peer_clock import LAG_MAX_S, LATE_MAX, PeerClock


def test_where_clocks_agree_the_lag_is_the_difference() -> None:
    clock = PeerClock()
    assert [clock.lag_s(100.0 + at, 100.0 + at + late) for at, late in ((0, 0.2), (1, 0.25), (2, 0.0))] == (
        pytest.approx([0.2, 0.25, 0.0])
    )
    for at in range(200):
        clock.lag_s(at + 200.0, at + 200.2)
    assert clock.mean_lag_s == pytest.approx(0.2)


@pytest.mark.parametrize("apart_s", [-0.5, -3_600.0, 3.0, 86_400.0])
def test_where_clocks_differ_the_fastest_message_counts_as_one_without_lag(apart_s: float) -> None:
    """apart_s: by how much the own clock is ahead."""
    clock = PeerClock()
    lates_s = [0.3] * (LATE_MAX + 1) + [0.1, 0.4, 0.01, 0.3, 0.2]
    found = [clock.lag_s(at + 1e6, at + 1e6 + apart_s + late) for at, late in enumerate(lates_s)]
    assert found[-1] == pytest.approx(0.19)
    assert 0 < clock.mean_lag_s < 0.2


def test_one_message_that_is_very_late_changes_nothing() -> None:
    clock = PeerClock()
    for at, late in enumerate([0.2] * 100 + [2.5] * LATE_MAX + [math.nan, math.inf] + [0.2] * 3):
        lag_s = clock.lag_s(at + 100.0, at + 100.0 + late)
        assert lag_s == pytest.approx(LAG_MAX_S if late == 2.5 else 0.2 if late == 0.2 else 0.0)
    assert clock.mean_lag_s == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("set_by_s", [3_600.0, -50.0, LAG_MAX_S + 0.1])
def test_a_clock_that_is_set_anew_is_no_lag_for_long(set_by_s: float) -> None:
    clock = PeerClock()
    for _ in range(2):
        clock.lag_s(100.0, 100.2)
        for _ in range(LATE_MAX + 1):
            clock.lag_s(200.0, 200.2 + set_by_s)
        assert clock.lag_s(201.0, 201.2 + set_by_s) == pytest.approx(0.0, abs=1e-6)
    for _ in range(2):  # and right again
        found = clock.lag_s(300.0, 300.2)
    assert found == pytest.approx(0.2)


def test_an_older_proxy_which_does_not_say_when_it_sends_has_no_lag() -> None:
    clock = PeerClock()
    assert clock.lag_s(0.0, 1e9) == 0.0
    assert clock.mean_lag_s == 0.0
