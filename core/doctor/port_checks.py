"""The addresses that processes of this host would listen on: whether they are this host's, and free.

A port that a process of Moonpool holds is at work. Which of the processes are to run here is not known, so a
default address that is taken is weak, one that was configured is broken.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moonpool.core.config.config import Config
from moonpool.core.doctor.finding import Finding, broken, weak, works
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.listen_addresses import OFF

ADDRESSES = ("node.listen", "node.http", "master.listen", "master.http", "proxy.listen")
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def check(config: Config) -> Iterator[Finding]:
    """All checks of this file."""
    for key in ADDRESSES:
        section, name = key.split(".")
        text: str = getattr(getattr(config, section), name)
        if text == OFF:
            continue
        try:
            address = parse_address(text, key)
        except ConfigError as error:
            yield broken(f"port {key}", str(error), "write host:port")
            continue
        if address.port:  # 0: any free one
            yield _look(config, key, address)


def _look(config: Config, key: str, address: Address) -> Finding:
    check, what = f"port {key}", f"{key} = {address}"
    error = bind_error(address)
    is_chosen = config.origin(key).kind != "default"
    if error == 0:
        return works(check, f"{address} is free")
    if error == errno.EADDRINUSE:
        holder, is_ours = holder_of(address.port)
        if is_ours:
            return works(check, f"{holder} listens at {address}")
        sentence = f"{what} is in use" + (f" by {holder}" if holder else "")
        remedy = f"ss -ltnp 'sport = :{address.port}'; end what listens there, or set {key} to another port"
        return broken(check, sentence, remedy) if is_chosen else weak(check, sentence, remedy)
    if error == errno.EACCES:
        return broken(check, f"this user may not open {address}", f"set {key} to a port above 1023")
    return broken(check, f"{what} is no address of this host: {os.strerror(error)}", f"ip address; set {key}")


def bind_error(address: Address) -> int:
    """0 where a process could listen, else the errno. The port is held for a moment, without listening."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def holder_of(port: int) -> tuple[str, bool]:
    """("process 4711 (name)", whether it is one of Moonpool) of what listens at ``port``; ("", False) where
    it cannot be seen: of other users only root sees it. Several processes may hold one socket.
    """
    found = ""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for pid in filter(str.isdigit, os.listdir("/proc") if sockets else ()):
        with suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(descriptor.path) in sockets:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                    found = f"process {pid} ({os.path.basename(command[0])})"
                    if any(os.path.basename(word) == "moonpool" for word in command[:3]):
                        return found, True
    return found, False


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen at ``port``."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
