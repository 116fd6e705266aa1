from __future__ import annotations

from moonpool.connectors.vllm.repeats import EVERY_S, KINDS_MAX, Repeats, times
from tests.connectors.vllm.fakes import Clock


def test_at_once_and_then_once_a_minute() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    assert [repeats.due("a") for _ in range(5)] == [1, 0, 0, 0, 0]
    assert repeats.due("b") == 1
    clock.now_s += EVERY_S
    assert [repeats.due("a") for _ in range(3)] == [5, 0, 0]
    clock.now_s += EVERY_S
    assert repeats.due("b") == 1
    assert repeats.due("a") == 3


def test_kinds_are_bounded() -> None:
    repeats = Repeats(Clock())
    said = [repeats.due(f"kind {number}") for number in range(KINDS_MAX + 100)]
    assert said == [1] * (KINDS_MAX + 1) + [0] * 99
    assert len(repeats._kinds) == KINDS_MAX + 1


def test_how_often_is_said_when_it_is_more_than_once() -> None:
    assert times(1) == ""
    assert "3 times" in times(3)
