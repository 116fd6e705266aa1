"""A client's request, whole: what the policy sees and what is sent to an engine."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.disagg_proxy.http.fields import Field, lines


class BadRequest(Exception):
    """A request that is refused.

    status:   the HTTP status to answer with.
    reason:   a short label for the metric ``moonpool_proxy_rejected_total``.
    sentence: what is wrong and, where there is one, the remedy.
    """

    def __init__(self, status: int, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.sentence = sentence


@dataclass(slots=True)
class Request:
    """One request.

    target:      path and query as sent, without scheme and host.
    path:        target without the query.
    fields:      header fields that go to the engine (no hop-by-hop, no framing, no Host, no X-Request-Id).
    request_id:  the client's X-Request-Id when it is fit to be repeated, else b"" (the connection makes one).
    body:        the content, without transfer coding; complete once the reader hands the request out.
    """

    method: bytes
    target: bytes
    path: bytes
    fields: list[Field]
    http_1_0: bool
    keep_alive: bool
    expects_continue: bool
    request_id: bytes
    content_length: int
    chunked: bool
    body: bytes | bytearray = b""

    def head_for(self, host: bytes) -> bytes:
        """The head to send to an engine; the body goes with a Content-Length, whatever it came with."""
        framing = b""
        if self.body or self.content_length >= 0 or self.chunked:
            framing = b"Content-Length: %d\r\n" % len(self.body)
        return b"%b %b HTTP/1.1\r\nHost: %b\r\n%bX-Request-Id: %b\r\n%b\r\n" % (
            self.method,
            self.target,
            host,
            lines(self.fields),
            self.request_id,
            framing,
        )
