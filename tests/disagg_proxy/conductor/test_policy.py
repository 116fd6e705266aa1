"""Round robin over a set of engines that changes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.policy import POLICIES, RoundRobin, make_policy


@dataclass(frozen=True)
class FakeEngine:
    place: int
    in_flight: int = 0

    @property
    def name(self) -> str:
        return f"engine-{self.place}"


@dataclass(frozen=True)
class FakeRequest:
    path: bytes = b"/v1/completions"
    body: bytes = b"{}"


ENGINES = [FakeEngine(place) for place in range(3)]


def test_takes_turns() -> None:
    policy = RoundRobin()
    places = [policy.choose(FakeRequest(), ENGINES, 0.0).place for _ in range(7)]
    assert places == [0, 1, 2, 0, 1, 2, 0]


def test_next_is_always_the_next_place_whatever_set_is_there() -> None:
    """All sequences of four non-empty subsets of three engines, against the definition in plain words."""
    subsets = [list(s) for size in (1, 2, 3) for s in combinations(ENGINES, size)]
    for sequence in product(subsets, repeat=4):
        policy, last = RoundRobin(), -1
        for engines in sequence:
            cyclic = sorted(engines, key=lambda engine: (engine.place - last - 1) % 3)
            last = policy.choose(FakeRequest(), engines, 0.0).place
            assert last == cyclic[0].place


def test_registry_names_what_it_has() -> None:
    assert set(POLICIES) == {"round_robin"}
    assert make_policy("round_robin") is not make_policy("round_robin")
    with pytest.raises(ConfigError, match="no policy 'fastest'; choose one of round_robin"):
        make_policy("fastest")
