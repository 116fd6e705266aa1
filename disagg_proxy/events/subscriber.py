"""A thread that subscribes to all streams of KV events and enters them into the prefix indexes.

One thread, one poll; hashing and the work of the index run without the GIL. No message can stop it: malformed
ones are counted, and the blocks of their holder are removed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from moonpool import _native
from moonpool.core.config.cluster_token import secret_after
from moonpool.core.errors import Error
from moonpool.core.service import zmq_curve
from moonpool.core.service.zmq_liveness import notice_vanished_host
from moonpool.disagg_proxy.events.prefix_indexes import HOLDERS_MAX, PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventLimits, EventSource
from moonpool.disagg_proxy.events.stream import ByteBudget, Stream
from moonpool.disagg_proxy.events.stream_link import StreamLink, StreamState

log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
_NO_MESSAGE = b"\xff" * 7 + b"\xfe"  # no message has this number or a higher one: only the end marker returns
_AT_ONCE = 64  # messages of one stream in a row
_BYTES_AT_ONCE = 1 << 20  # bytes of one stream in a row
_TICK_S = 0.25
_STOP_TIMEOUT_S = 10.0


class Tap(Protocol):
    """Another receiver of the events, in order, and on the subscriber's thread."""

    def take(self, holder: int, payload: bytes) -> None:
        """One batch of events (MessagePack) of a holder."""

    def forget(self, holder: int) -> None:
        """All earlier batches of the holder are void."""


class Subscriber:
    """Subscribes from start() to stop().

    places:   the place of each source in the indexes, by name.
    followed: called on the thread with a place and the index that follows it exactly; None: no index does.
    prompts:  number of prompts of some length that were sent to engines.
    """

    def __init__(
        self,
        sources: tuple[EventSource, ...],
        indexes: PrefixIndexes,
        places: Mapping[str, int],
        *,
        limits: EventLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        followed: Callable[[int, _native.PrefixIndex | None], None] = lambda place, index: None,
        prompts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._taps: tuple[Tap, ...] = ()
        self._followed = followed
        self._prompts = prompts
        self._indexes = indexes
        self._limits = limits or EventLimits()
        self._clock = clock
        self._wall = wall
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 5 * HOLDERS_MAX)  # each: events, two monitors, replays, probes
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._room = ByteBudget(self._limits.pending_bytes_max)
        self._lock = threading.Lock()  # guards _absent, _orders, _stopping
        self._absent: dict[str, float] = {}
        self._stopping = False
        self._known_indexes = 0
        self._orders: list[Callable[[], None]] = []  # calls for the thread to make
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._links: tuple[StreamLink, ...] = ()
        for source in sources:
            self._open(source, places[source.name])
        self._thread = threading.Thread(target=self._run, name="kv-event-streams", daemon=True)

    def subscribe(self, tap: Tap) -> None:
        """Adds a receiver of all events of engines. Call it before start()."""
        self._taps += (tap,)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the sockets. May be called twice."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._poke()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        else:
            self._close()

    def follow(self, source: EventSource, place: int) -> None:
        """Adds a stream; ignored with a warning if its name is taken. Thread safe."""
        self._order(lambda: self._open(source, place))

    def drop(self, name: str, place: int) -> None:
        """Removes a stream and its blocks. Thread safe."""
        self._order(lambda: self._drop(name, place))

    def in_rotation(self, name: str, present: bool) -> None:
        """An engine left the rotation or came back. After gone_s seconds away its blocks are removed."""
        with self._lock:
            if present:
                self._absent.pop(name, None)
            else:
                self._absent.setdefault(name, self._clock())
            self._poke()

    def states(self) -> list[StreamState]:
        """The state of each stream."""
        now_s = self._clock()
        return [
            StreamState(
                link.source,
                link.place,
                None if (since_s := link.lost_since_s) is None else now_s - since_s,
                link.is_heard,
                link.rests_until_s is not None,
                link.mute,
            )
            for link in self._links
        ]

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters (*_total) and gauges of each source, by name."""
        rows: dict[str, dict[str, float]] = {}
        for link in self._links:
            counts = link.counts
            rows[link.source.name] = {
                "connected": float(counts.connected),
                "heard": float(link.is_heard and not (link.mute and link.source.pool)),
                "replaying": float(link.stream.replaying),
                "sequence": float(link.stream.sequence),
                "lag_seconds": counts.lag_s,
                "lag_max_seconds": counts.lag_max_s,
                **{f"{name}_total": count for name, count in asdict(link.stream.counts).items()},
                "malformed_total": counts.malformed,
                "forgets_total": counts.forgets,
                "probes_total": counts.probes,
                "rests_total": counts.rests,
                "blocks_stored_total": counts.stored,
                "blocks_removed_total": counts.removed,
                "blocks_unknown_total": counts.unknown,
                "blocks_skipped_total": counts.skipped,
            }
        return rows

    # ---- the thread

    def _order(self, order: Callable[[], None]) -> None:
        with self._lock:
            self._orders.append(order)
            self._poke()

    def _poke(self) -> None:
        """Wakes the thread. The caller holds the lock."""
        if self._wake >= 0:  # else the thread has ended
            os.eventfd_write(self._wake, 1)

    def _obey(self) -> None:
        with self._lock:
            orders, self._orders = self._orders, []
        for order in orders:
            with _net("an order"):
                order()

    def _run(self) -> None:
        more = False
        while not self._stopping:
            ready = self._ready(0.0 if more else _TICK_S)
            self._obey()
            more = False
            for link in self._links:
                more |= self._on_ready(link, ready)
            with _net("the tick"):
                self._on_tick()
        self._close()

    def _ready(self, wait_s: float) -> dict[object, int]:
        asking = [link.asking for link in self._links if link.asking is not None]
        for socket in asking:
            self._poller.register(socket, zmq.POLLIN)
        ready: dict[object, int] = dict(self._poller.poll(int(wait_s * 1000)))
        for socket in asking:
            self._poller.unregister(socket)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    def _on_ready(self, link: StreamLink, ready: Mapping[object, int]) -> bool:
        """Processes ready sockets; returns whether more messages are ready."""
        more = False
        with _net(link.source.name):
            if link.monitor in ready:
                self._on_monitor(link)
            if link.asking is not None and link.asking in ready:
                more |= self._on_answers(link, link.asking)
            if link.probe is not None and link.probe in ready:
                self._on_probe_answer(link, link.probe)
            if link.sub in ready:
                more |= self._on_messages(link)
        return more

    def _on_tick(self) -> None:
        now_s = self._clock()
        with self._lock:
            absent = dict(self._absent)
        for link in self._links:
            if link.asking is not None and now_s >= link.answer_due_s:
                self._end_asking(link)
                link.mute = link.unread = True
                link.stream.replay_ended(complete=False)
            self._check_silence(link, now_s)
            self._follow_token(link, now_s)
            self._look_whether_lost(link, now_s)
            since_s = absent.get(link.source.name)
            gone = since_s is not None and now_s - since_s >= self._limits.gone_s
            if gone and not link.given_up:
                self._end_asking(link)
                link.stream.gone()
            elif link.given_up and not gone and link.counts.connected:
                link.stream.connected()
            link.given_up = gone
        self._look_at_queues(now_s)
        self._tell_new_indexes()
        self._indexes.expire(now_s)

    def _follow_token(self, link: StreamLink, now_s: float) -> None:
        """While one secret replaces the other, a publisher may serve under that which it was not asked by."""
        is_waiting = not link.counts.connected and link.rests_until_s is None
        if not link.secret or not is_waiting or now_s - link.dialed_s < self._limits.redial_s:
            return
        link.dialed_s = now_s
        if (secret := secret_after(link.secret, link.source.token)) != link.secret:
            link.secret = secret
            since_s, lost = link.lost_since_s, link.lost
            self._disconnect(link)
            self._connect(link)
            link.lost_since_s, link.lost = since_s, lost

    def _look_whether_lost(self, link: StreamLink, now_s: float) -> None:
        """Marks a stream as lost after lost_s seconds without a connection. The cache of an engine is then
        guessed from the requests sent to it; the blocks of a pool node stay, since nothing else is known."""
        since_s = link.lost_since_s
        if link.lost or since_s is None or now_s - since_s < self._limits.lost_s:
            return
        link.lost = True
        if not link.source.pool and link.stream.sequence >= 0:
            self._end_asking(link)
            link.stream.gone()

    def _check_silence(self, link: StreamLink, now_s: float) -> None:
        """Probes a node of the pool that is silent: one that is idle answers, and one that hangs is noticed,
        whose connection ZMQ's own threads keep up. The stream takes no part: what a slow node told stays."""
        is_idle = link.counts.connected and link.asking is None and not link.given_up
        if not is_idle or not link.source.pool or not link.source.replay:
            return
        if link.probed_s is not None and now_s - link.probed_s >= self._limits.replay_s:
            link.mute = True
        since_s = link.spoke_s if link.probed_s is None else link.probed_s
        is_wanted = link.unread or self._prompts() > link.prompts_before
        is_urgent = is_wanted and link.probed_s is None
        if now_s - since_s >= (self._limits.check_s if is_urgent else self._limits.idle_check_s):
            self._probe(link, now_s)

    def _probe(self, link: StreamLink, now_s: float) -> None:
        """Sends a replay request that no message answers."""
        if link.probed_s is not None:  # the question or its answer may have been lost with a connection
            self._end_probe(link)
        if link.probe is None:
            link.probe = self._replay_socket(link)
            self._poller.register(link.probe, zmq.POLLIN)
        link.probed_s = now_s
        link.counts.probes += 1
        link.probe.send_multipart((b"", _NO_MESSAGE), zmq.NOBLOCK)

    def _end_probe(self, link: StreamLink) -> None:
        link.probed_s = None
        if link.probe is not None:
            self._poller.unregister(link.probe)
            link.probe.close(linger=0)
            link.probe = None

    def _on_probe_answer(self, link: StreamLink, socket: zmq.Socket[bytes]) -> None:
        """Any answer says that the publisher lives."""
        for _ in range(_AT_ONCE):
            try:
                socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._spoke(link)
            if link.unread and link.asking is None and link.counts.connected and not link.given_up:
                link.unread = False
                link.stream.connected()

    def _spoke(self, link: StreamLink) -> None:
        """The publisher has sent something."""
        link.spoke_s, link.prompts_before = self._clock(), self._prompts()
        link.mute, link.probed_s = False, None

    def _look_at_queues(self, now_s: float) -> None:
        """Bounds the memory of ZMQ's queues. ZMQ does not report their sizes; a stream that is behind holds
        at most a queue of its largest messages. If the sum is too large, the largest stream is paused: it is
        disconnected, its blocks are removed, and it is read again later."""
        behind = []
        for link in self._links:
            if link.rests_until_s is not None:
                if now_s >= link.rests_until_s:
                    link.rests_until_s = None
                    self._connect(link)
            elif link.behind_since_s is not None and now_s - link.behind_since_s >= self._limits.behind_s:
                behind.append(link)
        held = sum(link.largest_bytes for link in behind) * (self._limits.queue_messages_max + 1)
        if held <= self._limits.queues_bytes_max:
            return
        link = max(behind, key=lambda each: each.largest_bytes)
        link.rests_until_s = now_s + self._limits.rest_s
        if not link.counts.rests:
            log.warning(
                "the KV events of %s at %s come faster than they can be looked at, in messages of %d MiB: "
                "the stream is cut off and read anew every %g s",
                link.source.name,
                link.source.endpoint,
                link.largest_bytes >> 20,
                self._limits.rest_s,
            )
        link.counts.rests += 1
        self._disconnect(link)
        link.stream.gone()

    def _tell_new_indexes(self) -> None:
        """Reads the pool's streams again for indexes that were created later. A stream that cannot be
        replayed keeps its blocks in the other indexes; the new index gets later events only."""
        known = self._indexes.wanting
        if known == self._known_indexes:
            return
        self._known_indexes = known
        for link in self._links:
            if link.source.pool and link.source.replay and link.counts.connected and not link.given_up:
                self._end_asking(link)
                link.stream.gone()
                link.stream.connected()

    def _on_monitor(self, link: StreamLink) -> None:
        while link.monitor.poll(0):
            event = recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"]
            link.counts.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            link.mute = False
            self._end_probe(link)
            if link.counts.connected:
                link.lost_since_s, link.lost = None, False
            elif link.lost_since_s is None:
                link.lost_since_s = self._clock()
            if link.counts.connected and not link.given_up:
                link.stream.connected()

    def _on_messages(self, link: StreamLink) -> bool:
        taken = 0
        for _ in range(_AT_ONCE):
            try:
                frames = link.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                link.behind_since_s, link.largest_bytes = None, 0
                return False
            size = sum(map(len, frames))
            taken += size
            link.largest_bytes = max(link.largest_bytes, size)
            self._spoke(link)
            self._on_monitor(link)  # a new connection is reported before its first message
            if link.given_up:
                continue
            if len(frames) != 3 or len(frames[1]) != 8:
                link.counts.malformed += 1
                continue
            link.stream.message(int.from_bytes(frames[1], "big"), frames[2])
            if taken >= _BYTES_AT_ONCE:
                break
        if link.behind_since_s is None:
            link.behind_since_s = self._clock()
        return True

    def _on_answers(self, link: StreamLink, socket: zmq.Socket[bytes]) -> bool:
        taken = 0
        for _ in range(_AT_ONCE):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._spoke(link)
            link.answer_due_s = link.spoke_s + self._limits.replay_s
            if len(frames) != 4 or len(frames[2]) != 8:
                link.counts.malformed += 1
                continue
            if frames[2] == END_OF_REPLAY:
                self._end_asking(link)
                link.unread = False
                link.stream.replay_ended()
                return False
            link.stream.replayed(int.from_bytes(frames[2], "big"), frames[3])
            if link.asking is not socket:  # a newer replay was requested
                return False
            taken += len(frames[3])
            if taken >= _BYTES_AT_ONCE:
                break
        return True

    def ask(self, link: StreamLink, start: int) -> None:
        """Connects to the publisher's replay endpoint and requests messages from ``start`` on."""
        self._end_asking(link)
        socket = self._replay_socket(link)
        link.asking = socket
        link.spoke_s, link.prompts_before, link.probed_s = self._clock(), self._prompts(), None
        link.answer_due_s = link.spoke_s + self._limits.replay_s
        socket.send_multipart((b"", start.to_bytes(8, "big")))

    def _end_asking(self, link: StreamLink) -> None:
        if link.asking is not None:
            link.asking.close(linger=0)
            link.asking = None

    def take(self, link: StreamLink, payload: bytes) -> None:
        """Enters one batch into the prefix indexes."""
        try:
            indexes = self._indexes_of(link, payload)
            for index in indexes:
                result = index.ingest(link.place, payload, pool=link.source.pool)
                link.counts.stored += result.stored
                link.counts.removed += result.removed
                link.counts.unknown += result.unknown
                link.counts.skipped += result.skipped
                if not link.stream.replaying:
                    link.counts.lag_s = max(0.0, self._wall() - result.sent_s)
                    link.counts.lag_max_s = max(link.counts.lag_max_s, link.counts.lag_s)
            if link.index is not None and not link.live:
                link.live = True
                self._followed(link.place, link.index)
        except Error as error:
            link.counts.malformed += 1
            log.debug("the events of %s: %s", link.source.name, error)
            self.forget(link)  # the batch may have had removals
            return
        if link.source.pool:
            return
        for tap in self._taps:
            try:
                tap.take(link.place, payload)
            except Exception:  # the indexes have the batch; only the tap is voided
                link.counts.malformed += 1
                log.exception("the events of %s", link.source.name)
                tap.forget(link.place)

    def _indexes_of(self, link: StreamLink, payload: bytes) -> Sequence[_native.PrefixIndex]:
        """The indexes of a source: all for a pool node; for an engine the one of its block size, which its
        first blocks have."""
        if link.source.pool:
            return self._indexes.all
        if link.index is None:
            block_tokens = _native.kv_event_block_tokens(payload)
            if block_tokens is not None:
                link.index = self._indexes.obtain(block_tokens)
                self._retire_index(link)
        return () if link.index is None else (link.index,)

    def _retire_index(self, link: StreamLink) -> None:
        """Removes the index of an engine's former block size: an engine could otherwise create the maximum of
        indexes, of 100 MB each."""
        before, link.index_before = link.index_before, link.index
        if before is not None and not any(each.index_before is before for each in self._links):
            self._indexes.drop(before)

    def forget(self, link: StreamLink) -> None:
        """Removes everything that the source reported from the prefix indexes."""
        link.counts.forgets += 1
        link.index = None
        for index in self._indexes.all:
            index.forget(link.place)
        if link.live:
            link.live = False
            self._followed(link.place, None)
        for tap in self._taps:
            tap.forget(link.place)

    # ---- sockets

    def _open(self, source: EventSource, place: int) -> None:
        if any(each.source.name == source.name for each in self._links):
            log.warning("the events of %s at %s: another stream has its name", source.name, source.endpoint)
            return
        try:
            link = self._link(source, place)
        except zmq.ZMQError as error:
            log.warning("the events of %s at %s cannot be followed: %s", source.name, source.endpoint, error)
            return
        self._links = (*self._links, link)

    def _drop(self, name: str, place: int) -> None:
        link = next((each for each in self._links if (each.source.name, each.place) == (name, place)), None)
        if link is None:
            return
        self._links = tuple(each for each in self._links if each is not link)
        self._disconnect(link)
        link.stream.gone()  # voids its blocks and returns its bytes to the budget
        with self._lock:
            self._absent.pop(name, None)

    def _link(self, source: EventSource, place: int) -> StreamLink:
        """Connects to a source. Raises ZMQError for an invalid endpoint."""
        secret = secret_after(b"", source.token) if source.token else b""
        link = StreamLink(
            source,
            place,
            *self._sockets(source, secret),
            secret,
            dialed_s=self._clock(),
            lost_since_s=self._clock(),
        )
        self._register(link)
        link.stream = Stream(
            _LinkSink(self, link),
            can_replay=bool(source.replay),
            pending_max=self._limits.pending_messages_max,
            room=self._room,
        )
        return link

    def _sockets(self, source: EventSource, secret: bytes) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The subscription socket and its monitor."""
        sub = self._socket(zmq.SUB, secret)
        sub.setsockopt(zmq.RECONNECT_IVL, 100)
        sub.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        sub.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        sub.setsockopt(zmq.IPV6, _is_ipv6(source.endpoint))
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            sub.connect(source.endpoint)
        except zmq.ZMQError:
            sub.disable_monitor()
            monitor.close(linger=0)
            sub.close(linger=0)
            raise
        return sub, monitor

    def _connect(self, link: StreamLink) -> None:
        link.sub, link.monitor = self._sockets(link.source, link.secret)
        self._register(link)
        link.lost_since_s, link.lost = self._clock(), False

    def _register(self, link: StreamLink) -> None:
        self._poller.register(link.sub, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _disconnect(self, link: StreamLink) -> None:
        """Closes the sockets, which frees ZMQ's queues. May be called twice."""
        if not link.sub.closed:
            self._poller.unregister(link.sub)
            self._poller.unregister(link.monitor)
        self._close_link(link)
        link.counts.connected = False
        link.behind_since_s, link.largest_bytes = None, 0
        if link.lost_since_s is None:
            link.lost_since_s = self._clock()

    def _replay_socket(self, link: StreamLink) -> zmq.Socket[bytes]:
        """A socket of its own for replay requests."""
        socket = self._socket(zmq.DEALER, link.secret)
        socket.setsockopt(zmq.IPV6, _is_ipv6(link.source.replay))
        socket.connect(link.source.replay)
        return socket

    def _socket(self, kind: int, secret: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if secret:
            zmq_curve.dial(socket, zmq_curve.EVENTS, secret)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes_max)
        socket.setsockopt(zmq.RCVHWM, self._limits.queue_messages_max)
        notice_vanished_host(socket, self._limits.vanished_s)
        return socket

    def _close(self) -> None:
        for link in self._links:
            self._close_link(link)
        self._context.term()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _close_link(self, link: StreamLink) -> None:
        self._end_asking(link)
        self._end_probe(link)
        if link.sub.closed:
            return
        link.sub.disable_monitor()
        link.monitor.close(linger=0)
        link.sub.close(linger=0)


def _is_ipv6(endpoint: str) -> bool:
    """Whether the endpoint has a literal IPv6 address; names are resolved to IPv4."""
    return endpoint.startswith("tcp://[")


@contextmanager
def _net(what: str) -> Iterator[None]:
    """Logs any exception, so that the other streams go on."""
    try:
        yield
    except Exception:
        log.exception("event streams: %s", what)


class _LinkSink:
    """The sink of one link's stream."""

    def __init__(self, subscriber: Subscriber, link: StreamLink) -> None:
        self._subscriber = subscriber
        self._link = link

    def take(self, payload: bytes) -> None:
        self._subscriber.take(self._link, payload)

    def forget(self) -> None:
        self._subscriber.forget(self._link)

    def ask(self, start: int) -> None:
        self._subscriber.ask(self._link, start)
