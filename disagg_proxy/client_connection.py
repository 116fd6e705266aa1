"""One client's connection: reads requests one after the other, answers them or has them relayed.

Invariants: at most one request is under way; what the client sends meanwhile is held up to a bound, then not
read any more; nothing is read or started while the client does not take what was written to it; every state
has a deadline (``sweep``), except that a running relay brings its own.

    idle -> head -> body -> answering -> idle ...
    any state -> lingering (refused: nothing more of it is read, the client gets time to see why) -> closed
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from moonpool.disagg_proxy.budget import BodyBudget
from moonpool.disagg_proxy.http.answers import CONTINUE
from moonpool.disagg_proxy.http.request import BadRequest, Request
from moonpool.disagg_proxy.http.request_reader import RequestReader
from moonpool.disagg_proxy.pages import Pages
from moonpool.disagg_proxy.relay import Relay, RelayContext
from moonpool.disagg_proxy.routes import Route, route
from moonpool.disagg_proxy.settings import Deadlines, Limits
from moonpool.disagg_proxy.tcp import notice_dead_peer, peer_left


@dataclass(slots=True)
class ClientContext:
    """What all client connections of a proxy share. draining: no further requests on any of them."""

    relays: RelayContext
    pages: Pages
    budget: BodyBudget
    limits: Limits
    deadlines: Deadlines
    connections: set[ClientConnection]
    rejected: Counter[str]
    next_request_id: Callable[[], bytes]
    changed: Callable[[], None]  # a connection ended
    draining: bool = False


class ClientConnection(asyncio.Protocol):
    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._loop = context.relays.loop
        self._clock = context.relays.clock
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(context.limits.head_bytes_max, context.limits.body_bytes_max)
        self._relay: Relay | None = None
        self._serving: Request | None = None
        self._held = b""  # read ahead while a request is under way
        self._held_back = False  # reading is paused because of it
        self._write_paused = False
        self._lingering = False
        self._closing = False
        self._continued = False
        self._budgeted = 0
        self._head_timed = False
        self._body_began = 0.0
        self._deadline = 0.0
        self._stall_size = 0
        self._stall_at = 0.0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        context = self._context
        self._transport = cast(asyncio.Transport, transport)
        high = context.limits.write_buffer_bytes_max
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        self._deadline = self._clock() + context.deadlines.head_s
        context.connections.add(self)
        notice_dead_peer(self._transport, context.deadlines.tcp_dead_peer_s)
        if len(context.connections) > context.limits.client_connections_max:
            limit = context.limits.client_connections_max
            self._refuse(
                BadRequest(503, "connections", f"the proxy has its limit of {limit} connections; try again")
            )

    def data_received(self, data: bytes) -> None:
        if self._lingering or self._closing:
            return
        if self._relay is not None or self._write_paused or self._held:
            self._hold(data)
        else:
            self._read(data)

    def eof_received(self) -> bool:
        """The client ended its side. It may only have shut down its writing, but a client that left looks the
        same, and an engine that computes for nobody is worse than a half-closed client without its answer."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._transport = None
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.cancel()
        self._give_budget()
        self._held = b""
        self._context.connections.discard(self)
        self._context.changed()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._stall_at = self._clock()
        self._stall_size = self._unwritten()
        if self._relay is not None:
            self._relay.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._relay is not None:
            self._relay.resume()
        else:
            self._go_on()

    # What the server calls.

    @property
    def busy(self) -> bool:
        """Whether a request is under way, or part of one has arrived."""
        return self._relay is not None or self._reader.begun or bool(self._held)

    def sweep(self, now: float) -> None:
        """Look at the deadlines, and at what the event loop does not report."""
        if self._held_back and self._transport is not None and peer_left(self._transport):
            self.abort()  # nothing is read from it, so nothing else would tell
            return
        if self._write_paused:
            self._look_for_stall(now)
        relay = self._relay
        if relay is not None:
            if now >= relay.deadline and not self._write_paused:
                relay.expired(now)
        elif now >= self._deadline:
            self._expire()

    def drain(self) -> None:
        """Finish what is under way, then close; close now when nothing is."""
        if self._relay is not None:
            self._relay.close_after()
        elif not self.busy and not self._lingering:
            self._close()

    def abort(self) -> None:
        """Close at once; what was not written yet is lost."""
        if self._transport is not None:
            self._transport.abort()

    # What the relay calls.

    def relay_write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def relay_finished(self, *, close: bool) -> None:
        self._end_request(close=close)

    def relay_refused(self, refusal: BadRequest) -> None:
        request = self._serving
        if request is not None:
            self._answer_refusal(refusal, request, close=self._last(request))

    def relay_broken(self) -> None:
        """A reset rather than an orderly end: an answer that ends with the connection must not look whole."""
        self._relay = None
        self._serving = None
        self._closing = True
        self.abort()

    # Reading.

    def _read(self, data: bytes) -> None:
        """Read requests until there are no bytes left, or one is under way."""
        while data:
            try:
                request = self._reader.feed(data)
                self._count_body(request)
            except BadRequest as refusal:
                self._refuse(refusal)
                return
            if request is None:
                self._await_more()
                return
            data = self._reader.rest
            self._reader.rest = b""
            self._serve(request)
            if self._closing or self._lingering:
                return
            if self._relay is not None or self._write_paused:
                self._hold(data)
                return

    def _hold(self, data: bytes) -> None:
        self._held += data
        if (
            len(self._held) > self._context.limits.pipelined_bytes_max
            and not self._held_back
            and self._transport
        ):
            self._held_back = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """The request under way is over: take up what was held."""
        if self._closing or self._lingering or self._relay is not None or self._write_paused:
            return
        held, self._held = self._held, b""
        if self._held_back and self._transport is not None:
            self._held_back = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
        if held:
            self._read(held)

    def _await_more(self) -> None:
        """Part of a request is there: set its deadline, and say that the body may come if the client asks."""
        now, limit, head = self._clock(), self._context.deadlines, self._reader.head
        if head is None:
            if not self._head_timed:
                self._head_timed = True
                self._deadline = now + limit.head_s  # for the whole head, however it drips
            return
        if not self._body_began:
            self._body_began = now
        if head.expects_continue and not self._continued:
            self._continued = True
            if self._transport is not None and not self._reader.buffered:
                self._transport.write(CONTINUE)
        earned_s = self._reader.buffered / limit.body_bytes_per_s_min
        self._deadline = min(now, self._body_began + earned_s) + limit.body_stall_s

    def _count_body(self, request: Request | None) -> None:
        size = len(request.body) if request is not None else self._reader.buffered
        if size > self._budgeted:
            if not self._context.budget.take(size - self._budgeted):
                raise BadRequest(
                    503, "bodies_held", "the proxy holds as many request bodies as it may; try again"
                )
            self._budgeted = size

    def _give_budget(self) -> None:
        if self._budgeted:
            self._context.budget.give(self._budgeted)
            self._budgeted = 0

    # Answering.

    def _serve(self, request: Request) -> None:
        self._continued = False
        self._head_timed = False
        self._body_began = 0.0
        if not request.request_id:
            request.request_id = self._context.next_request_id()
        self._serving = request
        close = self._last(request)
        try:
            chosen = route(request)
        except BadRequest as refusal:
            self._answer_refusal(refusal, request, close=close)
            return
        if chosen is Route.RELAY:
            self._relay = Relay(self._context.relays, self, request, close=close)
            self._relay.start()
        else:
            self.relay_write(self._context.pages.answer(chosen, request, close=close))
            self._end_request(close=close)

    def _last(self, request: Request) -> bool:
        return self._context.draining or not request.keep_alive

    def _answer_refusal(self, refusal: BadRequest, request: Request, *, close: bool) -> None:
        """Refuse a request that was read whole: the connection stays usable."""
        self._context.rejected[refusal.reason] += 1
        head_only = request.method == b"HEAD"
        text = self._context.pages.refusal(refusal, request.request_id, close=close, head_only=head_only)
        self.relay_write(text)
        self._end_request(close=close)

    def _end_request(self, *, close: bool) -> None:
        was_relayed, self._relay = self._relay is not None, None
        self._serving = None
        self._give_budget()
        self._deadline = self._clock() + self._context.deadlines.client_idle_s
        if close or self._context.draining:
            self._close()
        elif was_relayed and (self._held or self._held_back):
            self._loop.call_soon(self._go_on)  # not from here: a refusal may come from inside of _read

    def _refuse(self, refusal: BadRequest) -> None:
        """Refuse what cannot be read on: answer, then wait a little so that the client can read why."""
        self._context.rejected[refusal.reason] += 1
        request_id = self._context.next_request_id()
        text = self._context.pages.refusal(refusal, request_id, close=True, head_only=False)
        self._give_budget()
        self._reader = RequestReader(0, 0)  # drops what was read
        self._lingering = True
        self._deadline = self._clock() + self._context.deadlines.linger_s
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(text)
            if transport.can_write_eof():
                transport.write_eof()

    # Ending.

    def _expire(self) -> None:
        if self._lingering or self._closing:
            self.abort()
        elif self._reader.begun:
            part = "body" if self._reader.head is not None else "head"
            self._refuse(BadRequest(408, f"{part}_timeout", f"the request's {part} did not arrive in time"))
        elif self._write_paused:
            pass  # _look_for_stall decides
        else:
            self._close()

    def _look_for_stall(self, now: float) -> None:
        size = self._unwritten()
        if size != self._stall_size:
            self._stall_size, self._stall_at = size, now
        elif now - self._stall_at >= self._context.deadlines.client_stall_s:
            self._context.rejected["client_stalled"] += 1
            self.abort()

    def _unwritten(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _close(self) -> None:
        """Close once all is written; if the client does not take it, sweep aborts."""
        self._closing = True
        self._held = b""
        self._deadline = self._clock() + self._context.deadlines.client_stall_s
        if self._transport is not None:
            self._transport.close()
