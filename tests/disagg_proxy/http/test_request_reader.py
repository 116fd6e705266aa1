"""What a client's bytes mean."""

from __future__ import annotations

import pytest

from moonpool.disagg_proxy.http.request import BadRequest, Request
from moonpool.disagg_proxy.http.request_reader import RequestReader

HOST = b"Host: x\r\n"


def read_all(pieces: list[bytes], head_max: int = 4096, body_max: int = 4096) -> list[Request]:
    reader, requests = RequestReader(head_max, body_max), []
    for piece in pieces:
        while piece:
            request = reader.feed(piece)
            piece = reader.rest if request is not None else b""
            if request is not None:
                requests.append(request)
    return requests


def refusal(data: bytes, head_max: int = 4096, body_max: int = 4096) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_all([data], head_max, body_max)
    return caught.value


STREAM = (
    b"POST /v1/completions?a=b HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nX-A: 1\r\n\r\nhello"
    b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    b"\r\n\r\n"
    b"POST /tokenize HTTP/1.1\r\n"
    + HOST
    + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    + b"GET /v1/models HTTP/1.1\r\n"
    + HOST
    + b"Connection: close\r\n\r\n"
)


def test_pipelined_requests_cut_anywhere() -> None:
    whole = read_all([STREAM])
    assert [(r.method, r.path, bytes(r.body)) for r in whole] == [
        (b"POST", b"/v1/completions", b"hello"),
        (b"GET", b"/health", b""),
        (b"POST", b"/tokenize", b"abc"),
        (b"GET", b"/v1/models", b""),
    ]
    assert [r.keep_alive for r in whole] == [True, True, True, False]
    for cut in range(1, len(STREAM)):
        assert read_all([STREAM[:cut], STREAM[cut:]]) == whole
    assert read_all([STREAM[at : at + 1] for at in range(len(STREAM))]) == whole


def test_bytes_behind_a_request_are_not_parsed() -> None:
    reader = RequestReader(4096, 4096)
    request = reader.feed(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n\x00garbage")
    assert request is not None
    assert reader.rest == b"\x00garbage"


def test_what_goes_to_the_engine() -> None:
    (request,) = read_all(
        [
            b"POST http://proxy:1/v1/x?q=1#frag HTTP/1.1\r\nHOST: proxy\r\nConnection: keep-alive, X-Drop\r\n"
            b"X-Drop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n"
            b"Authorization: Bearer k\r\nX-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n"
        ]
    )
    assert request.head_for(b"engine:80") == (
        b"POST /v1/x?q=1 HTTP/1.1\r\nHost: engine:80\r\nAuthorization: Bearer k\r\n"
        b"X-Request-Id: mine\r\nContent-Length: 2\r\n\r\n"
    )
    assert request.expects_continue
    assert request.body == b"{}"


@pytest.mark.parametrize("value", [b"", b"a b", b"x" * 129, b"caf\xe9"])
def test_a_request_id_that_cannot_be_repeated_is_dropped(value: bytes) -> None:
    (request,) = read_all([b"GET / HTTP/1.1\r\n" + HOST + b"X-Request-Id: " + value + b"\r\n\r\n"])
    assert request.request_id == b""


def test_an_upgrade_is_declined_and_its_body_read() -> None:
    head = (
        b"POST /v1/x HTTP/1.1\r\n"
        + HOST
        + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n"
    )
    (request,) = read_all([head + b"{}"])
    assert request.body == b"{}"


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "no HTTP/1.1 request"),
        (b"hello\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400, "no HTTP/1.1 request"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A : b\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n c\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: b\x00\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "not HTTP/2"),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505, "not HTTP/2.0"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "exactly one Host"),
        (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400, "exactly one Host"),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "Tr",
        ),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
            400,
            "Len",
        ),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400, "Length"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1, 1\r\n\r\n", 400, "Length"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", 400, "Length"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1e3\r\n\r\n", 400, "Length"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "chunked"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nx\r\n", 400, "chunked body"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Expect: much\r\n\r\n", 417, "100-continue"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 4097\r\n\r\n", 413, "limit of 4096 bytes"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: " + b"b" * 5000, 431, "limit of 4096 bytes"),
        (b"\r\n" * 3000, 431, "limit of 4096 bytes"),
    ],
)
def test_refused(data: bytes, status: int, words: str) -> None:
    refused = refusal(data)
    assert refused.status == status
    assert words in refused.sentence


def test_a_chunked_body_over_the_limit() -> None:
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert refusal(head + b"1001\r\n" + b"x" * 4097).status == 413
