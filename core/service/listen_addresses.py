"""The addresses of a process: where it listens, which address others use, which host it is.

The rules for every port of ours, so that all ports behave alike: a port on loopback is free to use; any other
address needs a cluster token that the operator chose; a default port that is in use is replaced by a free
one, a port that the operator chose is an error when it is in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from moonpool.core.config.cluster_token import check_token_length
from moonpool.core.config.config import Config
from moonpool.core.config.paths import TOKEN_VARIABLE
from moonpool.core.errors import ConfigError, Error
from moonpool.core.service.addresses import Address, parse_address

OFF = "off"
OPEN_PAGES = ("node.http", "master.http")  # they need a token to listen, and ask no client for it
HOST_ID_CHARACTERS_MAX = 256
RANGES_MAX = 16  # of shards, each with a master of its own
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class NodeAddresses:
    """The addresses of a node's wire: those to listen on (none: off), the one that others use, the host, the
    master.

    ``advertise`` may have port 0: the port that ``listen`` gets. "" and () stand for an absent value.
    """

    listen: tuple[str, ...] = ()
    advertise: str = ""
    host_id: str = ""
    master: str = ""


def node_addresses(config: Config) -> NodeAddresses:
    """Raises ConfigError for contradictory or impossible settings, with the remedy."""
    node = config.node
    masters = master_ranges(config)
    master = masters[0][0] if masters else None
    listen = listen_address(config, "node.listen")
    identity = node.host_id or host_id()
    if len(identity) > HOST_ID_CHARACTERS_MAX or not re.fullmatch("[ -~]+", identity):
        raise _wrong(
            f"node.host_id = {identity[:HOST_ID_CHARACTERS_MAX]!r} must be at most {HOST_ID_CHARACTERS_MAX} "
            f"printable ASCII characters; the master takes no other",
            "node.host_id",
        )
    if listen is None:
        if master is not None:
            raise _wrong(
                f"node.listen is off, and the other nodes of the master {master} must reach this one; give "
                f"an address, for example 0.0.0.0:7710",
                "node.listen",
            )
        return NodeAddresses(host_id=identity)
    if node.advertise:
        advertise = parse_address(node.advertise, "node.advertise")
        if _is_any(advertise.host):
            raise _wrong(
                f"node.advertise = {advertise} is no address to connect to; name one that others reach",
                "node.advertise",
            )
    else:
        advertise = Address(advertised_address(listen.host, master), listen.port)
        if advertise.is_loopback and master is not None and not master.is_loopback:
            raise _wrong(
                f"node.listen = {listen} cannot be reached by the other nodes of the master {master}; "
                f"listen on an address of this host, for example 0.0.0.0:{listen.port or 7710}",
                "node.listen",
            )
    return NodeAddresses((str(listen),), str(advertise), identity, master_text(config))


def listen_address(config: Config, key: str) -> Address | None:
    """The address in the setting ``key`` to listen on; None when it is off. Takes port 0 instead of a default
    port that another process uses.

    Raises ConfigError for an address beyond loopback without a cluster token that the operator chose.
    """
    section, name = key.split(".")
    text: str = getattr(getattr(config, section), name)
    if text == OFF:
        return None
    address = parse_address(text, key)
    require_token(config, address, key)
    if config.origin(key).kind == "default" and is_taken(address):
        return Address(address.host, 0)
    return address


@contextmanager
def explain_bind_errors(key: str, addresses: Iterable[str]) -> Iterator[None]:
    """Turns the native server's error about an address into a ConfigError with the remedy."""
    try:
        yield
    except Error as error:
        text = next((each for each in addresses if str(error).startswith(f"listening on {each}: ")), "")
        if not text:
            raise
        reason = str(error).removeprefix(f"listening on {text}: ")
        raise _wrong(
            f"{key} = {text} cannot be listened on: {reason}; choose another with --listen", key, text
        ) from error


def require_token(config: Config, address: Address, key: str) -> None:
    """Raises ConfigError for an ``address`` beyond loopback without a cluster token that is configured and
    long enough.
    """
    if address.is_loopback:
        return
    if config.token_is_configured:
        check_token_length(config.read_token(), f"{key} = {address}", key)
        return
    if key in OPEN_PAGES:
        raise _wrong(
            f"{key} = {address} can be reached from other hosts, and these pages ask for no secret: "
            f"keep them on 127.0.0.1:{address.port}, or protect the port yourself (a private network, a "
            f"proxy in front) and say so with a cluster token: cluster.token_file or {TOKEN_VARIABLE}",
            key,
            peer=str(address),
        )
    raise _wrong(
        f"{key} = {address} can be reached from other hosts, which needs a cluster token: set "
        f"cluster.token_file or {TOKEN_VARIABLE}, or listen on 127.0.0.1:{address.port}",
        key,
        peer=str(address),
    )


def master_ranges(config: Config) -> tuple[tuple[Address, ...], ...]:
    """Of each range of shards those of its master and its standby; none when there is no master. Raises
    ConfigError when one is on another host and no token was chosen: the token that is made on demand is this
    host's alone; and for ranges that cannot be those of a pool.
    """
    given = config.cluster.master
    text = given if isinstance(given, str) else ",".join(given)
    if not text.strip(" ,"):
        return ()
    ranges = tuple(
        tuple(parse_address(one.strip(), "cluster.master") for one in part.split(",") if one.strip())
        for part in text.split(";")
    )
    addresses = [address for part in ranges for address in part]
    if not all(ranges):
        raise _wrong(
            f"cluster.master = {text!r} has a range without a master; name one on each side of a semicolon",
            "cluster.master",
        )
    if len(ranges) > RANGES_MAX:
        raise _wrong(
            f"cluster.master has {len(ranges)} ranges of masters, and there are at most {RANGES_MAX}; put "
            f"commas between the masters of one range",
            "cluster.master",
        )
    if len(ranges) > 1 and len(set(addresses)) != len(addresses):
        raise _wrong(
            f"cluster.master = {text!r} names one master twice; each has one range (master.range)",
            "cluster.master",
        )
    for address in addresses:
        if not address.is_loopback and not config.token_is_configured:
            raise _wrong(
                f"cluster.master = {address} is on another host, which needs a cluster token that both know: "
                f"set cluster.token_file or {TOKEN_VARIABLE}",
                "cluster.master",
                peer=str(address),
            )
    return ranges


def master_text(config: Config) -> str:
    """The addresses as the C++ core takes them: one, or several with commas, and semicolons between ranges;
    empty: there is no master. Raises as master_ranges()."""
    return ";".join(",".join(map(str, part)) for part in master_ranges(config))


def range_of_master(config: Config) -> tuple[int, int]:
    """(index, count) of master.range. Raises ConfigError."""
    text = config.master.range
    found = re.fullmatch(r"\s*(\d{1,2})/(\d{1,2})\s*", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not index < count <= RANGES_MAX:
        raise _wrong(
            f"master.range = {text!r} must be INDEX/COUNT, from 0/1, which is all shards, to "
            f"{RANGES_MAX - 1}/{RANGES_MAX}",
            "master.range",
        )
    return index, count


def is_taken(address: Address) -> bool:
    """Whether a process listens there, or the address cannot be bound."""
    if address.port == 0:
        return False
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError:
            return True
    return False


def advertised_address(host: str, towards: Address | None) -> str:
    """The address by which others reach a socket that listens on ``host``: that one, or where it means all
    addresses, the one from which packets leave for ``towards``. For a ``towards`` on this host it is the
    first that is not loopback, since others may be elsewhere.
    """
    if not _is_any(host):
        return host
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    if towards is not None and not towards.is_loopback and (found := _source_towards(family, towards)):
        return found
    return _first_address() or ("::1" if family == socket.AF_INET6 else "127.0.0.1")


def host_id() -> str:
    """Equal for all processes of one running machine, different for any two machines."""
    parts = []
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            parts.append(Path(path).read_text().strip())
    return hashlib.sha256("\0".join(parts or [socket.gethostname()]).encode()).hexdigest()[:16]


def _source_towards(family: socket.AddressFamily, towards: Address) -> str:
    """Sends no packet: connecting a datagram socket only chooses the route."""
    with suppress(OSError):
        for info in socket.getaddrinfo(towards.host, towards.port, family, socket.SOCK_DGRAM):
            with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
                probe.connect(info[4])
                return str(probe.getsockname()[0])
    return ""


def _first_address() -> str:
    """The IPv4 address of the first interface that has one and is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found = ipaddress.IPv4Address(answer[20:24])
                if not found.is_loopback:
                    return str(found)
    return ""


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _wrong(message: str, key: str, peer: str = "") -> ConfigError:
    return ConfigError(message, operation=key.split(".")[0], key=key, peer=peer or None)
