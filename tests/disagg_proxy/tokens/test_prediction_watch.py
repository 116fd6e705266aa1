"""Predictions that keep differing are said once."""

from __future__ import annotations

from moonpool.disagg_proxy.tokens.prediction_watch import WINDOW, PredictionWatch


def test_good_predictions_are_silent() -> None:
    watch = PredictionWatch(tolerance_tokens=64)
    assert not any(watch.report(1_000, 1_000, 512, 512 + 16 * (i % 4)) for i in range(500))
    assert (watch.reports, watch.wrong) == (500, 0)


def test_a_few_wrong_ones_are_silent() -> None:
    watch = PredictionWatch(tolerance_tokens=64)
    assert not any(watch.report(1_000, 1_000, 900 if i % 4 == 0 else 0, 0) for i in range(500))
    assert watch.wrong == 125


def test_blindness_is_said_once_with_its_likely_cause() -> None:
    watch = PredictionWatch(tolerance_tokens=64)
    said = [watch.report(1_000, 1_007, 0, 896) for _ in range(3 * WINDOW)]
    assert sum(map(bool, said)) == 1
    assert "template" in next(filter(None, said))
    watch = PredictionWatch(tolerance_tokens=64)
    said = [watch.report(1_000, 1_000, 896, 0) for _ in range(3 * WINDOW)]
    assert sum(map(bool, said)) == 1
    assert "events" in next(filter(None, said))
    watch = PredictionWatch(tolerance_tokens=64)
    said = [watch.report(1_000, 1_000, 0, 896) for _ in range(3 * WINDOW)]
    assert sum(map(bool, said)) == 1
    assert "--pool-events" in next(filter(None, said))
