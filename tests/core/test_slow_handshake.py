"""A stranger in the place of a node or a master, which sends a byte of its handshake now and then: whoever
connects gives up in time nevertheless, and at once when it is closed meanwhile."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moonpool import Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import Closed, Error, Timeout

from . import wire_client as w
from .store_bed import MIB, TOKEN, until

PACE_MS = 100  # between two bytes; the whole challenge takes over 7 s
LATE_S = 3.0  # by then whoever waits for progress only is still there


class Dribbler:
    """Takes connections and sends each a challenge, byte by byte, until the other side hangs up."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.callers = 0
        self.stayed_s: list[float] = []  # of each caller that has hung up
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return "127.0.0.1:{1}".format(*self._listener.getsockname())

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError):
                caller, _ = self._listener.accept()
                self.callers += 1
                self._threads.append(threading.Thread(target=self._serve, args=(caller,), daemon=True))
                self._threads[-1].start()

    def _serve(self, caller: socket.socket) -> None:
        began = time.monotonic()
        hung_up = select.poll()
        hung_up.register(caller, select.POLLRDHUP)
        challenge = w.frame(w.CHALLENGE, w.challenge(os.urandom(32), os.urandom(16)))
        with caller:
            for i in range(len(challenge)):
                with suppress(OSError):
                    caller.sendall(challenge[i : i + 1])
                if hung_up.poll(PACE_MS) or self._closed.is_set():
                    break
        self.stayed_s.append(time.monotonic() - began)


@pytest.fixture
def tcp() -> Iterator[Dribbler]:
    dribbler = Dribbler(socket.create_server(("127.0.0.1", 0)))
    yield dribbler
    dribbler.close()


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "n.sock"


@pytest.fixture
def unix(path: Path) -> Iterator[Dribbler]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    dribbler = Dribbler(listener)
    yield dribbler
    dribbler.close()


def in_time(call: Callable[[], Any], error: type[Error]) -> None:
    began = time.monotonic()
    with pytest.raises(error):
        call()
    assert time.monotonic() - began < LATE_S


def closed_meanwhile(client: Any, call: Callable[[], Any], dribbler: Dribbler) -> None:
    """close() ends the opening that another thread waits for, and waits for it no longer than that."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call)
        until(lambda: dribbler.callers == 1)
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < LATE_S
        with pytest.raises(Closed):
            waiting.result(LATE_S)
    until(lambda: len(dribbler.stayed_s) == 1)
    assert dribbler.stayed_s[0] < LATE_S


def test_a_node_of_this_host(unix: Dribbler, path: Path) -> None:
    in_time(lambda: Store(str(path), token=TOKEN, timeout_s=0.3), Timeout)


def test_a_node_elsewhere(tcp: Dribbler) -> None:
    in_time(lambda: Store(f"tcp://{tcp.address}", token=TOKEN, timeout_s=0.3), Timeout)


def test_a_store_that_is_closed_while_it_connects_to_a_node_of_this_host(unix: Dribbler, path: Path) -> None:
    client = _native.Client(str(path), TOKEN, timeout_s=60.0)
    closed_meanwhile(client, client.connect, unix)


def test_a_store_that_is_closed_while_it_connects_elsewhere(tcp: Dribbler) -> None:
    client = _native.Client(f"tcp://{tcp.address}", TOKEN, timeout_s=60.0)
    closed_meanwhile(client, client.connect, tcp)


def test_a_store_that_is_closed_while_a_node_accepts_nobody(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as only:
            only.connect(str(path))  # fills the queue
            client = _native.Client(str(path), TOKEN, timeout_s=60.0)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(client.connect)
                with pytest.raises(StillWaiting):
                    waiting.result(0.2)
                began = time.monotonic()
                client.close()
                with pytest.raises(Closed):
                    waiting.result(LATE_S)
                assert time.monotonic() - began < LATE_S


def test_a_master_that_a_client_looks_for(tcp: Dribbler) -> None:
    directory = _native.DirectoryClient(tcp.address, TOKEN, timeout_s=0.3)
    in_time(directory.members, Error)
    until(lambda: tcp.stayed_s)
    assert tcp.stayed_s[0] < LATE_S
    directory.close()


def test_a_directorys_client_that_is_closed_while_it_connects(tcp: Dribbler) -> None:
    directory = _native.DirectoryClient(tcp.address, TOKEN, timeout_s=60.0)
    closed_meanwhile(directory, directory.members, tcp)


def test_a_node_that_is_stopped_while_it_connects_to_its_master(tcp: Dribbler, path: Path) -> None:
    node = _native.Server(
        str(path), [("default", 4 * MIB)], TOKEN, node_settings(), listen=["127.0.0.1:0"], master=tcp.address
    )
    node.start()
    until(lambda: tcp.callers == 1)
    began = time.monotonic()
    node.stop()
    assert time.monotonic() - began < LATE_S
    assert tcp.callers == 1  # it was not just about to try again
