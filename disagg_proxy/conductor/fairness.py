"""Whose turn it is among requests that wait: each tenant gets the same service, whichever asks more.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's
counter grows by the tokens that are computed for it, those of answers counting twice; the
tenant with the least counter is next. A tenant that comes back after a while begins where the others are,
so that none saves up. What is served while no request waits is not to be charged: no tenant is treated
unfairly then, and a day of it would be a day's debt to the tenant that begins the next line. Pure: no clock.
"""

from __future__ import annotations

from collections import Counter

IDLE_MAX = 256  # tenants of whom nothing waits
ANSWER_WEIGHT = 2.0  # a token of an answer to one of a prompt, as in the paper


class Fairness:
    """A queue orders by priority before it, and by arrival behind it."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._last = 0.0  # virtual time: the most that a tenant had when it left the line

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
        """One of them waits no more: it was sent, or its client left."""
        if self._waiting[tenant] > 1:
            self._waiting[tenant] -= 1
        elif tenant in self._waiting:
            self._last = max(self._last, self.served(tenant))
            del self._waiting[tenant]
            self._prune()

    def _least(self) -> float:
        return min(map(self.served, self._waiting), default=self._last)

    def charge(self, tenant: str, prompt: int, answer: int = 0) -> None:
        """Tokens that were, or are to be, computed for it. What is less than nothing is not counted."""
        tokens = max(prompt, 0) + ANSWER_WEIGHT * max(answer, 0)
        # Taken out first, so that the tenant served last is the last.
        self._served[tenant] = self._served.pop(tenant, 0.0) + tokens
        self._prune()

    def _prune(self) -> None:
        """The tenant not served for longest is forgotten, unless it waits: it begins where the others are."""
        if len(self._served) <= 2 * (len(self._waiting) + IDLE_MAX):
            return
        idle = [name for name in self._served if name not in self._waiting]
        for name in idle[:-IDLE_MAX]:
            del self._served[name]
