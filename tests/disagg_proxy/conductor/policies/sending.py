"""What a proxy does with a policy for a request that it takes."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policy import Policy, hook_of
from moonpool.disagg_proxy.conductor.worker import Worker


def send(policy: Policy, request: Request, instances: Sequence[Worker], now_s: float = 0.0) -> Choice:
    """It is chosen, and then sent."""
    choice = policy.choose(request, instances, now_s)
    hook_of(policy)(request, choice, now_s)
    return choice
