"""Prompts of conversations, as token ids.

    prompt of turn k = a shared prefix, one of ``prefixes`` | k + 1 pieces of the conversation's own

A piece stands for a question and the answer before it, so each prompt begins with the one before. The fresh
prompts of the baseline have the same lengths, and no two of them a token's beginning in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from moonpool.core.errors import ConfigError

_PREFIX, _OWN, _FRESH = range(3)
_bad = partial(ConfigError, operation="bench")


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts, and lengths in tokens. prefixes: how many there are of ``prefix_tokens``; conversations have
    them in turn. first_id, last_id: the range of token ids. Raises ConfigError for what cannot be sent.
    """

    sessions: int = 16
    turns: int = 4
    prefixes: int = 2
    prefix_tokens: int = 1024
    turn_tokens: int = 256
    answer_tokens: int = 32
    first_id: int = 1000
    last_id: int = 29_999
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "prefixes", "turn_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise _bad(f"{name} is at least 1")
        if self.prefix_tokens < 0 or self.seed < 0:
            raise _bad("prefix_tokens and seed cannot be negative")
        if not 0 <= self.first_id < self.last_id < 1 << 31:
            raise _bad(
                f"token ids are a range from the lower to the higher, not {self.first_id}:{self.last_id}"
            )

    @property
    def requests(self) -> int:
        """How many prompts there are."""
        return self.sessions * self.turns

    def length(self, turn: int) -> int:
        """Tokens of a prompt."""
        return self.prefix_tokens + (turn + 1) * self.turn_tokens


class Conversations:
    """Every prompt of a shape; the same seed gives the same ones."""

    def __init__(self, shape: Shape, *, fresh: bool = False) -> None:
        """fresh: prompts that have nothing in common."""
        self.shape = shape
        self._fresh = fresh
        self._begun: set[int] = set()

    def ids(self, session: int, turn: int) -> list[int]:
        """Of the prompt of that turn, from 0."""
        shape = self.shape
        if self._fresh:
            number = session * shape.turns + turn
            return cast(list[int], self._random(shape.length(turn), _FRESH, number).tolist())
        prefix = self._random(shape.prefix_tokens, _PREFIX, session % shape.prefixes)
        own = self._random(shape.turns * shape.turn_tokens, _OWN, session)
        return cast(list[int], np.concatenate([prefix, own[: (turn + 1) * shape.turn_tokens]]).tolist())

    def reusable(self, session: int, turn: int) -> int:
        """Leading tokens that prompts had for which it was called before: what a cache without a limit would
        hold. Call it once for each prompt, in the order in which they are sent.
        """
        if self._fresh:
            return 0
        prefix = session % self.shape.prefixes
        known = self.shape.prefix_tokens if prefix in self._begun else 0
        self._begun.add(prefix)
        return self.shape.length(turn - 1) if turn else min(known, self.shape.length(0) - 1)

    def _random(self, length: int, kind: int, number: int) -> np.ndarray:
        chance = np.random.default_rng((self.shape.seed, kind, number))
        return chance.integers(self.shape.first_id, self.shape.last_id, length, endpoint=True)
