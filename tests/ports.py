"""TCP ports of 127.0.0.1 for servers that a test starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


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
