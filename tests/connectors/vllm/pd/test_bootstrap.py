"""The bootstrap page, as vLLM's example proxy and our decode engines read it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from moonpool.connectors.vllm.pd import bootstrap
from moonpool.connectors.vllm.pd.bootstrap import Bootstrap, find_workers
from moonpool.connectors.vllm.pd.kv_transfer_params import Meeting
from moonpool.connectors.vllm.pd.step_plan import HandoverStep
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.service.addresses import Address
from tests.connectors.vllm.pd.worlds import DEADLINE_S, eventually, world


class Liar:
    """Answers each caller with these bytes: at once, or one by one for as long as it is listened to."""

    def __init__(self, answer: bytes, *, drips: bool = False) -> None:
        self._pieces = [answer[at : at + 1] for at in range(len(answer))] if drips else [answer]
        self._pause_s = 0.05 if drips else 0.0
        self._server = socket.create_server(("127.0.0.1", 0))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def _serve(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self._server.accept()
                with connection:
                    connection.recv(65536)
                    for piece in self._pieces:
                        connection.sendall(piece)
                        self._stopped.wait(self._pause_s)

    def close(self) -> None:
        self._stopped.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(DEADLINE_S)


def page_of(body: bytes, *, length: int | None = None, status: str = "200 OK") -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


def workers_at(place: object) -> bytes:
    return page_of(json.dumps({"0": {"engine_id": "e", "worker_addr": {"0": {"0": place}}}}).encode())


@pytest.fixture
def page() -> Iterator[Bootstrap]:
    workers = {(0, 0): "127.0.0.1:1", (1, 0): "127.0.0.1:2"}
    page = Bootstrap(Address("127.0.0.1", 0), dp_rank=3, engine_id="e", workers=workers)
    yield page
    page.close()


def test_query(page: Bootstrap) -> None:
    with urllib.request.urlopen(f"http://{page.address}/query", timeout=10) as answer:
        assert json.load(answer) == {
            "3": {"engine_id": "e", "worker_addr": {"0": {"0": "127.0.0.1:1"}, "1": {"0": "127.0.0.1:2"}}}
        }
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{page.address}/other", timeout=10)


def test_workers_are_found(page: Bootstrap) -> None:
    for url in (f"http://{page.address}", f"http://{page.address}/"):
        assert find_workers(url, "e") == {(0, 0): "127.0.0.1:1", (1, 0): "127.0.0.1:2"}
    with pytest.raises(Unavailable, match="knows no engine f"):
        find_workers(f"http://{page.address}", "f")


def test_nobody_there(free_port: int) -> None:
    with pytest.raises(Unavailable):
        find_workers(f"http://127.0.0.1:{free_port}", "e")


def test_a_port_in_use(page: Bootstrap) -> None:
    with pytest.raises(ConfigError, match="give another bootstrap_port"):
        Bootstrap(page.address, dp_rank=0, engine_id="e", workers={})


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 100,
        b"HTTP/1.1 200 OK\r\n",
        page_of(b'{"0": {"engine_id": "e"', length=1000),
        page_of(b'{"0": {"engine_id": "e"}}'),
        page_of(b"[1]"),
        page_of(b"\xff\xfe"),
        page_of(b"[" * 100_000),
        page_of(b"9" * 10_000),
        page_of(b" " * (5 << 20)),
        page_of(b"{}", length=-1),
        page_of(b"{}", status="500 No"),
        page_of(b"{}", status="301 Elsewhere"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n{}",
        workers_at(7),
        workers_at(None),
    ],
)
def test_what_is_no_page(answer: bytes) -> None:
    with contextlib.closing(Liar(answer)) as liar, pytest.raises(Unavailable):
        find_workers(liar.url, "e")


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://h:99999", "http://h:x", "http://\udcff"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(Unavailable):
        find_workers(url, "e")


@pytest.mark.parametrize("drips", [False, True])
def test_an_answer_that_never_ends_is_given_up(drips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence after the first half, and a byte now and then, which no pause between two bytes gives away."""
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 0.3)
    answer = page_of(b" " * 400, length=500) if drips else page_of(b" ", length=500)
    with ExitStack() as stack:
        liar = Liar(answer, drips=drips)
        stack.callback(liar.close)
        liar._pause_s = liar._pause_s or DEADLINE_S
        begun_s = time.monotonic()
        with pytest.raises(Unavailable, match="timed out"):
            find_workers(liar.url, "e")
        assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize(
    "place", ["", "x", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:1", "[::1", "a" * 9999]
)
def test_a_page_that_lies_about_workers_costs_a_recompute(place: str) -> None:
    with contextlib.closing(Liar(workers_at(place))) as liar, world("D", seed=2) as decode:
        decode.take(Meeting("e", liar.url, "x-1"), [10])
        ended = decode.ended()
        assert ended.good == 0
        assert ended.error


def test_a_page_that_leads_to_another_engine_costs_a_recompute() -> None:
    with (
        world("P", seed=1) as other,
        world("D", seed=2) as decode,
        contextlib.closing(Liar(workers_at(other.handover_worker.address))) as liar,
    ):
        decode.take(Meeting("e", liar.url, "x-1"), [10])
        # P knows no such transfer: nothing comes until decode, or its free_block_wait, is at its end.
        decode.handover_worker.begin(HandoverStep(drops=("r",)))
        assert decode.ended().good == 0


def test_callers_without_a_thread_leave_their_place_to_others(
    page: Bootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def fail(thread: threading.Thread) -> None:
        nonlocal tries
        tries += 1
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", fail)
        for _ in range(bootstrap.CALLERS_MAX):
            with socket.create_connection(tuple(page.address), DEADLINE_S) as caller:
                assert caller.recv(1) == b""
    assert tries == bootstrap.CALLERS_MAX
    assert find_workers(f"http://{page.address}", "e")[1, 0] == "127.0.0.1:2"


def test_idle_and_slow_callers_do_not_keep_the_page_from_others(
    page: Bootstrap,
) -> None:
    with ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(tuple(page.address)))
            for _ in range(bootstrap.CALLERS_MAX + 20)
        ]
        for caller in crowd:
            with contextlib.suppress(OSError):
                caller.sendall(b"GET /qu")

        def answers() -> bool:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{page.address}/query", timeout=DEADLINE_S) as answer,
            ):
                return bool(answer.status == 200)
            return False

        eventually(answers)
        of_callers = [one for one in threading.enumerate() if "process_request_thread" in one.name]
        assert len(of_callers) < bootstrap.CALLERS_MAX + 10
