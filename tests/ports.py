"""TCP ports of 127.0.0.1 for servers that a test starts."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_KEPT = ExitStack()
atexit.register(_KEPT.close)


def free_port() -> int:
    """Where nobody listened a moment ago, for a server that does not bind to a port that is held."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Where nobody listens, and that the kernel gives to nobody else meanwhile.

    The sockets that hold them never listen: a server that sets SO_REUSEADDR, as servers do, may bind there.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [int(one.getsockname()[1]) for one in held]


def kept_port() -> int:
    """Such a port for as long as this process lives: for engines, which take a minute until they listen."""
    (port,) = _KEPT.enter_context(held_ports(1))
    return port


@contextmanager
def held_run(count: int) -> Iterator[int]:
    """The first of so many ports in a row, held alike."""
    while True:
        with ExitStack() as stack, held_ports(1) as (first,):
            try:
                for port in range(first + 1, first + count):
                    one = stack.enter_context(socket.socket())
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    one.bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            yield first
            return
