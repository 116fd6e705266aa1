"""One request's way to an engine and back.

    choose -> connect (or take an idle connection) -> send -> first byte -> ... -> last byte
       ^------------- failed and nothing was sent to the client yet --'  '- failed: error event, or cut the
       client off

Who may end it: the engine (answer complete, or failure), the client (``cancel``), a deadline (``expired``),
the server (``engine_silent``, and ``cancel`` at the end of a drain). Each ending passes ``_leave_engine``
exactly once per engine that was tried, where in-flight count, breaker and counts are settled.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from moonpool.disagg_proxy.conductor.breaker import Verdict, verdict_on_status
from moonpool.disagg_proxy.dispatcher import Dispatcher
from moonpool.disagg_proxy.engine import Engine
from moonpool.disagg_proxy.http.answers import error_event, relayed_head
from moonpool.disagg_proxy.http.chunked import ChunkDecoder, ChunkError
from moonpool.disagg_proxy.http.request import BadRequest, Request
from moonpool.disagg_proxy.http.response_reader import ResponseHead
from moonpool.disagg_proxy.settings import Deadlines, Limits
from moonpool.disagg_proxy.upstream import Clock, UpstreamConnection

_NEVER = float("inf")


class Downstream(Protocol):
    """The client, as a relay sees it. One of the last three is called exactly once, unless the relay is
    cancelled."""

    def relay_write(self, data: bytes) -> None: ...
    def relay_finished(self, *, close: bool) -> None:
        """The answer is whole. close: its end is the end of the connection."""
        ...

    def relay_refused(self, refusal: BadRequest) -> None:
        """Nothing was written; answer this."""
        ...

    def relay_broken(self) -> None:
        """Something was written and the rest will not come: the client must see a cut."""
        ...


@dataclass(frozen=True, slots=True)
class RelayContext:
    """What all relays of a proxy share."""

    dispatcher: Dispatcher
    limits: Limits
    deadlines: Deadlines
    loop: asyncio.AbstractEventLoop
    clock: Clock


class Relay:
    """deadline: time of the clock after which the owner calls ``expired`` (inf: none)."""

    __slots__ = (
        "_answered",
        "_body_bytes",
        "_close",
        "_connecting",
        "_connection",
        "_context",
        "_decoder",
        "_downstream",
        "_engine",
        "_fresh_only",
        "_head",
        "_request",
        "_started_at",
        "_trial",
        "_tried",
        "_why",
        "deadline",
        "progress_at",
    )

    def __init__(
        self, context: RelayContext, downstream: Downstream, request: Request, *, close: bool
    ) -> None:
        self._context = context
        self._downstream = downstream
        self._request = request
        self._close = close
        self._engine: Engine | None = None
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._decoder: ChunkDecoder | None = None
        self._head: ResponseHead | None = None
        self._tried: list[Engine] = []
        self._fresh_only = False
        self._trial = False
        self._answered = False
        self._body_bytes = 0
        self._why = ""
        self._started_at = self.progress_at = context.clock()
        self.deadline = _NEVER

    def start(self) -> None:
        self._dispatch(self._started_at)

    def close_after(self) -> None:
        """The proxy is draining: make this answer the connection's last (it is told so if its head is not
        out)."""
        self._close = True

    def cancel(self) -> None:
        """The client is gone, or the proxy ends: close the engine's connection at once."""
        if self._engine is not None:
            self._engine.counts.disconnects["streaming" if self._answered else "waiting"] += 1
        self._abandon(Verdict.NONE)

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the engine."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self.progress_at = self._context.clock()
            self.deadline = self.progress_at + self._context.deadlines.stream_stall_s
            self._connection.resume()

    def expired(self, now: float) -> None:
        """The deadline passed. A first byte that never came is not tried elsewhere: it took long enough."""
        limit = self._context.deadlines
        if self._answered:
            self._fail("stalled", f"sent nothing for {limit.stream_stall_s:g} s in mid answer", now)
        else:
            self._fail("first_byte", f"did not answer within {limit.first_byte_s:g} s", now, retry=False)

    def engine_silent(self, since: float, now: float) -> None:
        """The engine has answered no health check since then; give up unless the request itself made
        progress."""
        if self.progress_at <= since:
            self._fail(
                "silent", f"answers neither this request nor its health checks for {now - since:.0f} s", now
            )

    # What the engine's connection calls.

    def response_started(self, head: ResponseHead, body: bytes, complete: bool) -> None:
        engine = self._engine
        if engine is None:
            return
        now = self._context.clock()
        self._answered = True
        self._head = head
        self._request.body = b""  # no retry from here on
        engine.counts.first_byte.observe(now - self._started_at)
        chunked = head.chunked
        if chunked and self._request.http_1_0:
            self._decoder = ChunkDecoder()
            chunked = False
        self._close |= head.until_close
        text = relayed_head(head, engine.label, self._request.request_id, chunked=chunked, close=self._close)
        self._hand_on(text, body, complete, now)

    def response_data(self, body: bytes, complete: bool) -> None:
        self._hand_on(b"", body, complete, self._context.clock())

    def response_failed(self, reason: str, why: str) -> None:
        now = self._context.clock()
        engine = self._engine
        if reason == "stale" and engine is not None and not self._fresh_only:
            engine.pool.drop_idle()
            self._fresh_only = True  # the same engine once more: it did nothing wrong
            self._connection = None
            self._connect(engine)
            return
        self._fail(reason, why, now)

    # Sending.

    def _dispatch(self, now: float) -> None:
        engine = self._context.dispatcher.choose(self._request, self._tried, now)
        if engine is None:
            self._downstream.relay_refused(self._nobody())
            return
        self._tried.append(engine)
        self._engine = engine
        self._fresh_only = False
        self._trial = engine.breaker.started(now)
        engine.relays.add(self)
        connection = engine.pool.take()
        if connection is None:
            self._connect(engine)
        else:
            self._send(engine, connection, now)

    def _connect(self, engine: Engine) -> None:
        self.deadline = _NEVER  # connecting has its own
        self._connecting = self._context.loop.create_task(self._connect_and_send(engine))

    async def _connect_and_send(self, engine: Engine) -> None:
        try:
            connection = await engine.pool.connect()
        except TimeoutError:
            self._connecting = None
            limit_s = self._context.deadlines.connect_s
            self._fail("connect", f"did not accept a connection within {limit_s:g} s", self._context.clock())
        except OSError as error:
            self._connecting = None
            now = self._context.clock()
            if isinstance(error, ConnectionRefusedError):
                engine.refused(now, "refuses connections")  # do not wait for the next health check
            self._fail("connect", f"cannot be reached: {error.strerror or error}", now)
        else:
            self._connecting = None
            if connection.closing:
                self._fail("lost", "closed the connection as soon as it was open", self._context.clock())
            else:
                self._send(engine, connection, self._context.clock())

    def _send(self, engine: Engine, connection: UpstreamConnection, now: float) -> None:
        request = self._request
        self._connection = connection
        self.progress_at = now
        self.deadline = now + self._context.deadlines.first_byte_s
        connection.send(
            self, request.head_for(engine.host), request.body, head_only=request.method == b"HEAD"
        )

    # Receiving.

    def _hand_on(self, head: bytes, body: bytes, complete: bool, now: float) -> None:
        self.progress_at = now
        self.deadline = now + self._context.deadlines.stream_stall_s
        self._body_bytes += len(body)
        if self._decoder is not None:
            body = self._decode(self._decoder, body)
            if self._engine is None:
                return
        if complete:
            self._connection = None
        if head or body:
            self._downstream.relay_write(head + body if head else body)
        if complete:
            self._finish(now)

    def _decode(self, decoder: ChunkDecoder, body: bytes) -> bytes:
        content = bytearray()
        try:
            decoder.feed(body, content)
        except ChunkError as error:
            self._fail("bad_answer", f"sent a broken answer: {error}", self._context.clock())
        return bytes(content)

    def _finish(self, now: float) -> None:
        engine, head = self._engine, self._head
        if engine is None or head is None:
            return
        engine.counts.whole.observe(now - self._started_at)
        self._count_answer(engine, head)
        self._leave_engine(verdict_on_status(head.status), now)
        self._downstream.relay_finished(close=self._close)

    # Failing.

    def _fail(self, reason: str, why: str, now: float, *, retry: bool = True) -> None:
        engine = self._engine
        if engine is None:
            return
        stage = "after_first_byte" if self._answered else "before_first_byte"
        engine.counts.failures[(stage, reason)] += 1
        self._why = f"engine {engine.name} {why}"
        at_boundary = self._between_events()
        if self._answered and self._head is not None:
            self._count_answer(engine, self._head)
        self._abandon(Verdict.BAD)
        if self._answered:
            self._break_off(at_boundary)
        elif retry and len(self._tried) <= self._context.limits.retries_max:
            engine.counts.retries += 1
            self._dispatch(now)
        else:
            status = 504 if reason == "first_byte" else 502
            self._downstream.relay_refused(BadRequest(status, "engine_failed", f"{self._why}; try again"))

    def _break_off(self, between_events: bool) -> None:
        """The client has part of an answer. A stream gets a last event that says so; anything else is cut."""
        head = self._head
        if between_events and head is not None:
            chunked = head.chunked and self._decoder is None
            self._downstream.relay_write(error_event("engine_failed", self._why, chunked=chunked))
            self._downstream.relay_finished(close=True)
        else:
            self._downstream.relay_broken()

    def _between_events(self) -> bool:
        connection = self._connection
        return connection is not None and connection.reader is not None and connection.reader.between_events

    def _nobody(self) -> BadRequest:
        if self._why:
            return BadRequest(
                502, "engine_failed", f"{self._why}, and no other healthy engine is left; try again"
            )
        count = len(self._context.dispatcher.engines)
        which = "the only engine is not" if count == 1 else f"none of the {count} engines is"
        return BadRequest(503, "no_engine", f"{which} healthy now; GET /engines says why, try again soon")

    def _abandon(self, verdict: Verdict) -> None:
        """Close whatever leads to the engine, and leave it."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.let_go(self)
            self._connection = None
        self._leave_engine(verdict, self._context.clock())

    def _leave_engine(self, verdict: Verdict, now: float) -> None:
        engine, self._engine = self._engine, None
        self.deadline = _NEVER
        if engine is not None:
            engine.relays.discard(self)
            engine.breaker.finished(verdict, now, trial=self._trial)
            engine.counts.relayed_bytes += self._body_bytes
            self._body_bytes = 0

    def _count_answer(self, engine: Engine, head: ResponseHead) -> None:
        engine.counts.answers[f"{head.status // 100}xx"] += 1
