"""Which other proxies this one exchanges its requests in flight with. Values only; times in seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address

_LOCAL = re.compile(r"ipc://\S+")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """listen: where others reach this proxy, HOST:PORT, or ipc://PATH on this host; (): it exchanges nothing.

    peers:   where the others are, written alike. A host name stands for all its addresses, looked up again
             every ``resolve_s``, so that one name serves for all replicas; its own address may be among them.
    token:   of the cluster: all messages are encrypted, and only a process that has it can speak or listen.
             Without, all addresses must be of this machine.
    """

    listen: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    token: bytes = b""
    gather_s: float = 0.002  # what happens within it goes in one message
    beat_s: float = 0.5  # the longest silence of a proxy that is well
    silent_s: float = 3.0  # after it, what a proxy had in flight is not counted any more
    resolve_s: float = 5.0
    state_s: float = 0.1  # the shortest time between two whole states
    queue_messages_max: int = 2000  # for one other proxy that does not read
    message_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        if self.peers and not self.listen:
            raise _bad(
                "peer_listen",
                "to exchange with other proxies it needs an address for them; give --peer-listen HOST:PORT",
            )
        named = [("peer_listen", each) for each in self.listen] + [("peers", each) for each in self.peers]
        for key, text in named:
            address = endpoint(text, key)
            if isinstance(address, Address) and not address.is_loopback and not self.token:
                raise _bad(
                    key,
                    f"{text} is reached from other machines, so proxies need the cluster's token there; give "
                    f"--token-file",
                )


def endpoint(text: str, key: str = "peers") -> Address | str:
    """An address, or the ipc:// endpoint as it is. Raises ConfigError."""
    return text if _LOCAL.fullmatch(text) else parse_address(text, f"proxy.{key}")


def _bad(key: str, sentence: str) -> ConfigError:
    return ConfigError(f"proxy: {sentence}", operation="config", key=f"proxy.{key}")
