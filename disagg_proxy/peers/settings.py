"""Settings of the exchange with other proxies. Values only; times in seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moonpool.core.config.cluster_token import check_token_length
from moonpool.core.service.addresses import Address, parse_address
from moonpool.disagg_proxy.setting_error import bad

_LOCAL = re.compile(r"ipc://\S+")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Addresses, token and intervals.

    listen:  addresses to bind, HOST:PORT, or ipc://PATH on this host; (): no exchange.
    peers:   addresses of the other proxies, in the same form. A host name stands for all its addresses and is
             resolved every ``resolve_s``, so one name serves for all replicas; our own may be among them.
    token:   the cluster token: messages are encrypted, and only processes that have it can take part.
             Without it all addresses must be of this machine.
    """

    listen: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    token: bytes = b""
    gather_s: float = 0.002  # changes within it are sent in one message
    beat_s: float = 0.5  # heartbeat: the longest silence of a healthy proxy
    silent_s: float = 3.0  # a proxy that is silent for longer is lost
    resolve_s: float = 5.0
    state_s: float = 0.1  # the shortest time between two states
    queue_messages_max: int = 2000  # for each subscriber
    message_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        if self.peers and not self.listen:
            raise bad(
                "peer_listen",
                "to exchange with other proxies it needs an address for them; give --peer-listen HOST:PORT",
            )
        named = [("peer_listen", each) for each in self.listen] + [("peers", each) for each in self.peers]
        for key, text in named:
            address = endpoint(text, key)
            if not isinstance(address, Address) or address.is_loopback:
                continue
            if not self.token:
                raise bad(
                    key,
                    f"{text} is reached from other machines, so proxies need the cluster's token there; give "
                    f"--token-file",
                )
            check_token_length(self.token, f"proxy.{key} = {text}", f"proxy.{key}")


def endpoint(text: str, key: str = "peers") -> Address | str:
    """Parses an address; an ipc:// endpoint is returned as it is. Raises ConfigError."""
    return text if _LOCAL.fullmatch(text) else parse_address(text, f"proxy.{key}")
