"""The native Ranges: which lists of memory lie in what was added, beside a slow model of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moonpool import _native


def test_ranges_never_overlap() -> None:
    ranges = _native.Ranges()
    assert ranges.add(100, 50)
    for start, length in (
        (100, 50),
        (90, 11),
        (149, 1),
        (120, 5),
        (0, 1000),
        (0, 0),
        (200, 0),
        (2**64 - 1, 2),
    ):
        assert not ranges.add(start, length)
    assert ranges.add(150, 10)  # neighbours
    assert ranges.add(99, 1)
    assert not ranges.hold([149], [2])  # one piece of memory lies in one range
    assert not ranges.remove(101)
    assert ranges.remove(100)
    assert not ranges.hold([100], [1])
    assert ranges.hold([150], [10])
    ranges.clear()
    assert not ranges.hold([150], [10])
    for bad in (-1, 2**64, "1", None, 1.5):
        with pytest.raises(TypeError):
            ranges.add(bad, 1)


def test_only_lists_of_numbers() -> None:
    ranges = _native.Ranges()
    ranges.add(0, 2**63)
    good: list[tuple[Any, Any]] = [([1], [1]), ([0, 5], [2**63, 1])]
    bad: list[tuple[Any, Any]] = [
        ([], []), ([1], []), ([1], [1, 2]), ((1,), (1,)), ([1], (1,)), ([1.0], [1]), ([True], [1]),
        (["1"], [1]),
        ([None], [1]), ([-1], [1]), ([1], [-1]), ([2**64], [1]), ([1], [2**64]), ([1], [0]), ([2**63], [1]),
        ([5], [2**63]), ([5], [2**64 - 1]), (1, 1), (None, None), ([[1]], [[1]]),
    ]  # fmt: skip
    for one in good:
        assert ranges.hold(*one)
        assert ranges.hold_lists([one[0]] * 2, [one[1]] * 2)
        assert not ranges.hold_lists(*one)
    for one in bad:
        assert not ranges.hold(*one), one
        assert not ranges.hold_lists([[1], one[0]], [[1], one[1]]), one
    assert not ranges.hold_lists([[1]], [[1], [1]])
    assert not ranges.hold_lists([], [])
    assert not ranges.hold_lists(((1,),), ((1,),))


def test_beside_a_model(rng: random.Random) -> None:
    ranges, model = _native.Ranges(), dict[int, int]()
    for _ in range(2000):
        start, length = rng.randrange(200), rng.randrange(12)
        if rng.random() < 0.3:
            assert ranges.remove(start) == (model.pop(start, None) is not None)
        elif rng.random() < 0.4:
            free = length > 0 and all(start + length <= s or s + n <= start for s, n in model.items())
            assert ranges.add(start, length) == free
            if free:
                model[start] = length
        asked = [(rng.randrange(210), rng.randrange(6)) for _ in range(rng.randrange(1, 4))]
        inside = all(n > 0 and any(s <= a and a + n <= s + m for s, m in model.items()) for a, n in asked)
        assert ranges.hold([a for a, _ in asked], [n for _, n in asked]) == (asked if inside else None)
