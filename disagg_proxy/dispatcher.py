"""Turns the choice of a policy into a plan: which of the engines that may be chosen can do what.

``decide`` runs on the data plane's thread, once for each request and attempt; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.plan import Decision, two_step
from moonpool.disagg_proxy.conductor.policy import Policy
from moonpool.disagg_proxy.engine import Engine

_GENERATES = frozenset(("chat", "completions"))


class _Choice(NamedTuple):
    """The engines that may be chosen, by what they can do."""

    whole: tuple[Engine, ...]  # may answer alone
    prefills: tuple[Engine, ...]
    decodes: tuple[Engine, ...]


class Dispatcher:
    """make_policy: called once for each kind of choice, since a policy may keep its turn."""

    def __init__(self, engines: Sequence[Engine], make_policy: Callable[[], Policy]) -> None:
        self.engines = tuple(engines)
        self._policy = make_policy()
        self._prefill_policy = make_policy()
        self._decode_policy = make_policy()
        self._choices: dict[tuple[int, ...], _Choice] = {}

    @property
    def healthy_count(self) -> int:
        return sum(engine.liveness.healthy for engine in self.engines)

    def decide(self, request: ProxyRequest) -> Decision:
        """The plan for a request: prefill and decode apart where there are engines for both."""
        places = request.candidates
        choice = self._choices.get(places) or self._sort(places)
        if choice.prefills and choice.decodes and request.kind in _GENERATES:
            now = request.arrived_s
            prefill = self._prefill_policy.choose(request, choice.prefills, now)
            decode = self._decode_policy.choose(request, choice.decodes, now)
            return two_step(prefill.place, decode.place)
        return self._policy.choose(request, choice.whole, request.arrived_s).place

    def _sort(self, places: tuple[int, ...]) -> _Choice:
        engines = [self.engines[place] for place in places]
        prefills = tuple(engine for engine in engines if engine.role == "prefill")
        decodes = tuple(engine for engine in engines if engine.role == "decode")
        both = tuple(engine for engine in engines if engine.role == "both")
        # A prefill engine answers alone only when nobody else can.
        choice = _Choice(both or decodes or prefills, prefills, decodes)
        if len(self._choices) >= 4096:  # one for each set of engines that was seen
            self._choices.clear()
        self._choices[places] = choice
        return choice
