"""What an engine's bytes mean."""

from __future__ import annotations

import pytest

from moonpool.disagg_proxy.http.response_reader import BadResponse, ResponseReader

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH


@pytest.mark.parametrize(
    ("answer", "body"), [(LENGTH, b"hello"), (CHUNKED, b"5\r\nhello\r\n0\r\n\r\n"), (INTERIM, b"hello")]
)
def test_cut_anywhere_the_body_comes_out_as_it_came(answer: bytes, body: bytes) -> None:
    for cut in range(len(answer) + 1):
        reader = ResponseReader(head_only=False)
        got = reader.feed(answer[:cut]) if cut else b""
        assert reader.complete == (cut == len(answer))
        if not reader.complete:
            got += reader.feed(answer[cut:])
        assert got == body
        assert reader.complete
        assert reader.keep_alive
        assert reader.head is not None
        assert reader.head.status == 200


@pytest.mark.parametrize(
    "answer",
    [
        LENGTH + b"x",
        LENGTH + LENGTH,
        CHUNKED + b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nx",
        b"HTTP/1.1 204 No\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_broken(answer: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseReader(head_only=False).feed(answer)


def test_until_close() -> None:
    reader = ResponseReader(head_only=False)
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nhel") == b"hel"
    assert reader.feed(b"lo") == b"lo"
    assert not reader.complete
    assert reader.finish()
    assert reader.complete
    assert not reader.keep_alive


def test_the_engine_closed_too_early() -> None:
    for cut in range(len(LENGTH)):
        reader = ResponseReader(head_only=False)
        if cut:
            reader.feed(LENGTH[:cut])
        assert not reader.finish()


def test_head_has_a_length_and_no_body() -> None:
    reader = ResponseReader(head_only=True)
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert reader.complete
    assert not reader.keep_alive


@pytest.mark.parametrize(
    ("answer", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 204 No\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
    ],
)
def test_whether_the_connection_can_be_used_again(answer: bytes, keeps: bool) -> None:
    reader = ResponseReader(head_only=False)
    reader.feed(answer)
    assert reader.complete
    assert reader.keep_alive == keeps


def test_a_body_behind_head_is_an_error() -> None:
    with pytest.raises(BadResponse, match="behind its answer"):
        ResponseReader(head_only=True).feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")


def test_fields_that_end_here() -> None:
    reader = ResponseReader(head_only=False)
    fields = b"Connection: X-A\r\nX-A: 1\r\nX-B: 2\r\nKeep-Alive: 5\r\nContent-Length: 0\r\n"
    reader.feed(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n")
    assert reader.head is not None
    assert reader.head.fields == [(b"X-B", b"2"), (b"Content-Length", b"0")]


def test_between_events() -> None:
    """An error event may follow only a whole chunk that ends a whole event."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    for body, between in [
        (b"", True),
        (b"9\r\ndata: a\n\n\r\n", True),
        (b"9\r\ndata: a\n\n", False),
        (b"8\r\ndata: a\n\r\n", False),
        (b"9\r\nda", False),
        (b"9\r\ndata: a\n\n\r\n9", False),
    ]:
        reader = ResponseReader(head_only=False)
        reader.feed(head)
        if body:
            reader.feed(body)
        assert reader.between_events == between, body
