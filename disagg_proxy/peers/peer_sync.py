"""Synchronises requests in flight with the other proxies: sends this proxy's, and enters theirs into the
scheduler's state."""

from __future__ import annotations

import logging
from collections.abc import Callable

from moonpool.disagg_proxy.conductor.inflight import FORGOTTEN_S, STREAMS_S
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.dispatch.observer import DispatchObserver
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator, PrefixMatch
from moonpool.disagg_proxy.peers.host_identity import may_be_one
from moonpool.disagg_proxy.peers.inflight_feed import InflightFeed, sent
from moonpool.disagg_proxy.peers.peer_bus import PeerBus
from moonpool.disagg_proxy.peers.remote_inflight import RemoteInflight
from moonpool.disagg_proxy.peers.settings import PeerSettings
from moonpool.disagg_proxy.peers.wire import BlocksExpected, Change, Kind

KEY_BYTES = 16

log = logging.getLogger("moonpool.proxy")


class PeerSync(DispatchObserver):
    """``bus.start``, then ``stop``. Raises ConfigError if the address for other proxies cannot be bound.
    waits: see ``peer_bus.py``."""

    def __init__(
        self, settings: PeerSettings, dispatcher: Dispatcher, locator: PrefixLocator, *, waits: bool = False
    ) -> None:
        self._dispatcher = dispatcher
        self._locator = locator
        self._now_s = 0.0
        self._seen: tuple[Worker, ...] = ()
        self._by_name: dict[str, Worker] = {}
        self._warned: set[str] = set()  # names of engines
        self.remote_inflight = RemoteInflight(self._find, self._heard_of_blocks)
        self.bus = PeerBus(settings, hear=self._hear, lost=self._lost, state=self._state, waits=waits)
        self._feed = InflightFeed(self.bus.tell)
        dispatcher.scheduler.subscribe(self._feed)
        dispatcher.subscribe(self)

    def stop(self) -> None:
        """Ends the exchange. May be called twice."""
        self._dispatcher.scheduler.unsubscribe(self._feed)
        self._dispatcher.unsubscribe(self)
        self.bus.stop()

    def expire(self, now_s: float) -> None:
        """Removes requests of other proxies that are too old."""
        self._dispatcher.with_tracker(
            lambda _, now: self.remote_inflight.expire(now_s - FORGOTTEN_S, now_s - STREAMS_S, now)
        )

    def _find(self, name: str, site: str) -> Worker | None:
        workers = self._dispatcher.scheduler.inflight.workers
        if workers is not self._seen:  # each message may look up a thousand engines by name
            self._seen = workers
            self._by_name = {each.known_as: each for each in workers}
        worker = self._by_name.get(name)
        if worker is None or may_be_one(worker.site, site):
            return worker
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "engine %s is at %s here and at %s to another proxy, whose requests for it are not counted; "
                "give each engine a name of its own, the same at all proxies",
                *(name, worker.site, site),
            )
        return None

    # To the other proxies

    def on_prompt(self, worker: Worker, match: PrefixMatch) -> None:
        """Tells the others which blocks the engine will hold."""
        for index, keys in match.keys:
            if keys:
                self.bus.tell(BlocksExpected(worker.known_as, index.block_tokens, keys, worker.site))

    def _state(self, then: Callable[[], None]) -> list[Change]:
        def look(accounts: object, now_s: float) -> list[Change]:
            then()  # the state contains the pending changes
            flights = self._dispatcher.scheduler.inflight.in_flight()
            return [sent(request, flight, now_s) for request, flight in flights.items()]

        return self._dispatcher.with_tracker(look)

    # From the other proxies, on the bus's thread

    def _hear(self, sender: str, kind: Kind, changes: list[Change], lag_s: float) -> None:
        def enter(accounts: object, now_s: float) -> None:
            self._now_s = now_s
            if kind is Kind.STATE:
                self.remote_inflight.replace(sender, changes, now_s, lag_s=lag_s)
            else:
                self.remote_inflight.apply(sender, changes, now_s, lag_s=lag_s)

        self._dispatcher.with_tracker(enter)

    def _lost(self, sender: str) -> None:
        count = self._dispatcher.with_tracker(lambda _, now_s: self.remote_inflight.gone(sender, now_s))
        if count:
            log.warning("%d requests of a proxy that is gone are no longer counted", count)

    def _heard_of_blocks(self, worker: Worker, block_tokens: int, keys: bytes) -> None:
        if len(keys) % KEY_BYTES == 0:
            self._locator.heard(worker.place, block_tokens, keys, self._now_s)
