"""Ports of processes that are yet to listen: no other process gets them meanwhile."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address


class HeldPorts:
    """An engine listens a minute after its port was chosen, and a restarted one again: the kernel would give
    the port to others, whose answers would then be taken for the engine's.

    A socket that is bound and does not listen keeps the kernel from doing that, and a process that sets
    SO_REUSEADDR, as servers do, may bind and listen there. ``keep=False`` is for programs that might not.
    """

    def __init__(self) -> None:
        self._probes = ExitStack()
        self._kept: list[Address] = []
        self._holders: list[socket.socket] = []

    def take(self, address: Address, key: str, *, or_any: bool = False, keep: bool = True) -> Address:
        """``address`` with a real port; until settle() no two of ours get the same.

        Raises ConfigError when another process listens there: else we would take that one for ours when
        it answers. or_any: then any free port will do.
        """
        probe = self._probes.enter_context(_bindable(address))
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if or_any and address.port:
                return self.take(address._replace(port=0), key, keep=keep)
            raise ConfigError(
                f"{key}: address {address} cannot be used: {error.strerror}; choose another, "
                "or port 0 for any",
                operation="up",
                key=key,
                peer=str(address),
                cause=error,
            ) from error
        found = address._replace(port=probe.getsockname()[1])
        if keep:
            self._kept.append(found)
        return found

    def settle(self) -> None:
        """From now on the processes that were given the ports can listen there."""
        self._probes.close()
        for address in self._kept:
            holder = _bindable(address)
            try:
                holder.bind(address)
            except OSError:  # another process was faster; the one that was to listen will say so
                holder.close()
            else:
                self._holders.append(holder)
        self._kept.clear()

    def release(self) -> None:
        """The kernel may give them to any process again."""
        self._probes.close()
        for holder in self._holders:
            holder.close()
        self._holders.clear()


def _bindable(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
