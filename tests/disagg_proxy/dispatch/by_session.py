"""A policy for tests: a request goes to the engine at the place that its X-Moonpool-Session names, if there
is one."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policy import Policy
from moonpool.disagg_proxy.conductor.worker import Worker


class BySession(Policy):
    uses_tokens = True

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        wanted = int(request.session or 0)
        return Choice(next((worker for worker in workers if worker.place == wanted), workers[0]))
