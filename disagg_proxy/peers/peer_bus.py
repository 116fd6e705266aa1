"""A thread that exchanges messages with the other proxies over ZMQ.

    others <--XPUB-- outbox (deque, filled by any thread, emptied every gather_s)
    others ---SUB--> hear(sender, kind, changes, lag_s)

A new subscriber gets the whole state. A proxy that missed a message sees a gap in the sequence numbers and
subscribes again. The thread never waits for a slow subscriber: its queue is bounded, and the next state
replaces what it missed.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import zmq

from moonpool.core.config.cluster_token import secret_after
from moonpool.core.errors import ConfigError
from moonpool.core.service import zmq_curve
from moonpool.core.service.addresses import Address
from moonpool.core.service.zmq_liveness import notice_vanished_host
from moonpool.core.version_range import VersionRange
from moonpool.disagg_proxy.peers.peer_clock import PeerClock
from moonpool.disagg_proxy.peers.settings import PeerSettings, endpoint
from moonpool.disagg_proxy.peers.wire import (
    CHANGES_MAX,
    VERSIONS,
    BlocksExpected,
    Change,
    Head,
    Kind,
    OtherVersion,
    decode_changes,
    decode_head,
    encode,
    version_for,
)

_TICK_S = 0.1  # also the pause between two attempts to bind an address in use
_STOP_TIMEOUT_S = 10.0
_AT_ONCE = 64  # messages of one peer in a row
_OUTBOX_MAX = 200_000  # pending changes; beyond it they are dropped, and a state follows

log = logging.getLogger("moonpool.proxy")


@dataclass(slots=True)
class PeerCounts:
    """Counters of one address, as in ``PeerBus.stats``. missed: sequence gaps; malformed: messages that could
    not be decoded."""

    messages: int = 0
    changes: int = 0
    states: int = 0
    missed: int = 0
    malformed: int = 0


@dataclass(slots=True)
class _Peer:
    """A subscription to one address; only the thread uses it."""

    where: str
    sub: zmq.Socket[bytes]
    counts: PeerCounts
    sender: str = ""  # "": no message yet
    sequence: int = -1
    whole: bool = False  # a state has arrived, and every message since
    twin: bool = False  # another address leads to the same proxy; this one is ignored
    heard_s: float = 0.0
    secret: bytes = field(default=b"", repr=False)  # by which it was asked; b"": in plain
    dialed_s: float = 0.0  # when that was changed
    asked_s: float = 0.0
    clock: PeerClock = field(default_factory=PeerClock)
    reads: VersionRange | None = None  # None: it was not heard
    no_version: str = ""  # the last sentence in the log about a version that is not read here


class PeerBus:
    """Exchanges from start() to stop().

    hear:  called on the thread with (sender, kind, changes, lag_s); kind STATE replaces the sender's whole
           state; lag_s: how long ago the message was sent.
    lost:  called with a sender that is silent for too long, or that has restarted.
    state: returns the requests in flight. It calls its argument while no change can be told.
    waits: whether to retry an address in use; until it is bound, no peer receives anything.
    Raises ConfigError if the address cannot be bound.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        hear: Callable[[str, Kind, list[Change], float], None],
        lost: Callable[[str], None],
        state: Callable[[Callable[[], None]], list[Change]],
        waits: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name = os.urandom(8).hex()
        self._settings = settings
        self._hear, self._lost, self._state = hear, lost, state
        self._clock, self._wall = clock, wall
        self._outbox: deque[Change] = deque()
        self._overflowed = False
        self._asleep = True
        self._sequence = 0
        self._stopping = False
        self._lets_go = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        token = settings.token
        self._authenticator = zmq_curve.authenticate(self._context, zmq_curve.PEERS, token) if token else None
        self._keys = zmq_curve.ServedEndpoints(zmq_curve.PEERS, token) if token else None
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()  # guards _peers, for stats()
        self._state_wanted = False
        self._state_sent_s = self._beat_sent_s = self._resolved_s = self._bound_s = -math.inf
        # A separate thread resolves names: a silent name server must not stop the exchange.
        self._lookups = ThreadPoolExecutor(1, "proxy-peers-names")
        self._lookup: Future[set[str] | None] | None = None
        self._unbound = list(settings.listen)
        self._bound: list[str] = []
        try:
            self._pub = self._publish()
            self._bind(waits)
        except (zmq.ZMQError, OSError) as error:
            self._end()
            os.close(self._wake)
            raise self._no_address(error) from error
        self._thread = threading.Thread(target=self._run, name="proxy-peers", daemon=True)

    @property
    def where(self) -> str:
        """The endpoint that other proxies subscribe to."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self, *, waits: bool = False) -> None:
        """Starts the thread. Raises ConfigError if an address is in use, unless ``waits``."""
        if self._unbound and not waits:
            raise self._no_address(zmq.ZMQError(errno.EADDRINUSE))
        if self._unbound:
            log.info("other proxies hear of this one when %s is free", ", ".join(self._unbound))
        self._thread.start()

    def let_go(self) -> None:
        """Unbinds the address for a successor: other proxies then hear the successor instead."""
        self._lets_go = True
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends the thread and closes the sockets. May be called twice."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._wake)  # not before: the number may be reused while a thread still writes

    def tell(self, change: Change) -> None:
        """Sends a change to the others within ``gather_s``. May be called on any thread; cheap."""
        outbox = self._outbox
        if len(outbox) >= _OUTBOX_MAX:
            self._overflowed = True
            return
        outbox.append(change)
        if self._asleep and not self._stopping:
            self._asleep = False
            os.eventfd_write(self._wake, 1)

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters (*_total) and gauges, by address."""
        now_s = self._clock()
        with self._lock:
            peers = list(self._peers.values())
        return {
            peer.where: {
                "connected": float(bool(peer.sender)),
                "silent_seconds": now_s - peer.heard_s if peer.sender else 0.0,
                "lag_seconds": peer.clock.mean_lag_s,
                **{f"{name}_total": count for name, count in asdict(peer.counts).items()},
            }
            for peer in peers
            if peer.sender != self.name and not peer.twin
        }

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        known: dict[str, zmq.Socket[bytes]] = {}
        more = False
        while not self._stopping:
            try:
                if self._lets_go:
                    self._unbind()
                elif self._unbound and self._clock() - self._bound_s >= _TICK_S:
                    self._bind(waits=True)
                self._resolve()
                self._follow_token()
                subs = {where: peer.sub for where, peer in self._peers.items()}
                for sub in set(known.values()) - set(subs.values()):
                    poller.unregister(sub)
                for sub in set(subs.values()) - set(known.values()):
                    poller.register(sub, zmq.POLLIN)
                known = subs
                ready = dict(poller.poll(0 if more else int(_TICK_S * 1000)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    time.sleep(self._settings.gather_s)
                if self._pub in ready:
                    self._on_subscriptions()
                more = False
                for peer in list(self._peers.values()):
                    if peer.sub in ready:
                        more |= self._on_messages(peer)
                self._say()
                self._check_silence()
            except Exception:  # a fault in one message must not end the exchange
                log.exception("the exchange with other proxies met a fault and goes on")
        self._end()

    def _say(self) -> None:
        """Sends the pending changes, a state if one is due, and the heartbeat."""
        self._asleep = True  # before the outbox is read: a thread that appends later wakes this one again
        now_s = self._clock()
        if self._overflowed:
            self._overflowed = False
            self._state_wanted = True
        if self._state_wanted and now_s - self._state_sent_s >= self._settings.state_s:
            self._state_wanted = False
            self._state_sent_s = now_s
            self._send(Kind.STATE, self._state(self._forget_told))
        while self._outbox:
            changes = [self._outbox.popleft() for _ in range(min(len(self._outbox), CHANGES_MAX))]
            self._send(Kind.CHANGES, changes)
        if now_s - self._beat_sent_s >= self._settings.beat_s:
            self._send(Kind.CHANGES, [])

    def _forget_told(self) -> None:
        """Drops pending changes that a state contains; states contain no blocks."""
        for _ in range(len(self._outbox)):
            change = self._outbox.popleft()
            if isinstance(change, BlocksExpected):
                self._outbox.append(change)

    def _send(self, kind: Kind, changes: list[Change]) -> None:
        self._sequence += 1
        self._beat_sent_s = self._clock()
        readers = [peer.reads for peer in self._peers.values() if peer.sender != self.name]
        head = Head(
            version_for(readers),
            self.name,
            self._sequence,
            kind,
            self._wall(),
            VERSIONS.lowest,
            VERSIONS.highest,
        )
        self._pub.send_multipart(encode(head, changes))

    def _on_subscriptions(self) -> None:
        while True:
            try:
                said = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._state_wanted |= said[:1] == b"\x01"

    def _on_messages(self, peer: _Peer) -> bool:
        """Processes messages of a peer; returns whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                frames = peer.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                if len(frames) != 2:
                    raise ValueError(f"a message has 2 frames, not {len(frames)}")
                self._take(peer, decode_head(frames[0]), frames[1])
            except OtherVersion as error:
                self._note_version(peer, error)
            except ValueError as error:
                peer.counts.malformed += 1
                if peer.counts.malformed == 1:
                    log.warning("another proxy at %s said what cannot be read: %s", peer.where, error)
        return True

    def _note_version(self, peer: _Peer, other: OtherVersion) -> None:
        """What that proxy reads is in the head of any version: this one answers in one of these."""
        peer.reads = other.reads
        if other.is_lasting:
            peer.counts.malformed += 1
        if peer.no_version != (text := str(other)):
            peer.no_version = text
            level = logging.WARNING if other.is_lasting else logging.INFO
            log.log(level, "another proxy at %s said what cannot be read: %s", peer.where, text)

    def _take(self, peer: _Peer, head: Head, body: bytes) -> None:
        now_s = self._clock()
        if head.sender == self.name:
            if peer.sender != self.name:
                self._forget(peer, "has given its place to this one")
            peer.sender, peer.heard_s = self.name, now_s  # one of the given addresses is our own
            return
        if head.sender != peer.sender or peer.twin:
            if head.sender != peer.sender:
                self._forget(peer, "has started anew")
            peer.sender = head.sender
            peer.reads = head.reads
            peer.twin = any(
                other.sender == head.sender and not other.twin
                for other in self._peers.values()
                if other is not peer
            )
        if peer.twin:
            peer.heard_s = now_s
            return
        changes = decode_changes(body)
        lag_s = peer.clock.lag_s(head.sent_at, self._wall())
        gap = peer.whole and head.sequence != peer.sequence + 1
        peer.sequence, peer.heard_s = head.sequence, now_s
        peer.counts.messages += 1
        peer.counts.changes += len(changes)
        if head.kind == Kind.STATE:
            peer.counts.states += 1
            peer.whole = True
            self._hear(head.sender, Kind.STATE, changes, lag_s)
            return
        if gap:
            peer.counts.missed += 1
            peer.whole = False
        if peer.whole:
            if changes:
                self._hear(head.sender, Kind.CHANGES, changes, lag_s)
        elif now_s - peer.asked_s >= self._settings.beat_s:
            peer.asked_s = now_s
            peer.sub.unsubscribe(b"")
            peer.sub.subscribe(b"")

    def _check_silence(self) -> None:
        now_s = self._clock()
        for peer in self._peers.values():
            if peer.sender and peer.sender != self.name and now_s - peer.heard_s > self._settings.silent_s:
                self._forget(peer, f"was not heard of for {self._settings.silent_s:g} s")

    def _forget(self, peer: _Peer, why: str) -> None:
        if peer.sender and peer.sender != self.name and not peer.twin:
            log.warning(
                "the proxy at %s %s: what it had in flight is not counted until it speaks", peer.where, why
            )
            self._lost(peer.sender)
        peer.sender, peer.whole, peer.twin, peer.clock = "", False, False, PeerClock()
        peer.reads = None

    def _resolve(self) -> None:
        """Connects to new addresses, and disconnects from those that are gone."""
        now_s = self._clock()
        if self._lookup is None and now_s - self._resolved_s >= self._settings.resolve_s:
            self._resolved_s = now_s
            self._lookup = self._lookups.submit(_endpoints, self._settings.peers)
        if self._lookup is None or not self._lookup.done():
            return
        wanted, self._lookup = self._lookup.result(), None
        if wanted is None:  # the known peers stay
            return
        for where in wanted - self._peers.keys():
            secret = secret_after(b"", self._settings.token) if self._settings.token else b""
            peer = _Peer(where, self._subscribe(where, secret), PeerCounts(), heard_s=now_s, secret=secret)
            with self._lock:
                self._peers[where] = peer
        for where in self._peers.keys() - wanted:
            with self._lock:
                peer = self._peers.pop(where)
            self._forget(peer, "is no longer among the addresses")
            peer.sub.close(0)

    def _publish(self) -> zmq.Socket[bytes]:
        pub = self._context.socket(zmq.XPUB)
        pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._limit(pub, zmq.SNDHWM)
        if self._keys is not None:
            self._keys.prepare(pub)
        return pub

    def _bind(self, waits: bool) -> None:
        self._bound_s = self._clock()
        for text in list(self._unbound):
            if self._keys is not None:
                self._keys.prepare(self._pub)
            try:
                self._pub.bind(_text(endpoint(text)))
            except zmq.ZMQError as error:
                if waits and error.errno == errno.EADDRINUSE:
                    continue
                raise
            self._unbound.remove(text)
            self._bound.append(self.where)
            if self._keys is not None:
                self._keys.add(self._pub, self.where)

    def _unbind(self) -> None:
        self._unbound.clear()
        if self._keys is not None:
            self._keys.clear()
        while self._bound:
            self._pub.unbind(self._bound.pop())

    def _no_address(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"proxy: other proxies cannot be served at {', '.join(self._settings.listen)}: {error}; choose "
            f"another --peer-listen",
            operation="listen",
            key="proxy.peer_listen",
            cause=error,
        )

    def _follow_token(self) -> None:
        """While one secret replaces the other, a silent peer may serve under the one it was not asked by."""
        if self._keys is None:
            return
        self._keys.follow()
        now_s = self._clock()
        for peer in self._peers.values():
            if now_s - max(peer.heard_s, peer.dialed_s) <= self._settings.silent_s:
                continue
            peer.dialed_s = now_s
            if (secret := secret_after(peer.secret, self._settings.token)) != peer.secret:
                peer.secret = secret
                peer.sub.close(0)
                peer.sub = self._subscribe(peer.where, secret)

    def _subscribe(self, where: str, secret: bytes) -> zmq.Socket[bytes]:
        sub = self._context.socket(zmq.SUB)
        self._limit(sub, zmq.RCVHWM)
        if secret:
            zmq_curve.dial(sub, zmq_curve.PEERS, secret)
        sub.connect(where)
        sub.subscribe(b"")
        return sub

    def _limit(self, socket_: zmq.Socket[bytes], queue: int) -> None:
        settings = self._settings
        socket_.setsockopt(queue, settings.queue_messages_max)
        socket_.setsockopt(zmq.MAXMSGSIZE, settings.message_bytes_max)
        socket_.setsockopt(zmq.LINGER, 0)
        socket_.setsockopt(zmq.IPV6, 1)
        socket_.setsockopt(zmq.RECONNECT_IVL, 50)
        socket_.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        notice_vanished_host(socket_, settings.silent_s)

    def _end(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(0)


def _endpoints(texts: tuple[str, ...]) -> set[str] | None:
    """The endpoints of all addresses; None if a name cannot be resolved."""
    endpoints = set()
    for text in texts:
        address = endpoint(text)
        if not isinstance(address, Address):
            endpoints.add(address)
            continue
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning("proxies cannot be found at %s: %s", text, error)
            return None
        endpoints |= {_text(Address(str(place[0]), int(place[1]))) for *_, place in found}
    return endpoints


def _text(address: Address | str) -> str:
    return f"tcp://{address}" if isinstance(address, Address) else address
