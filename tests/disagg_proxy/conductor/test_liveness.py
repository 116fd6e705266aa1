"""When an engine counts as there."""

from __future__ import annotations

from itertools import product

from moonpool.disagg_proxy.conductor.liveness import Health, Liveness


def test_life_of_an_engine() -> None:
    liveness = Liveness(timeouts_max=3)
    assert liveness.state is Health.UNKNOWN
    assert not liveness.healthy
    assert liveness.succeeded(1.0)
    assert not liveness.succeeded(2.0)  # no change
    assert liveness.silent_s(5.0) == 3.0
    assert not liveness.timed_out(6.0, "late")
    assert not liveness.timed_out(7.0, "late")
    assert liveness.healthy
    assert liveness.timed_out(8.0, "late")
    assert liveness.state is Health.DEAD
    assert liveness.why == "late"
    assert liveness.changed_at == 8.0
    assert liveness.succeeded(9.0)
    assert liveness.healthy
    assert liveness.why == ""


def test_a_late_answer_between_good_ones_does_no_harm() -> None:
    liveness = Liveness(timeouts_max=2)
    for now in range(100):
        liveness.succeeded(now)
        liveness.timed_out(now + 0.5, "late")
        assert liveness.healthy


def test_a_refusal_counts_at_once() -> None:
    liveness = Liveness(timeouts_max=3)
    liveness.succeeded(0.0)
    assert liveness.refused(1.0, "refuses connections")
    assert liveness.state is Health.DEAD


def test_an_engine_that_never_answered_is_not_silent() -> None:
    liveness = Liveness(timeouts_max=1)
    liveness.timed_out(100.0, "late")
    assert liveness.silent_s(1000.0) == 0.0


def test_invariants_over_all_short_histories() -> None:
    for history in product("srt", repeat=6):
        liveness, healthy = Liveness(timeouts_max=2), False
        run = 0
        for now, event in enumerate(history):
            if event == "s":
                liveness.succeeded(now)
            elif event == "r":
                liveness.refused(now, "refused")
            else:
                liveness.timed_out(now, "late")
            run = run + 1 if event == "t" else 0 if event == "s" else run
            healthy = event == "s" or (healthy and event == "t" and run < 2)
            liveness.check_integrity()
            assert liveness.healthy == healthy, history
