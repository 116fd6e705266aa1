"""Reads one answer of an engine: the head is parsed, the body is handed on exactly as it came.

A chunked body stays chunked: the parser walks over its framing only to know where it ends. Bytes behind the
answer are an error and are found before they are handed on, so that an engine cannot smuggle a second answer
to the client.
"""

from __future__ import annotations

from dataclasses import dataclass

import httptools

from moonpool.disagg_proxy.http.fields import HOP_BY_HOP, Field, tokens, without
from moonpool.disagg_proxy.http.head_cutter import HeadCutter

HEAD_BYTES_MAX = 65536


class BadResponse(Exception):
    """The engine's bytes are no answer that can be relayed; str() says why."""


@dataclass(slots=True)
class ResponseHead:
    """status line and fields of an answer.

    fields:         what goes on to the client: no hop-by-hop, no Transfer-Encoding, no X-Request-Id;
    Content-Length
                    is kept.
    until_close:    the body ends when the engine closes the connection.
    """

    status: int
    phrase: bytes
    fields: list[Field]
    chunked: bool
    until_close: bool
    event_stream: bool


class _MessageState:
    """What the parser calls; see request_reader._HeadFields for why it is an object of its own."""

    __slots__ = ("begun", "complete", "fields", "head_complete", "in_chunk", "phrase")

    def __init__(self) -> None:
        self.begun = 0
        self.phrase = b""
        self.fields: list[Field] = []
        self.head_complete = False
        self.in_chunk = False
        self.complete = False

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_status(self, phrase: bytes) -> None:
        self.phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_complete:  # trailers pass through as bytes
            self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.head_complete = True

    def on_chunk_header(self) -> None:
        self.in_chunk = True

    def on_chunk_complete(self) -> None:
        self.in_chunk = False

    def on_message_complete(self) -> None:
        self.complete = True


class ResponseReader:
    """Feed it what the engine sent; it returns the part that is body.

    head:       known once the head is whole.
    complete:   the whole answer has been read. An ``until_close`` answer completes by ``finish()``.
    keep_alive: after completion: the connection can carry another request.
    received:   bytes of any kind so far.
    """

    __slots__ = (
        "_cutter",
        "_head_only",
        "_parser",
        "_state",
        "_tail",
        "complete",
        "head",
        "keep_alive",
        "received",
    )

    def __init__(self, *, head_only: bool) -> None:
        self._head_only = head_only
        self.head: ResponseHead | None = None
        self.complete = False
        self.keep_alive = False
        self.received = 0
        self._tail = b""
        self._begin()

    def feed(self, data: bytes) -> bytes:
        """Returns the body bytes in data, framing included. Raises BadResponse; then feed no more."""
        self.received += len(data)
        if self.head is None:
            data = self._feed_head(data)
            if not data or self.head is None:
                return b""
        if self.complete:
            raise BadResponse("the engine sent bytes behind its answer")
        self._parse(data)
        self._tail = data
        return data

    def finish(self) -> bool:
        """The engine closed its side: whether that is the proper end of the answer."""
        if self.head is not None and self.head.until_close:
            self.complete = True
        return self.complete

    @property
    def between_events(self) -> bool:
        """Whether an error event can follow what was relayed: no chunk and no event of the stream stands
        half."""
        if self.head is None or not self.head.event_stream:
            return False
        if not self._tail:
            return True
        if self.head.chunked:
            return not self._state.in_chunk and self._tail.endswith((b"\n\n\r\n", b"\n\r\n\r\n"))
        return self.head.until_close and self._tail.endswith((b"\n\n", b"\n\r\n"))

    def _begin(self) -> None:
        self._state = _MessageState()
        self._parser = httptools.HttpResponseParser(self._state)
        self._cutter = HeadCutter()

    def _feed_head(self, data: bytes) -> bytes:
        """Parse up to the end of the head (interim 1xx answers are skipped); returns what follows it."""
        while data:
            offset = self._cutter.cut(data)
            if self._cutter.size > HEAD_BYTES_MAX:
                raise BadResponse(f"the head of the engine's answer is larger than {HEAD_BYTES_MAX} bytes")
            self._parse(data if offset < 0 else data[:offset])
            if offset < 0:
                return b""
            data = data[offset:]
            if not self._state.head_complete:
                continue
            status = self._parser.get_status_code()
            if status >= 200:
                self._take_head(status)
                return data
            self._begin()
        return b""

    def _take_head(self, status: int) -> None:
        # The parser's own should_keep_alive() has forgotten the fields when the answer ends with its head.
        head, closes = _response_head(status, self._state, self._head_only)
        self.head = head
        self.keep_alive = self._parser.get_http_version() == "1.1" and not closes and not head.until_close
        if self._head_only:
            self.complete = True
            self.keep_alive = False  # the parser waits for a body that never comes

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise BadResponse("the engine switched protocols, which nobody asked for") from error
        except httptools.HttpParserError as error:
            raise BadResponse(f"the engine's bytes are no HTTP answer: {error}") from error
        state = self._state
        if state.begun > 1:
            raise BadResponse("the engine sent bytes behind its answer")
        if state.complete:
            self.complete = state.head_complete and self._parser.get_status_code() >= 200


def _response_head(status: int, state: _MessageState, head_only: bool) -> tuple[ResponseHead, bool]:
    """The head to relay, and whether the engine will close the connection after its answer."""
    kept: list[Field] = []
    named: list[bytes] = []
    chunked = has_length = event_stream = False
    for field in state.fields:
        name = field[0].lower()
        if name == b"transfer-encoding":
            if tokens(field[1]) != [b"chunked"]:
                raise BadResponse("the engine's answer has a Transfer-Encoding other than chunked")
            chunked = True
        elif name == b"connection":
            named += tokens(field[1])
        elif name == b"x-request-id" or name in HOP_BY_HOP:
            pass
        else:
            if name == b"content-length":
                has_length = True
            elif name == b"content-type":
                event_stream = field[1].lower().startswith(b"text/event-stream")
            kept.append(field)
    if named:
        kept = without(kept, [name for name in named if name != b"content-length"])
    bodiless = head_only or status in (204, 304)
    head = ResponseHead(
        status=status,
        phrase=state.phrase,
        fields=kept,
        chunked=chunked and not bodiless,
        until_close=not (chunked or has_length or bodiless),
        event_stream=event_stream,
    )
    return head, b"close" in named
