"""The option gpu_pin: how far the pins of a node's memory come, in messages, and where they stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool import _native
from moonpool.connectors import pinned_arena
from moonpool.connectors.pinned_arena import ALL, pin_arena, pin_bytes
from moonpool.core.errors import ConfigError

GIB = 1 << 30


def test_sizes() -> None:
    assert [pin_bytes("p", "k", value) for value in (0, "0", "512MiB", 4096, "all")] == [
        0,
        0,
        512 << 20,
        4096,
        ALL,
    ]
    for value in ("some", "", None, False, -1, "-1"):
        with pytest.raises(ConfigError, match=r"p\.k must be 0, a size such as 16GiB, or \"all\", not"):
            pin_bytes("p", "k", value)


class Card:
    """A card's KV cache whose node has an arena of ``arena`` bytes, of which ``most`` can be pinned."""

    def __init__(self, arena: int, most: int, why: str = "it is full") -> None:
        self._arena, self._most, self._why = arena, most, why
        self.pinned = 0
        self.steps: list[int] = []

    def pin_arena(self, client: object, size: int) -> Any:
        """As _native.DeviceKv."""
        self.steps.append(size)
        goal = min(size, self._arena)
        self.pinned = max(self.pinned, min(goal, self._most))
        why = self._why if self.pinned < goal else ""
        return SimpleNamespace(pinned_bytes=self.pinned, arena_bytes=self._arena, why=why)


def pins(card: Card, wanted: int, *, client: bool = True) -> list[str]:
    """What is said."""
    said: list[str] = []
    pin_arena(
        cast("_native.DeviceKv", card),
        cast("_native.Client", object()) if client else None,
        wanted,
        info=lambda text: said.append("info " + text),
        warning=lambda text: said.append("warning " + text),
    )
    return said


def test_all_of_it_in_steps() -> None:
    card = Card(20 * GIB, ALL)
    assert pins(card, ALL) == [
        f"info {size}.0 GiB of the node's 20.0 GiB are pinned for the card" for size in (8, 16, 20)
    ]
    assert card.steps == [step * pinned_arena.STEP_BYTES for step in (1, 2, 3)]


def test_as_much_as_is_asked_for() -> None:
    card = Card(20 * GIB, ALL)
    assert pins(card, 10 * GIB) == [
        f"info {size}.0 GiB of the node's 20.0 GiB are pinned for the card" for size in (8, 10)
    ]
    assert card.pinned == 10 * GIB


def test_where_it_stops() -> None:
    assert pins(Card(20 * GIB, 9 * GIB), ALL) == [
        "info 8.0 GiB of the node's 20.0 GiB are pinned for the card",
        "warning 9.0 GiB of the node's 20.0 GiB are pinned for the card; loads of the rest go through the "
        "ring (it is full)",
    ]


def test_nothing_is_asked_for_and_no_pool() -> None:
    card = Card(GIB, ALL)
    assert pins(card, 0) == []
    (said,) = pins(card, ALL, client=False)
    assert said.startswith("warning there is no pool yet")
    assert card.steps == []
