"""What the tests of the registry share: a registration in one step, as its HTTP endpoint does it in two."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.plan import Answer
from moonpool.disagg_proxy.discovery.registry import Registry


def register(registry: Registry, body: bytes) -> Answer:
    """body: as of POST /register. Names are not resolved."""
    told = registry.read(body)
    return told if isinstance(told, Answer) else registry.admit(told)
