"""How a new proxy takes the place of a running one at the same address without a refused connection.

The running one hands its listening sockets over, through a UNIX socket named after the address (in the
abstract name space, so there is no file that could be left behind). For a moment both accept from the same
queue, so no connection is between the two. Only when the new one serves, the old one drains and ends; a new
one that fails before that has changed nothing. The address for other proxies is ZeroMQ's, which shares no
socket: the old one lets go of it when it is told, and the new one tries until then (peers/peer_bus.py).

    new: connects           old: the listening sockets (SCM_RIGHTS)
    new: checks its engines, accepts, b"taken"      old: gives up the name, closes this connection, drains
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

_GREETING = b"moonpool-proxy 1"
_TAKEN = b"taken"
_SOCKETS_MAX = 200  # two for each of 64 processes, and theirs; the kernel's limit is 253
_ANSWER_S = 5.0  # of the old proxy
_PREPARE_S = 120.0  # of the new one, from the sockets to serving
_PAUSE_S = 1.0  # before what failed for want of open files, or of the name, is tried again

_log = logging.getLogger("moonpool.proxy")


class Predecessor:
    """A proxy that runs at this address and has handed over its sockets: ``take`` them, then ``release`` it,
    or ``close``."""

    def __init__(self, connection: socket.socket, listening: list[socket.socket]) -> None:
        self._connection = connection
        self.listening = listening

    def take(self, places: Set[tuple[str, int]]) -> list[socket.socket]:
        """Those at these addresses; the caller's from now on."""
        taken = [each for each in self.listening if each.getsockname()[:2] in places]
        self.listening = [each for each in self.listening if each not in taken]
        return taken

    async def release(self) -> None:
        """We serve: it may go."""
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        self._close_rest()
        with self._connection:
            try:
                self._connection.sendall(_TAKEN)
                self._connection.recv(1)  # its end: the name is free for us
            except OSError as error:
                _log.warning("the proxy that ran here has not confirmed that it will end: %s", error)

    def close(self) -> None:
        """Closes the connection, and the sockets that were not taken over."""
        self._close_rest()
        self._connection.close()

    def _close_rest(self) -> None:
        """What was not taken: the predecessor had more addresses."""
        while self.listening:
            self.listening.pop().close()


def find_predecessor(host: str, port: int) -> Predecessor | None:
    """The proxy of this user that runs at this address, if there is one."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(_name(host, port))
        if _is_ours(connection):
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
    """Hands the sockets to a process of this user that asks for them, one at a time.

    taken: called when another proxy serves in our place. While the name is another's, because a predecessor
    has not given it up yet, it is tried again.
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
        """Idempotent."""
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
            except OSError as error:  # no open file is left, or the caller is gone
                _log.warning("another proxy could not be answered: %s", error.strerror or error)
                await asyncio.sleep(_PAUSE_S)
                continue
            with caller, suppress(OSError, TimeoutError):
                if not _is_ours(caller):
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


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user, or of root, is at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (os.getuid(), 0)
