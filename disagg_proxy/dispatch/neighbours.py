"""Tells an engine of another one whose own cache has more of a prompt than it and the pool have, as the
engines' KV events say. The engine's connector then asks that one for the blocks
(connectors/vllm/pd/neighbour_asks.py).

The engine is told by ``cached_at`` beside the request's switches, which clients cannot set. An engine can be
named when its stream of KV events is heard: what was merely sent to it may be gone. Both have a bootstrap
page which says that they give and take blocks, and serve the request's model. Whether their KV fits is for
the connectors to compare: they refuse by fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.choice import Choice
from moonpool.disagg_proxy.dispatch import request_switches
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixMatch
from moonpool.disagg_proxy.engines.bootstrap import Rank
from moonpool.disagg_proxy.engines.engine import Engine

CACHED_AT = "cached_at"
Pairs = Sequence[tuple[str, str]]


class NeighbourHints:
    """``name`` may be called on any thread."""

    def __init__(
        self, engines: Sequence[Engine | None], is_heard: Callable[[int], bool], tokens_min: int
    ) -> None:
        """engines: by place, None where there is none.
        is_heard: whether the events of the engine at a place say what it holds.
        tokens_min: how many more tokens an engine must have to be named; 0: none is.
        """
        self._engines = engines
        self._is_heard = is_heard
        self._tokens_min = tokens_min
        self.named = 0  # requests

    def name(self, request: ProxyRequest, choice: Choice, match: PrefixMatch) -> str:
        """Tells the engine that computes the prompt of a neighbour, if there is one. Returns its name, or
        ""."""
        computes = self._engines[choice.computes.place]
        if not self._tokens_min or computes is None or computes.place >= len(match.own):
            return ""
        tokens = max(match.own[choice.computes.place], match.pool) + self._tokens_min
        if max(match.own) < tokens:
            return ""
        told_of_switches = request_switches.loads(request) and request_switches.can_tell(request)
        if not told_of_switches or computes.bootstrap is None or computes.bootstrap.cache is None:
            return ""
        found: tuple[Engine, Rank] | None = None
        for place in request.candidates:
            if place == computes.place or place >= len(match.own) or match.own[place] < tokens:
                continue
            engine = self._engines[place]
            cache = None if engine is None or engine.bootstrap is None else engine.bootstrap.cache
            if engine is not None and cache is not None and engine.liveness.healthy and self._is_heard(place):
                found, tokens = (engine, cache), match.own[place] + 1
        if found is None:
            return ""
        engine, cache = found
        value = {"remote_engine_id": cache.engine_id, "remote_bootstrap_addr": cache.url}
        told = (CACHED_AT, msgspec.json.encode(value).decode())
        request.switches = [*without_cached_at(request.switches), told]
        self.named += 1
        return engine.name


def without_cached_at(switches: Pairs) -> list[tuple[str, str]]:
    """The switches of a request alone."""
    return [pair for pair in switches if pair[0] != CACHED_AT]
