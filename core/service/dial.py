"""A TCP connection within a deadline that holds for the look-up of the name, too."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
import time


def dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connects to the first address of ``host`` that answers. Raises OSError; TimeoutError after
    ``timeout_s`` seconds, also when the resolver is silent."""
    give_up_s = time.monotonic() + timeout_s
    trouble: OSError = OSError(f"{host} has no address")
    for address in _addresses(host, port, timeout_s):
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        try:
            return socket.create_connection((address, port), left_s)
        except OSError as error:
            trouble = error
    raise trouble


def _addresses(host: str, port: int, timeout_s: float) -> list[str]:
    """On a thread: the C library's resolver takes no deadline, and may need half a minute."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    found: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.put([str(row[4][0]) for row in rows])
        except (OSError, UnicodeError) as error:  # the latter for a label of more than 63 characters
            found.put(error if isinstance(error, OSError) else OSError(f"{host} is no name: {error}"))

    threading.Thread(target=look_up, name="moonpool-resolve", daemon=True).start()
    try:
        answer = found.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"the name {host} was not resolved in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer
