"""Chooses the next tenant among those with waiting requests: each gets the same service, however much it
asks.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's
counter grows by the tokens that are computed for it, tokens of answers counting twice; the tenant with the
lowest counter is next. A tenant that returns after a while starts at the others' level, so that none
accumulates credit. Service while no request waits is not charged: it treats no tenant unfairly, and a day of
it would put that tenant last for a day once a queue forms. Pure: no clock.
"""

from __future__ import annotations

from collections import Counter

IDLE_MAX = 256  # counters of tenants without a waiting request
ANSWER_WEIGHT = 2.0  # a token of an answer to one of a prompt, as in the paper


class Fairness:
    """The queue orders by priority before fairness, and by arrival after it."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._last = 0.0  # virtual time: the highest counter of a tenant when its last request left the queue

    def served(self, tenant: str) -> float:
        """Its counter: weighted tokens."""
        return self._served.get(tenant, 0.0)

    @property
    def any_waits(self) -> bool:
        """Whether a request of any tenant waits. Where none does, the counters may be dropped: they start
        level again."""
        return bool(self._waiting)

    def waits(self, tenant: str) -> None:
        """One more request of this tenant waits."""
        if not self._waiting[tenant]:
            self._served[tenant] = max(self.served(tenant), self._least())
        self._waiting[tenant] += 1

    def goes(self, tenant: str) -> None:
        """One of its waiting requests was sent, or its client left."""
        if self._waiting[tenant] > 1:
            self._waiting[tenant] -= 1
        elif tenant in self._waiting:
            self._last = max(self._last, self.served(tenant))
            del self._waiting[tenant]
            self._prune()

    def _least(self) -> float:
        return min(map(self.served, self._waiting), default=self._last)

    def charge(self, tenant: str, prompt: int, answer: int = 0) -> None:
        """Adds tokens that were, or are to be, computed for the tenant. A negative number is ignored."""
        tokens = max(prompt, 0) + ANSWER_WEIGHT * max(answer, 0)
        # Removed first, so that the dict ends with the tenant that was served last.
        self._served[tenant] = self._served.pop(tenant, 0.0) + tokens
        self._prune()

    def _prune(self) -> None:
        """Drops the counter of the tenant that was not served for longest, unless it has waiting requests: it
        starts at the others' level again."""
        if len(self._served) <= 2 * (len(self._waiting) + IDLE_MAX):
            return
        idle = [name for name in self._served if name not in self._waiting]
        for name in idle[:-IDLE_MAX]:
            del self._served[name]
