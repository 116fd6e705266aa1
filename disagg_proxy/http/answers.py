"""The answers that the proxy gives itself, and the heads of those that it relays."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from moonpool.disagg_proxy.http.fields import Field, lines
from moonpool.disagg_proxy.http.response_reader import ResponseHead

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = b"application/json"
LAST_CHUNK = b"0\r\n\r\n"
_CLOSE = b"Connection: close\r\n"
_PHRASES = {int(status): status.phrase.encode() for status in HTTPStatus}
_JSON = msgspec.json.Encoder()


class ErrorDetail(msgspec.Struct):
    """The inner object of an error in the shape of the OpenAI API."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(status: int, reason: str, sentence: str) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as clients of the OpenAI API expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _JSON.encode(ErrorBody(ErrorDetail(sentence, kind, None, reason)))


def own_answer(
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    request_id: bytes = b"",
    fields: Iterable[Field] = (),
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """A whole answer. Content-Length is that of the body even where the body is left out (HEAD)."""
    head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b%b\r\n" % (
        status,
        _PHRASES.get(status, b""),
        content_type,
        len(body),
        lines(fields),
        b"X-Request-Id: %b\r\n" % request_id if request_id else b"",
        _CLOSE if close else b"",
    )
    return head if head_only else head + body


def relayed_head(
    head: ResponseHead, engine: bytes, request_id: bytes, *, chunked: bool, close: bool
) -> bytes:
    """The head of a relayed answer: the engine's status and fields, and who gave it."""
    return b"HTTP/1.1 %d %b\r\n%b%bX-Moonpool-Engine: %b\r\nX-Request-Id: %b\r\n%b\r\n" % (
        head.status,
        head.phrase,
        lines(head.fields),
        b"Transfer-Encoding: chunked\r\n" if chunked else b"",
        engine,
        request_id,
        _CLOSE if close else b"",
    )


def error_event(reason: str, sentence: str, *, chunked: bool) -> bytes:
    """The last event of a stream that broke; with the end of the chunked body where there is one."""
    event = b"data: %b\n\n" % error_body(502, reason, sentence)
    return b"%x\r\n%b\r\n%b" % (len(event), event, LAST_CHUNK) if chunked else event
