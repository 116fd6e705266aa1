"""The native regression against plain Python: the same samples leave the same coefficients."""

from __future__ import annotations

import math
import random

import pytest

from moonpool import InvalidArgument
from moonpool._native import Regression
from tests.disagg_proxy.conductor import plain_regression

COUNTS = ("samples", "odd", "refused")


def test_random_samples_teach_the_same_as_in_plain_python(rng: random.Random) -> None:
    held = opened = 0
    for _ in range(60):
        size = rng.randrange(1, 9)
        prior = [rng.random() for _ in range(size)]
        spread = [rng.choice((0.0, 0.1, rng.random())) for _ in range(size)]
        floor = rng.choice((0.005, 0.1))
        native = Regression(prior, spread, floor=floor)
        plain = plain_regression.Regression(prior, spread, floor=floor)
        truth = [rng.choice((0.0, rng.random())) for _ in range(size)]
        for first in ([rng.random() for _ in range(size)], [math.nan] * size, [-1.0] * size):
            if rng.random() < 0.5:
                assert native.start(first) == plain.start(first) == (first[0] >= 0.0)
        for number in range(200):
            if number % 70 == 69:  # it has really changed
                truth = [value * rng.choice((0.2, 1.0, 4.0)) for value in truth]
                opened += 1
            features = [rng.choice((0.0, 1.0, rng.random() * 5)) for _ in range(size)]
            y = sum(map(float.__mul__, truth, features)) * rng.uniform(0.9, 1.1)
            if rng.random() < 0.05:
                y = rng.choice((math.nan, math.inf, -1.0, 0.0, y * 30))
            said, expected = native.observe(features, y), plain.observe(features, y)
            assert said == (None if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-9))
            assert native.coefficients == pytest.approx(plain.coefficients, rel=1e-6, abs=1e-9)
            assert native.predict(features) == pytest.approx(plain.predict(features), rel=1e-6, abs=1e-9)
            held += 0.0 in plain.coefficients
        for name in COUNTS:
            assert getattr(native, name) == getattr(plain, name)
        native.check_integrity()
        plain.check_integrity()
    assert held > 100
    assert opened > 100


def test_as_many_features_as_coefficients() -> None:
    for prior, spread in (([], []), ([1.0] * 11, [1.0] * 11), ([1.0], [1.0, 2.0])):
        with pytest.raises(InvalidArgument, match="coefficients"):
            Regression(prior, spread, floor=0.1)
    native = Regression([1.0, 2.0], [1.0, 1.0], floor=0.1)
    for features in ([1.0], [1.0] * 3):
        with pytest.raises(InvalidArgument, match="a number for each"):
            native.observe(features, 1.0)
        with pytest.raises(InvalidArgument, match="a number for each"):
            native.predict(features)
        with pytest.raises(InvalidArgument, match="a number for each"):
            native.start(features)
    assert native.coefficients == (1.0, 2.0)


def test_what_others_know_is_a_first_guess_and_no_more() -> None:
    """It counts as a prior does: soon replaced by what is observed, and it replaces nothing that was."""
    guessed = Regression([1.0, 1.0], [2.0, 2.0], floor=0.1)
    assert guessed.start([5.0, 5.0])
    assert guessed.predict([1.0, 1.0]) == 10.0
    for number in range(30):
        guessed.observe([1.0, number % 7], 1.0 + 2.0 * (number % 7))
    assert guessed.coefficients == pytest.approx((1.0, 2.0), rel=0.05)
    assert not guessed.start([5.0, 5.0])
    assert guessed.coefficients == pytest.approx((1.0, 2.0), rel=0.05)
    guessed.check_integrity()
