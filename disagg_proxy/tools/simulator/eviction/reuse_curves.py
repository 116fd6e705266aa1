"""The probability that a chat continues, learnt from observed chats, and the value of its place in a cache.

A class of chats is those with the same number of turns. For each class there are counts by age, in slots of
SLOT_S: how many chats continued at that age, and how many were observed up to it. From the two comes a
hazard, shrunk towards that of all classes where there are few observations, and from the hazards an index for
each age a:

    max over horizons T of   P(continues within T | not until a)  /  E[time in cache until it does, or T]

This is the Gittins index of a chain that costs room for as long as it is kept and pays once it is used
(Gittins 1979). The hazard alone would be worse than recency: a chat pauses for half a minute before its next
turn, so by the hazard one that has just ended looks useless.
"""

from __future__ import annotations

from collections.abc import Iterable

SLOT_S = 5.0
SLOTS = 360
CLASSES = 4  # the last one: so many turns and more
STRENGTH = 30.0  # observed chats that the prior counts as


class ReuseCurves:
    """Ages and times in slots."""

    def __init__(self) -> None:
        self._went_on = [[0] * SLOTS for _ in range(CLASSES)]
        self._watched = [[0] * SLOTS for _ in range(CLASSES)]  # observed until this age and no longer
        # The prior: the older, the less likely.
        self.index = [[1.0 / (age + 1) for age in range(SLOTS)] for _ in range(CLASSES)]

    def went_on(self, turns: int, age: int) -> None:
        """A chat with so many turns continued at this age. The index follows with the next ``learn``."""
        self._went_on[turns][min(age, SLOTS - 1)] += 1
        self.lost(turns, age)

    def lost(self, turns: int, age: int) -> None:
        """The chat is not observed any longer."""
        self._watched[turns][min(age, SLOTS - 1)] += 1

    def learn(self, waiting: Iterable[tuple[int, int]]) -> None:
        """Computes the index again. waiting: (turns, age) of chats that are still observed."""
        at_risk = [list(counts) for counts in self._watched]
        for turns, age in waiting:
            at_risk[turns][min(age, SLOTS - 1)] += 1
        for counts in at_risk:
            for age in range(SLOTS - 2, -1, -1):
                counts[age] += counts[age + 1]
        of_all = []
        for age in range(SLOTS):
            went_on = sum(counts[age] for counts in self._went_on)
            watched = sum(counts[age] for counts in at_risk)
            of_all.append((went_on + STRENGTH * _prior(age)) / (watched + STRENGTH))
        for turns in range(CLASSES):
            self.index[turns] = gittins(
                [
                    (self._went_on[turns][age] + STRENGTH * of_all[age]) / (at_risk[turns][age] + STRENGTH)
                    for age in range(SLOTS)
                ]
            )


def gittins(hazards: list[float]) -> list[float]:
    """The index for each age, per slot. From the last age back: a stretch of ages absorbs the one behind it
    as long as that has the better ratio, so that each age is visited once.
    """
    found = [0.0] * len(hazards)
    stretches: list[tuple[float, float, float]] = []  # (gain, cost, share that still waits behind it)
    for age in range(len(hazards) - 1, -1, -1):
        hazard = hazards[age]
        gain, cost, left = hazard, 1 - hazard / 2, 1 - hazard
        while stretches and stretches[-1][0] * cost >= gain * stretches[-1][1]:
            more, longer, share = stretches.pop()
            gain, cost, left = gain + left * more, cost + left * longer, left * share
        stretches.append((gain, cost, left))
        found[age] = gain / cost
    return found


def _prior(age: int) -> float:
    return 0.1 / (age + 6)
