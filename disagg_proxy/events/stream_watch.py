"""Tracks the states of the streams of KV events, and warns once of each stream that stops being live.

    live      its events count
    waiting   the stream is new, or its engine has not got a prompt yet
    lost      nothing publishes at the endpoint
    silent    a publisher is connected and sends nothing, though its engine got prompts
    resting   too much arrived: the subscriber has paused it for a while, and has logged that

A stream that is not live is no worse than no stream (dispatch/prefix_locator.py). Runs on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from moonpool.disagg_proxy.events.stream_link import StreamState
from moonpool.disagg_proxy.events.subscriber import Subscriber

SILENT_S = 5.0
_HINT = (
    "vLLM and SGLang publish with --kv-events-config, at ipc://... or tcp://*:PORT, and with another address "
    "connect to it in place of listening there (docs/events.md)"
)
_log = logging.getLogger("moonpool.proxy")


class StreamRow(msgspec.Struct):
    """A stream in GET /health."""

    name: str
    state: str


class StreamWatch:
    """Maps the subscriber's states to those above.

    subscriber:    None: no stream is followed.
    unheard_since: place -> when an engine without live events first got a prompt; None: it has not.
    clock:         the clock of these times, in seconds.
    """

    def __init__(
        self,
        subscriber: Subscriber | None,
        unheard_since: Callable[[int], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._subscriber = subscriber
        self._unheard_since = unheard_since
        self._clock = clock
        self._told: dict[str, str] = {}  # logged states, by name

    def rows(self) -> list[StreamRow]:
        """The state of each stream."""
        states = [] if self._subscriber is None else self._subscriber.states()
        return [StreamRow(each.source.name, self._state(each)) for each in states]

    def of_engines(self) -> dict[int, str]:
        """The state of each engine's stream, by the engine's place."""
        states = [] if self._subscriber is None else self._subscriber.states()
        return {each.place: self._state(each) for each in states if not each.source.pool}

    def look(self) -> None:
        """Logs changes of states. Called periodically."""
        if self._subscriber is None:
            return
        states = self._subscriber.states()
        for each in states:
            self._look_at(each, self._state(each))
        names = {each.source.name for each in states}
        self._told = {name: state for name, state in self._told.items() if name in names}

    def _look_at(self, each: StreamState, state: str) -> None:
        source, told = each.source, self._told.get(each.source.name)
        if state == "live":
            if self._told.pop(source.name, None) is not None:
                _log.info("the KV events of %s at %s are heard", source.name, source.endpoint)
            return
        if state in ("waiting", "resting", told):
            return
        self._told[source.name] = state
        why = f"nothing publishes at {source.endpoint} for {SILENT_S:g} s"
        guessed = "its cache is guessed from what was sent to it"
        if source.pool:
            why += ", so it is not known what the pool holds there; a node publishes with --events"
        elif state == "lost":
            why += f", so {guessed}; {_HINT}"
        else:
            why = (
                f"{source.endpoint} is connected, and has said nothing in {SILENT_S:g} s though prompts were "
                f"sent to the engine, so {guessed}; are prefix caching and enable_kv_cache_events on? {_HINT}"
            )
        _log.warning("the KV events of %s: %s", source.name, why)

    def _state(self, each: StreamState) -> str:
        if each.heard:
            return "live"
        if each.rests:
            return "resting"
        if each.lost_s is not None:
            return "lost" if each.lost_s >= SILENT_S else "waiting"
        since_s = None if each.source.pool else self._unheard_since(each.place)
        return "silent" if since_s is not None and self._clock() - since_s >= SILENT_S else "waiting"
