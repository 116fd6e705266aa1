"""Follows the KV events of the pool's nodes that a search finds, for as long as they live.

    every LOOK_EVERY_S:  PoolSearch.look_here  ->  apply (on the event loop): follow, drop, say so
    and with it:         PoolSearch.ask_masters, unless that still waits for one  ->  apply

Both searches run in threads. A node of this host that ended is dropped with the next look, and its blocks
with it; another one when its master no longer tells of it. One that restarted at the same sockets stays: its
stream notices the new life (stream.py).
"""

from __future__ import annotations

import asyncio
import logging
import time

from moonpool.core.service.cluster import MasterRow
from moonpool.disagg_proxy.events.pool_search import FoundNodes, PoolSearch
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscribed_streams import SubscribedStreams

LOOK_EVERY_S = 2.0
_NAMED_MAX = 8  # nodes that one sentence names
_SAID_MAX = 64  # nodes that cannot be followed, and texts of one place, that the log names
_LOOK = "the look itself"  # the place of what no search has foreseen
_log = logging.getLogger("moonpool.proxy")


class PoolDiscovery:
    """Runs on the event loop. streams: places for the nodes' streams; None: the policy does not look at
    prompts, because no pool was there when the proxy began. Then the first node is said, and no more."""

    def __init__(self, search: PoolSearch, streams: SubscribedStreams | None) -> None:
        self._search = search
        self._streams = streams
        self._followed: dict[str, tuple[EventSource, int]] = {}  # name -> source and holder
        self._unplaced: set[str] = set()  # names of nodes for which no holder was left
        self._unfollowed: set[str] = set()  # names of nodes that cannot be, which the log has named
        self._said: dict[str, set[str]] = {}  # place -> problems in the log, for as long as it has one
        self._last = FoundNodes({}, (), {})
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks now, and then every LOOK_EVERY_S."""
        self._task = asyncio.get_running_loop().create_task(self._look_forever())

    async def close(self) -> None:
        """Ends the search, when the master that is being asked has answered or had its time (ANSWER_S for
        each step). Streams end with the subscriber."""
        self._search.stop_soon()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def apply(self, found: FoundNodes) -> None:
        """Follows what is new in ``found``, and drops what is no longer there."""
        if self._streams is None:
            self._last = found
            return
        for name, (source, holder) in list(self._followed.items()):
            if found.sources.get(name) != source:
                del self._followed[name]
                self._streams.drop(name, holder)
                if name not in found.sources:
                    _log.info("the KV events of %s at %s: the node is gone", name, source.endpoint)
        for name, source in found.sources.items():
            if name not in self._followed:
                self._follow(name, source)
        self._unplaced &= found.sources.keys()
        for name, why in found.unfollowed.items():
            if name not in self._unfollowed and len(self._unfollowed) < _SAID_MAX:
                self._unfollowed.add(name)
                _log.warning("the KV events of %s are not followed: %s", name, why)
        for place, problem in found.problems.items():
            if self._is_new(place, problem):
                _log.warning("nodes of the pool cannot be looked for %s: %s", place, problem)
        for place in self._said.keys() - found.problems.keys() - {_LOOK}:
            del self._said[place]
        self._last = found

    def masters(self) -> tuple[MasterRow, ...]:
        """What the pool's masters said of themselves at the last look; empty once it looks no more."""
        return self._last.masters

    def remedy(self) -> str:
        """What to do where engines get blocks from a pool that tells nothing: part of a sentence. From any
        thread: it reads a copy of what apply() changes."""
        if followed := list(self._followed.items()):
            nodes = [f"{name} at {source.endpoint}" for name, (source, _) in followed]
            named = ", ".join(nodes[:_NAMED_MAX]) + (", ..." if len(nodes) > _NAMED_MAX else "")
            return (
                f"none of the nodes that it found ({named}) has told of a block; name the nodes' master with "
                f"--master, or each node of the engines' pool with --pool-events NAME=ENDPOINT"
            )
        last = self._last
        where = " or ".join(last.places) or "yet"
        unfollowed = [f"{name}: {why}" for name, why in last.unfollowed.items()]
        why = "".join(f" ({problem})" for problem in (*last.problems.values(), *unfollowed[:_NAMED_MAX]))
        which = " that it can follow" if unfollowed else ""
        return (
            f"it found no node{which} {where}{why}: run it as the nodes' user on their host, or name their "
            f"master with --master, or each node with --pool-events NAME=ENDPOINT"
        )

    async def _look_forever(self) -> None:
        asking: asyncio.Future[None] | None = None
        looking: asyncio.Future[FoundNodes] | None = None
        try:
            while True:
                try:
                    looking = asyncio.ensure_future(asyncio.to_thread(self._search.look_here))
                    self.apply(await asyncio.shield(looking))
                    if asking is None:
                        asking = asyncio.ensure_future(asyncio.to_thread(self._search.ask_masters))
                    began_s = time.monotonic()
                    await asyncio.wait({asking}, timeout=LOOK_EVERY_S)
                    if asking.done():
                        asked, asking = asking, None
                        asked.result()
                        looking = asyncio.ensure_future(asyncio.to_thread(self._search.found))
                        self.apply(await asyncio.shield(looking))
                    if self._streams is None and self._last.sources:
                        self._advise()
                        self._last = self._last._replace(masters=())
                        return
                    await asyncio.sleep(max(0.0, began_s + LOOK_EVERY_S - time.monotonic()))
                except Exception as error:  # the next look may do better
                    if self._is_new(_LOOK, repr(error)):
                        _log.exception("nodes of the pool could not be looked for")
                    await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._search.stop_soon()
            runs = [each for each in (looking, asking) if each is not None]
            await asyncio.gather(*runs, return_exceptions=True)
            await asyncio.to_thread(self._search.close)

    def _is_new(self, place: str, problem: str) -> bool:
        """Whether the log is to have it."""
        said = self._said.setdefault(place, set())
        if problem in said or len(said) >= _SAID_MAX:
            return False
        said.add(problem)
        return True

    def _advise(self) -> None:
        source = next(iter(self._last.sources.values()))
        _log.warning(
            "%s at %s is a node of a pool, and there was none when this proxy began: it gives engines turns, "
            "whatever they hold; start it again, or with --policy conductor, so that what they and the pool "
            "hold counts",
            source.name,
            source.endpoint,
        )

    def _follow(self, name: str, source: EventSource) -> None:
        assert self._streams is not None
        holder = self._streams.follow(name, source)
        if holder is not None:
            self._followed[name] = (source, holder)
            _log.info("the KV events of %s at %s are followed", name, source.endpoint)
        elif name not in self._unplaced:
            self._unplaced.add(name)
            _log.warning(
                "the KV events of %s at %s are not followed: there is no room for more engines and nodes",
                name,
                source.endpoint,
            )
