"""How late another proxy's messages are taken to be."""

from __future__ import annotations

import pytest

from moonpool.disagg_proxy.peers.peer_clock import LAG_MAX_S, PeerClock


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
    for at, late in enumerate((0.3, 0.1, 0.4, 0.01, 0.3, 0.2)):
        found = clock.lag_s(at + 1e6, at + 1e6 + apart_s + late)
    assert found == pytest.approx(0.19)
    assert 0 < clock.mean_lag_s < 0.2


def test_a_clock_that_is_set_anew_is_no_lag_for_long() -> None:
    clock = PeerClock()
    clock.lag_s(100.0, 100.01)
    for set_by_s in (3_600.0, -50.0, LAG_MAX_S + 0.1):
        clock.lag_s(200.0, 200.01 + set_by_s)
        assert clock.lag_s(201.0, 201.01 + set_by_s) == pytest.approx(0.0, abs=1e-6)


def test_an_older_proxy_which_does_not_say_when_it_sends_has_no_lag() -> None:
    clock = PeerClock()
    assert clock.lag_s(0.0, 1e9) == 0.0
    assert clock.mean_lag_s == 0.0
