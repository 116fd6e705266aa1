"""Which engines may be chosen now; the policy chooses among them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from moonpool.disagg_proxy.conductor.policy import Policy
from moonpool.disagg_proxy.engine import Engine
from moonpool.disagg_proxy.http.request import Request


class Dispatcher:
    def __init__(self, engines: Sequence[Engine], policy: Policy) -> None:
        self.engines = tuple(engines)
        self._policy = policy

    @property
    def healthy_count(self) -> int:
        return sum(engine.liveness.healthy for engine in self.engines)

    def choose(self, request: Request, tried: Container[Engine], now: float) -> Engine | None:
        """A healthy engine that was not tried for this request; None when there is none.

        Breakers only shift work to engines that do better: when every engine that could be chosen rests, they
        are ignored, so that the client gets the engine's own answer rather than ours.
        """
        healthy = [engine for engine in self.engines if engine.liveness.healthy and engine not in tried]
        if not healthy:
            return None
        working = [engine for engine in healthy if engine.breaker.allows(now)]
        return self._policy.choose(request, working or healthy, now)
