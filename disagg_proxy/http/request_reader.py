"""Cuts the bytes of a client connection into requests.

Invariant: bytes behind a whole request are never parsed before the caller feeds them again, so a client that
pipelines ten thousand requests in one packet costs memory for the packet only. To keep it, the parser is fed
heads only (up to the blank line) and bodies are framed here: by count, or by ``ChunkDecoder``.
"""

from __future__ import annotations

from typing import NoReturn

import httptools

from moonpool.disagg_proxy.http.chunked import ChunkDecoder, ChunkError
from moonpool.disagg_proxy.http.fields import HOP_BY_HOP, Field, tokens, without
from moonpool.disagg_proxy.http.head_cutter import HeadCutter
from moonpool.disagg_proxy.http.request import BadRequest, Request

_REQUEST_ID_BYTES_MAX = 128


class _HeadFields:
    """What the parser calls. It does not know the parser: no reference cycle, nothing for the garbage
    collector."""

    __slots__ = ("complete", "fields", "target")

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[Field] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


class RequestReader:
    """Feed it what arrives; it answers with a request once one is whole.

    head:     the request under way once its head is known, else None.
    rest:     after a whole request: the bytes behind it, to be fed for the next one.
    buffered: bytes of the body held so far.
    """

    __slots__ = (
        "_body",
        "_body_bytes_max",
        "_cutter",
        "_decoder",
        "_head_bytes_max",
        "_parsed",
        "_parser",
        "head",
        "rest",
    )

    def __init__(self, head_bytes_max: int, body_bytes_max: int) -> None:
        self._head_bytes_max = head_bytes_max
        self._body_bytes_max = body_bytes_max
        self._reset()
        self.rest = b""

    @property
    def begun(self) -> bool:
        """Whether bytes of a request have arrived that is not whole yet."""
        return self._cutter.size > 0

    @property
    def buffered(self) -> int:
        return len(self._body)

    def feed(self, data: bytes) -> Request | None:
        """Take bytes. Returns the request when it is whole, else None. Raises BadRequest; then feed no
        more."""
        while self.head is None:
            offset = self._feed_head(data)
            if offset < 0:
                return None
            data = data[offset:]
            if self.head is None and not data:
                return None  # only blank lines so far
        return self._feed_body(self.head, data)

    def _reset(self) -> None:
        self.head: Request | None = None
        self._cutter = HeadCutter()
        self._parsed = _HeadFields()
        self._parser = httptools.HttpRequestParser(self._parsed)
        self._body = bytearray()
        self._decoder: ChunkDecoder | None = None

    def _feed_head(self, data: bytes) -> int:
        """Parse data up to the end of the head; returns the offset behind it, or -1."""
        offset = self._cutter.cut(data)
        if self._cutter.size > self._head_bytes_max:
            raise BadRequest(
                431,
                "head_too_large",
                f"the request's head is larger than the limit of {self._head_bytes_max} bytes",
            )
        try:
            self._parser.feed_data(data if offset < 0 else data[:offset])
        except httptools.HttpParserUpgrade:
            pass  # an upgrade is an offer, which we decline by answering in HTTP/1.1
        except httptools.HttpParserError as error:
            if "PRI" in str(error):  # how a connection of HTTP/2 begins
                raise BadRequest(505, "http_version", "this proxy speaks HTTP/1.1, not HTTP/2") from error
            _refuse_garbage(error)
        if offset >= 0 and self._parsed.complete:
            self.head = self._make_head()
        return offset

    def _make_head(self) -> Request:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise BadRequest(505, "http_version", f"this proxy speaks HTTP/1.1, not HTTP/{version}")
        head = _request(self._parser.get_method(), self._parsed, version == "1.0")
        if head.content_length > self._body_bytes_max:
            self._refuse_size()
        if head.chunked:
            self._decoder = ChunkDecoder()
        return head

    def _feed_body(self, head: Request, data: bytes) -> Request | None:
        if self._decoder is not None:
            try:
                rest = self._decoder.feed(data, self._body)
            except ChunkError as error:
                raise BadRequest(
                    400, "malformed", f"the request's chunked body is malformed: {error}"
                ) from error
            if len(self._body) > self._body_bytes_max:
                self._refuse_size()
            return self._whole(head, self._body, rest) if self._decoder.done else None
        length = max(head.content_length, 0)
        if not self._body and len(data) >= length:  # the usual case: head and body in one piece
            return self._whole(head, data[:length], data[length:])
        missing = length - len(self._body)
        self._body += data[:missing]
        return self._whole(head, self._body, data[missing:]) if len(data) >= missing else None

    def _whole(self, head: Request, body: bytes | bytearray, rest: bytes) -> Request:
        head.body = body
        self.rest = rest
        self._reset()
        return head

    def _refuse_size(self) -> NoReturn:
        raise BadRequest(
            413,
            "body_too_large",
            f"the request's body is larger than the limit of {self._body_bytes_max} bytes",
        )


def _refuse_garbage(error: httptools.HttpParserError) -> NoReturn:
    why = str(error).strip() or type(error).__name__
    raise BadRequest(400, "malformed", f"these bytes are no HTTP/1.1 request: {why}") from error


def _request(method: bytes, parsed: _HeadFields, http_1_0: bool) -> Request:
    """Sort a parsed head into what the proxy needs and what goes on to the engine. Raises BadRequest."""
    kept: list[Field] = []
    named: list[bytes] = []
    hosts, content_length, chunked, expects_continue = 0, -1, False, False
    request_id = b""
    for field in parsed.fields:
        name = field[0].lower()
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if content_length >= 0 or not field[1].isdigit() or len(field[1]) > 18:
                raise BadRequest(400, "malformed", "the request's Content-Length is no single number")
            content_length = int(field[1])
        elif name == b"transfer-encoding":
            if chunked or tokens(field[1]) != [b"chunked"]:
                raise BadRequest(
                    501, "transfer_encoding", "the only Transfer-Encoding that is read here is chunked"
                )
            chunked = True
        elif name == b"connection":
            named += tokens(field[1])
        elif name == b"x-request-id":
            request_id = _fit_request_id(field[1])
        elif name == b"expect":
            if field[1].lower() != b"100-continue":
                raise BadRequest(417, "expect", "the only Expect that is understood here is 100-continue")
            expects_continue = True
        elif name not in HOP_BY_HOP:
            kept.append(field)
    if chunked and content_length >= 0:
        raise BadRequest(400, "malformed", "the request has both a Content-Length and a Transfer-Encoding")
    if hosts > 1 or (hosts == 0 and not http_1_0):
        raise BadRequest(400, "malformed", "the request needs exactly one Host field")
    if named:
        kept = without(kept, named)
    target = _origin_form(parsed.target)
    return Request(
        method=method,
        target=target,
        path=target.partition(b"?")[0],
        fields=kept,
        http_1_0=http_1_0,
        keep_alive=not http_1_0 and b"close" not in named,
        expects_continue=expects_continue and not http_1_0,
        request_id=request_id,
        content_length=content_length,
        chunked=chunked,
    )


def _origin_form(target: bytes) -> bytes:
    """``http://host/path`` and ``/path`` mean the same here; a fragment does not belong in a request."""
    if target.startswith((b"http://", b"https://")):
        slash = target.find(b"/", 8)
        target = target[slash:] if slash >= 0 else b"/"
    return target.partition(b"#")[0]


def _fit_request_id(value: bytes) -> bytes:
    """The client's id when it can be repeated in logs and headers: 1 to 128 visible ASCII characters."""
    fit = 0 < len(value) <= _REQUEST_ID_BYTES_MAX and all(0x21 <= octet <= 0x7E for octet in value)
    return value if fit else b""
