"""Tracks the states of the streams of KV events, and warns once of each stream that stops being live.

    live      its events count
    waiting   the stream is new, its engine has not got a prompt yet, or its node holds no block yet
    lost      nothing publishes at the endpoint
    silent    a publisher is connected and sends nothing: an engine that got prompts, a node that was asked;
              what the node reported before still counts
    resting   too much arrived: the subscriber has paused it for a while, and has logged that

A stream that is not live is no worse than no stream (dispatch/prefix_locator.py). Runs on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from moonpool.disagg_proxy.events.stream_link import StreamState
from moonpool.disagg_proxy.events.subscriber import Subscriber

SILENT_S = 5.0
POOL_EMPTY_S = 10.0  # after a prompt: engines that use a pool have saved blocks there by then
_HINT = (
    "vLLM and SGLang publish with --kv-events-config, at ipc://... or tcp://*:PORT, and with another address "
    "connect to it in place of listening there (docs/events.md)"
)
_NAMED_MAX = 8  # nodes that one sentence names
_log = logging.getLogger("moonpool.proxy")


class StreamRow(msgspec.Struct):
    """A stream in GET /health."""

    name: str
    state: str


class PoolStreamRow(msgspec.Struct):
    """The stream of a node of the pool in GET /engines and /ui/data."""

    name: str
    endpoint: str
    state: str


class StreamWatch:
    """Maps the subscriber's states to those above.

    subscriber:    None: no stream is followed.
    unheard_since: place -> when an engine without live events first got a prompt; None: it has not.
    clock:         the clock of these times, in seconds.
    prompts:       number of prompts of some length that were sent to engines.
    """

    def __init__(
        self,
        subscriber: Subscriber | None,
        unheard_since: Callable[[int], float | None],
        clock: Callable[[], float],
        prompts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._subscriber = subscriber
        self._unheard_since = unheard_since
        self._clock = clock
        self._prompts = prompts
        self._told: dict[str, str] = {}  # logged states, by name
        # While nodes of the pool are connected and none holds a block: the prompts sent before that, and when
        # the first one was sent since. None: it is not so, none was sent.
        self._prompts_before: int | None = None
        self._prompted_s: float | None = None
        self._empty_told = False

    def rows(self) -> list[StreamRow]:
        """The state of each stream."""
        states = [] if self._subscriber is None else self._subscriber.states()
        return [StreamRow(each.source.name, self._state(each)) for each in states]

    def of_engines(self) -> dict[int, str]:
        """The state of each engine's stream, by the engine's place."""
        states = [] if self._subscriber is None else self._subscriber.states()
        return {each.place: self._state(each) for each in states if not each.source.pool}

    def of_pool(self) -> list[PoolStreamRow]:
        """The streams of the pool's nodes."""
        states = [] if self._subscriber is None else self._subscriber.states()
        return [
            PoolStreamRow(each.source.name, each.source.endpoint, self._state(each))
            for each in states
            if each.source.pool
        ]

    def remedy(self) -> str | None:
        """What to do where engines get blocks that no event explains although nodes report some: the rest of
        a sentence. None: no node reports any. On any thread."""
        heard = [row.name for row in self.of_pool() if row.state == "live"]
        if not heard:
            return None
        named = ", ".join(heard[:_NAMED_MAX]) + (", ..." if len(heard) > _NAMED_MAX else "")
        return (
            f"the nodes that report blocks ({named}) are not all of the engines' pool, or not of it; "
            f"GET /engines has each node that is followed and its state; name further ones with "
            f"--pool-events NAME=ENDPOINT or by their master with --master"
        )

    def look(self) -> None:
        """Logs changes of states. Called periodically."""
        if self._subscriber is None:
            return
        states = self._subscriber.states()
        for each in states:
            self._look_at(each, self._state(each))
        self._look_at_empty_pool([each for each in states if each.source.pool])
        names = {each.source.name for each in states}
        self._told = {name: state for name, state in self._told.items() if name in names}

    def _look_at_empty_pool(self, nodes: Sequence[StreamState]) -> None:
        """Warns once where engines got prompts, and none of the nodes that answer has a block."""
        answering = [each for each in nodes if each.lost_s is None and not each.mute]
        if self._empty_told or any(each.heard for each in nodes) or not answering:
            self._prompts_before = self._prompted_s = None
            return
        if self._prompts_before is None:
            self._prompts_before = self._prompts()
        if self._prompted_s is None and self._prompts() > self._prompts_before:
            self._prompted_s = self._clock()
        if self._prompted_s is None or self._clock() - self._prompted_s < POOL_EMPTY_S:
            return
        self._empty_told = True
        names = ", ".join(f"{each.source.name} at {each.source.endpoint}" for each in answering[:_NAMED_MAX])
        _log.warning(
            "engines got prompts, and none of the nodes that the proxy follows (%s) has a block %g s later: "
            "if the engines use another pool, name its master with --master or its nodes with --pool-events; "
            "if they use none, this does no harm",
            names,
            POOL_EMPTY_S,
        )

    def _look_at(self, each: StreamState, state: str) -> None:
        source, told = each.source, self._told.get(each.source.name)
        if state == "live":
            if self._told.pop(source.name, None) is not None:
                _log.info("the KV events of %s at %s are heard", source.name, source.endpoint)
            return
        if state in ("waiting", "resting", told):
            return
        self._told[source.name] = state
        endpoint = source.endpoint
        why = f"nothing publishes at {endpoint} for {SILENT_S:g} s"
        guessed = "its cache is guessed from what was sent to it"
        if source.pool:
            if state == "silent":
                why = f"{endpoint} is connected, and has answered nothing in {SILENT_S:g} s"
            elif source.token:
                why += ", or it has another cluster token"
            if each.heard:
                why += ", so what it reported before counts, and may no longer be true (docs/events.md)"
            else:
                why += ", so it is not known what the pool holds there (docs/events.md)"
        elif state == "lost":
            why += f", so {guessed}; {_HINT}"
        else:
            why = (
                f"{endpoint} is connected, and has said nothing in {SILENT_S:g} s though prompts were "
                f"sent to the engine, so {guessed}; are prefix caching and enable_kv_cache_events on? {_HINT}"
            )
        _log.warning("the KV events of %s: %s", source.name, why)

    def _state(self, each: StreamState) -> str:
        if each.source.pool and each.mute and each.lost_s is None:
            return "silent"
        if each.heard:
            return "live"
        if each.rests:
            return "resting"
        if each.lost_s is not None:
            return "lost" if each.lost_s >= SILENT_S else "waiting"
        if each.source.pool:
            return "waiting"
        since_s = self._unheard_since(each.place)
        return "silent" if since_s is not None and self._clock() - since_s >= SILENT_S else "waiting"
