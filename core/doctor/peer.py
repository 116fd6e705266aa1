"""One peer: whether its port is reached, what listens there, which paths lead to it, and how fast they are.

A peer is a transfer engine, a node or a master, by "host:port". Of an engine's memory some is read, nothing
is written. A node stores one object of 1 MiB in a namespace of its own, gives it back and removes it. Every
step has a deadline, together some 2.5 s.
"""

from __future__ import annotations

import errno
import fcntl
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from moonpool.core.config import paths
from moonpool.core.config.config import Config
from moonpool.core.doctor.finding import Finding, broken, weak, works
from moonpool.core.errors import AuthError, ConfigError, Error, ProtocolError, Timeout
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.cluster import read_cluster
from moonpool.core.service.control_tls import control_client_for, tls_settings_for
from moonpool.core.service.data_tls import engine_tls, pool_tls_for
from moonpool.core.store.store import Store
from moonpool.core.store.types import PutStatus
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.types import PeerPath

if TYPE_CHECKING:
    from moonpool.core.transfer.region import Region
    from moonpool.core.transfer.segment import Segment
    from moonpool.core.transfer.types import RemoteRegion

RESOLVE_S, CONNECT_S, ANSWER_S = 0.5, 0.7, 0.5
MEASURE_S = 0.25
BYTES_MAX = 256 << 20
PIECE_MIN, PIECE_MAX = 64 << 10, 4 << 20
PIECE_GOOD_S = 0.02  # a piece that takes less is followed by one twice as large
LATENCY_BYTES, LATENCY_READS = 4096, 16
OBJECT_BYTES = 1 << 20
NAMESPACE = "moonpool-doctor"
HOST, DEVICE = "host", "device"
Place: TypeAlias = tuple[int, tuple[Any, ...]]  # family and address of a socket
HEADERS_V4, HEADERS_V6, TIMESTAMPS = 40, 60, 12  # bytes of a packet that are no data
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921
# In what a node or a master says to another kind of caller; inside TLS to everything that is not, and in
# plain to what is.
OTHER_SERVICE = ('serves "', "speaks TLS only", "does not speak TLS")
PORT_REMEDY = (
    "start the peer, and let it listen on an address that this host reaches (0.0.0.0, not 127.0.0.1) and on "
    "this port"
)


class Rate(msgspec.Struct, frozen=True):
    """Reads of the peer's memory into memory of this host. latency_us: of the fastest read of 4 KiB; of a
    node, of its whole object."""

    memory: str
    transport: str
    gb_per_s: float
    latency_us: float
    bytes: int


class Peer(msgspec.Struct):
    """kind: "engine", "node", "master", or "" when it was not reached. chosen: by which transport host memory
    and memory of a card would go; "" for none."""

    address: str
    kind: str = ""
    name: str = ""
    findings: list[Finding] = []
    paths: list[PeerPath] = []
    chosen: dict[str, str] = {}
    rates: list[Rate] = []


def examine_peer(text: str, config: Config, *, has_card: bool = False) -> Peer:
    """Looks at the peer at ``text``. Never raises for what the peer does.

    has_card: whether this machine has a CUDA card: then the path of a card's memory is told, too, when the
    peer has registered none.
    """
    peer = Peer(text)
    try:
        address = parse_address(text, "PEER")
    except ConfigError as error:
        peer.findings.append(broken("address", str(error), "write host:port, as 10.0.0.7:7720"))
        return peer
    found = _resolve(address)
    if isinstance(found, Finding):
        peer.findings.append(found)
        return peer
    connected = _connect(address, found)
    if isinstance(connected, Finding):
        peer.findings.append(connected)
        return peer
    with connected:
        peer.findings.append(works("port", f"{address} accepts connections"))
        peer.findings.extend(_path_mtu(connected))
    _identify(peer, str(address), config)
    if not has_card and not any(rate.memory == DEVICE for rate in peer.rates):
        peer.chosen.pop(DEVICE, None)
    return peer


# ---- the port


def _resolve(address: Address) -> list[Place] | Finding:
    """(family, socket address) of each, within RESOLVE_S: a resolver that is cut off answers after 10 s."""
    answers: list[list[Place] | OSError] = []

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            answers.append([(int(row[0]), row[4]) for row in rows])
        except (OSError, UnicodeError) as error:
            answers.append(error if isinstance(error, OSError) else OSError(str(error)))

    thread = threading.Thread(target=ask, daemon=True, name="doctor-resolve")
    thread.start()
    thread.join(RESOLVE_S)
    remedy = "write the IP address, or correct /etc/hosts and the name servers in /etc/resolv.conf"
    if not answers:
        return broken("name", f"{address.host} is not resolved within {RESOLVE_S:g} s", remedy)
    (answer,) = answers
    if isinstance(answer, OSError):
        return broken("name", f"{address.host} is not resolved: {answer.strerror or answer}", remedy)
    return answer


def _connect(address: Address, places: list[Place]) -> socket.socket | Finding:
    """To the first place that accepts; all of them together have CONNECT_S."""
    end_s = time.monotonic() + CONNECT_S
    failure: OSError = TimeoutError()
    for number, (family, place) in enumerate(places):
        left_s = (end_s - time.monotonic()) / (len(places) - number)
        if left_s <= 0:
            break
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            one.settimeout(left_s)
            one.connect(place)
        except OSError as error:
            one.close()
            failure = error
            continue
        return one
    return _refusal(address, str(places[0][1][0]) if places else address.host, failure)


def _refusal(address: Address, ip: str, error: OSError) -> Finding:
    if isinstance(error, ConnectionRefusedError):
        what = f"{address.host} answers, but nothing listens at port {address.port}"
        return broken("port", what, PORT_REMEDY)
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        if _is_silent_neighbour(ip):
            what = f"{ip} is in a network of this host, and does not answer ARP: it is off or not connected"
            return broken("host", what, "start it, check its cable and its address")
        return broken(
            "firewall",
            f"{address} does not answer within {CONNECT_S:g} s, neither yes nor no: a firewall drops the "
            f"packets, or the host is off",
            f"allow TCP port {address.port} on the peer and on the way (for iptables: iptables -I INPUT -p "
            f"tcp --dport {address.port} -j ACCEPT; in a cloud, the security group)",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        what = f"there is no way to {ip} ({error.strerror})"
        return broken("route", what, f"ip route get {ip}; check addresses and gateway of both hosts")
    if error.errno in (errno.EACCES, errno.EPERM):
        what = f"this host's own firewall forbids connections to {address}"
        return broken("firewall", what, f"allow TCP to port {address.port} in the chain OUTPUT")
    what = f"{address} cannot be reached: {error.strerror or error}"
    return broken("port", what, "see ip address, ip route and the firewall's log")


def _is_silent_neighbour(ip: str) -> bool:
    """Whether the kernel asked the network for this address and got no answer."""
    with suppress(OSError):
        for line in Path("/proc/net/arp").read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 2 and fields[0] == ip:
                return fields[2] == "0x0"
    return False


def _path_mtu(connected: socket.socket) -> Iterator[Finding]:
    """What both sides said of the largest segment tells the smaller MTU of the two."""
    local = connected.getsockname()[0]
    found = _interface_of(local)
    if found is None:
        return
    name, mtu = found
    headers = HEADERS_V6 if connected.family == socket.AF_INET6 else HEADERS_V4
    segment = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    usable = segment + headers + TIMESTAMPS
    if usable + TIMESTAMPS < mtu:  # some peers have no timestamps
        yield weak(
            "path MTU",
            f"{name} sends packets of {mtu} bytes, and the peer or the way to it takes {usable}",
            f"set one MTU on both sides and on all switches between them (ip link set NET mtu {mtu})",
        )
    else:
        yield works("path MTU", f"{mtu} bytes, on both sides ({name})")


def _interface_of(local: str) -> tuple[str, int] | None:
    """(name, MTU) of the network device with that IPv4 address; None for loopback and for IPv6."""
    if ":" in local or local.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # as of one without an address
                if socket.inet_ntoa(fcntl.ioctl(asked, SIOCGIFADDR, request)[20:24]) == local:
                    (mtu,) = struct.unpack("i", fcntl.ioctl(asked, SIOCGIFMTU, request)[16:20])
                    return name, int(mtu)
    return None


# ---- what listens there


def _identify(peer: Peer, address: str, config: Config) -> None:
    try:
        token = config.client_token()
        tls = engine_tls(tls_settings_for(config) or config, listens=False)
        with TransferEngine("doctor", listen=None, token=token, timeout_s=ANSWER_S, tls=tls) as engine:
            segment = engine.open(address)
            _examine_engine(peer, engine, segment)
            return
    except Error as error:
        if not any(mark in str(error) for mark in OTHER_SERVICE):
            peer.findings.append(_handshake(error))
            return
    attempts: tuple[Callable[[Peer, str, bytes, Config], None], ...] = (_examine_master, _examine_node)
    for attempt in attempts:
        try:
            attempt(peer, address, token, config)
            return
        except Error as error:
            failure = error
            if not any(mark in str(error) for mark in OTHER_SERVICE):
                break
    peer.findings.append(_handshake(failure))


def _handshake(error: Error) -> Finding:
    if isinstance(error, AuthError) and "tenant" in str(error):
        return broken("tenant", str(error), "use the tenant default there")
    if "TLS" in str(error) or "certificate" in str(error):
        return broken(
            "TLS",
            str(error),
            "set cluster.tls_control and tls_data, and cluster.tls_ca, to the same on both sides; "
            "docs/security.md",
        )
    if isinstance(error, AuthError | ConfigError):
        return broken(
            "token",
            str(error),
            f"give both sides one token: the same file, named by {paths.TOKEN_FILE_VARIABLE} or --token-file",
        )
    if isinstance(error, Timeout):
        what = f"{error}: the process there hangs, or it is not Moonpool"
        return broken("handshake", what, "look at the peer's process and its log")
    if isinstance(error, ProtocolError):
        remedy = "give the port of an engine, a node or a master, of an adjacent release"
        return broken("handshake", str(error), remedy)
    return broken("handshake", str(error), "look at the peer's log")


def _examine_engine(peer: Peer, engine: TransferEngine, segment: Segment) -> None:
    peer.kind, peer.name = "engine", segment.name
    peer.paths = engine.paths(segment)
    peer.findings.append(works("handshake", f"transfer engine {segment.name!r}, the token is right"))
    for memory, kinds in ((HOST, ("host", "host_arena")), (DEVICE, ("device",))):
        of_kind = [region for region in segment.regions if region.kind in kinds]
        region = max(of_kind, key=lambda one: one.length, default=None)
        peer.chosen[memory] = region.transport if region else _chosen(peer.paths, kinds[0])
        if region is not None and not _add_rate(peer, engine, segment, region, memory):
            break  # each further read would wait as long
    if not segment.regions:
        peer.findings.append(works("rate", "not measured: the peer has registered no memory"))


def _chosen(rows: list[PeerPath], kind: str) -> str:
    """The first transport that reaches memory of that kind."""
    return next((row.transport for row in rows if row.path and kind not in row.unreached), "")


def _add_rate(
    peer: Peer, engine: TransferEngine, segment: Segment, region: RemoteRegion, memory: str
) -> bool:
    """False, and a finding, when it cannot be read."""
    try:
        with engine.allocate(PIECE_MAX) as local:
            peer.rates.append(_measure(engine, segment, region, local, memory))
    except Error as error:
        remedy = "look at the peer's log, and at the paths below"
        peer.findings.append(broken("rate", f"a read of the peer's {memory} memory failed: {error}", remedy))
        return False
    return True


def _measure(
    engine: TransferEngine, segment: Segment, region: RemoteRegion, local: Region, memory: str
) -> Rate:
    small = min(LATENCY_BYTES, region.length)
    engine.read(segment, local.address, region.address, small)  # the first one maps or connects
    end_s = time.monotonic() + MEASURE_S
    fastest_s = float("inf")
    for _ in range(LATENCY_READS):
        began_s = time.perf_counter()
        engine.read(segment, local.address, region.address, small)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
        if time.monotonic() > end_s:
            break
    piece, at, moved, busy_s, best = PIECE_MIN, 0, 0, 0.0, 0.0
    while moved < BYTES_MAX:
        length = min(piece, region.length - at)
        began_s = time.perf_counter()
        engine.read(segment, local.address, region.address + at, length)
        took_s = time.perf_counter() - began_s
        moved, busy_s = moved + length, busy_s + took_s
        best = max(best, length / took_s)
        at = (at + length) % region.length
        if took_s < PIECE_GOOD_S:
            piece = min(2 * piece, PIECE_MAX)
        if time.monotonic() > end_s:
            break
    return Rate(memory, region.transport, best / 1e9, fastest_s * 1e6, moved)


def _examine_master(peer: Peer, address: str, token: bytes, config: Config) -> None:
    cluster = read_cluster(address, token, tls=control_client_for(config), timeout_s=ANSWER_S)
    peer.kind = "master"
    silent = [f"{node.name} for {node.silent_s:.0f} s" for node in cluster.nodes if node.state != "alive"]
    peer.findings.append(works("handshake", f"master of {len(cluster.nodes)} nodes, the token is right"))
    if silent:
        what = f"nodes that the master does not hear: {', '.join(silent)}"
        peer.findings.append(weak("nodes", what, "moonpool status; look at those hosts"))


def _examine_node(peer: Peer, address: str, token: bytes, config: Config) -> None:
    """Raises a moonpool Error when it is none."""
    tls = pool_tls_for(config)
    with Store(f"tcp://{address}", namespace=NAMESPACE, token=token, tls=tls, timeout_s=ANSWER_S) as store:
        peer.kind = "node"
        peer.paths = [PeerPath("tcp", f"tcp {address}", "", {})]
        peer.chosen = {HOST: "tcp"}
        peer.findings.append(works("handshake", "node of the pool, the token is right"))
        key, data = b"doctor-" + secrets.token_hex(8).encode(), bytes(OBJECT_BYTES)
        put = store.put(key, data, node=address)
        if put.status is not PutStatus.STORED:
            remedy = "moonpool status: the arena may be full of pinned objects"
            peer.findings.append(weak("rate", f"the node did not take an object of 1 MiB: {put}", remedy))
            return
        try:
            peer.rates.append(_measure_gets(store, key))
        finally:
            with suppress(Error):
                store.remove(key)


def _measure_gets(store: Store, key: bytes) -> Rate:
    into = bytearray(OBJECT_BYTES)
    end_s, fastest_s, moved = time.monotonic() + MEASURE_S, float("inf"), 0
    while moved < BYTES_MAX and time.monotonic() < end_s:
        began_s = time.perf_counter()
        if store.get(key, into) is None:
            break  # evicted
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
        moved += OBJECT_BYTES
    return Rate(HOST, "tcp", OBJECT_BYTES / fastest_s / 1e9, fastest_s * 1e6, moved)
