"""Hot restart: a new proxy replaces a running one at the same address without a refused connection.

The old proxy passes its listening sockets through a Unix socket named after the address (in the abstract name
space, so no file can be left behind). For a moment both accept from the same queue, so no connection is lost.
The old proxy drains and ends only once the new one serves; a new proxy that fails before has changed nothing.
ZeroMQ cannot share the socket for other proxies: the old proxy unbinds its address when it is replaced, and
the new one retries until then (peers/peer_bus.py).

    new: connects           old: the listening sockets (SCM_RIGHTS)
    new: checks its engines, accepts, b"taken"      old: gives up the name, closes this connection, drains
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

from moonpool.core.service.peer_user import is_same_user

_GREETING = b"moonpool-proxy 1"
_TAKEN = b"taken"
_SOCKETS_MAX = 200  # two for each of 64 processes, and their own; the kernel's limit is 253
_ANSWER_S = 5.0  # seconds for the old proxy to answer
_PREPARE_S = 120.0  # seconds for the new proxy, from the sockets to serving
_PAUSE_S = 1.0  # pause before a retry for want of open files, or of the name

_log = logging.getLogger("moonpool.proxy")


class Predecessor:
    """The running proxy, which has passed its sockets: ``take`` them, then ``release`` it, or ``close``."""

    def __init__(self, connection: socket.socket, listening: list[socket.socket]) -> None:
        self._connection = connection
        self.listening = listening

    def take(self, places: Set[tuple[str, int]]) -> list[socket.socket]:
        """The sockets at these addresses; the caller owns them from now on."""
        taken = [each for each in self.listening if each.getsockname()[:2] in places]
        self.listening = [each for each in self.listening if each not in taken]
        return taken

    async def release(self) -> None:
        """Tells the old proxy that this one serves."""
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        self._close_rest()
        with self._connection:
            try:
                self._connection.sendall(_TAKEN)
                self._connection.recv(1)  # end of file: the name is free
            except OSError as error:
                _log.warning("the proxy that ran here has not confirmed that it will end: %s", error)

    def close(self) -> None:
        """Closes the connection, and the sockets that were not taken over."""
        self._close_rest()
        self._connection.close()

    def _close_rest(self) -> None:
        """Closes sockets that were not taken: the predecessor had more addresses."""
        while self.listening:
            self.listening.pop().close()


def find_predecessor(host: str, port: int) -> Predecessor | None:
    """The proxy of this user that runs at this address; None: there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(_name(host, port))
        if is_same_user(connection):
            greeting, numbers, _, _ = socket.recv_fds(
                connection, len(_GREETING), _SOCKETS_MAX, socket.MSG_CMSG_CLOEXEC
            )
            listening = [socket.socket(fileno=number) for number in numbers]
            if greeting == _GREETING and listening:
                return Predecessor(connection, listening)
            for each in listening:
                each.close()
    except OSError as error:
        if not isinstance(error, ConnectionRefusedError):
            _log.warning("the proxy at %s:%d did not hand over its address: %s", host, port, error)
    connection.close()
    return None


class Offer:
    """Passes the sockets to processes of this user that ask for them, one at a time.

    taken: called when another proxy serves in our place.
    The name is retried while a predecessor still holds it.
    """

    def __init__(
        self, host: str, port: int, listening: Sequence[socket.socket], taken: Callable[[], None]
    ) -> None:
        self._listening = tuple(listening)
        self._taken = taken
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._name = _name(host, port)
        bound = self._bind()
        if not bound:
            _log.warning("no other proxy can take over from this one while its name is another's")
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._serve(bound))

    async def close(self) -> None:
        """Ends the offer. May be called twice."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._socket.close()

    def _bind(self) -> bool:
        try:
            self._socket.bind(self._name)
            self._socket.listen(4)
        except OSError:
            return False
        return True

    async def _serve(self, bound: bool) -> None:
        loop = asyncio.get_running_loop()
        while not bound:
            await asyncio.sleep(_PAUSE_S)
            bound = self._bind()
        while True:
            try:
                caller, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of open files, or the caller is gone
                _log.warning("another proxy could not be answered: %s", error.strerror or error)
                await asyncio.sleep(_PAUSE_S)
                continue
            with caller, suppress(OSError, TimeoutError):
                if not is_same_user(caller):
                    continue
                socket.send_fds(caller, [_GREETING], [each.fileno() for each in self._listening])
                if await asyncio.wait_for(loop.sock_recv(caller, len(_TAKEN)), _PREPARE_S) != _TAKEN:
                    continue  # it failed before it served
                _log.info("another proxy has taken over; running requests are finished here")
                self._socket.close()
                self._taken()
                return


def _name(host: str, port: int) -> str:
    return f"\0moonpool-proxy {host}:{port}"
