"""Says which streams of KV events are heard, and warns of each that is not: once, until it is heard again.

    live      what the engine tells counts
    waiting   the stream is new, or its engine was sent no prompt yet
    lost      nothing publishes there
    silent    something publishes there, and says nothing though its engine was sent prompts
    resting   too much came of it: the subscriber has cut it off for a while, and has said so

A stream that is not live is not worse than none (dispatch/prefix_locator.py). On the event loop.
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
    """subscriber: None where no stream is followed. unheard_since: when an engine that is not heard, by its
    place, was first sent a prompt. clock: the one of those times, in seconds."""

    def __init__(
        self,
        subscriber: Subscriber | None,
        unheard_since: Callable[[int], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._subscriber = subscriber
        self._unheard_since = unheard_since
        self._clock = clock
        self._told: dict[str, str] = {}  # of streams that the log knows not to be heard: their state

    def rows(self) -> list[StreamRow]:
        """Of each stream."""
        states = [] if self._subscriber is None else self._subscriber.states()
        return [StreamRow(each.source.name, self._state(each)) for each in states]

    def of_engines(self) -> dict[int, str]:
        """The state of each engine's stream, by the engine's place."""
        states = [] if self._subscriber is None else self._subscriber.states()
        return {each.place: self._state(each) for each in states if not each.source.pool}

    def look(self) -> None:
        """Warns of what is new. Called again and again."""
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
        known = "its cache is guessed from what was sent to it"
        if source.pool:
            _log.warning(
                "the KV events of %s: nothing publishes at %s for %g s, so it is not known what the pool "
                "holds there; a node publishes with --events",
                source.name,
                source.endpoint,
                SILENT_S,
            )
        elif state == "lost":
            _log.warning(
                "the KV events of %s: nothing publishes at %s for %g s, so %s; %s",
                source.name,
                source.endpoint,
                SILENT_S,
                known,
                _HINT,
            )
        else:
            _log.warning(
                "the KV events of %s: %s is connected, and has said nothing in %g s though prompts were sent "
                "to the engine, so %s; are prefix caching and enable_kv_cache_events on? %s",
                source.name,
                source.endpoint,
                SILENT_S,
                known,
                _HINT,
            )

    def _state(self, each: StreamState) -> str:
        if each.heard:
            return "live"
        if each.rests:
            return "resting"
        if each.lost_s is not None:
            return "lost" if each.lost_s >= SILENT_S else "waiting"
        since_s = None if each.source.pool else self._unheard_since(each.place)
        return "silent" if since_s is not None and self._clock() - since_s >= SILENT_S else "waiting"
