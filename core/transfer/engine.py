"""``TransferEngine``: moves bytes between the memory of processes, on this host and on others.

    with moonpool.TransferEngine() as engine:
        region = engine.allocate(1 << 20)
        peer = engine.open("10.0.0.7:41234")
        engine.read(peer, region, peer.at(0), 4096)

An engine owns one listening port, a few threads and the memory that was registered with it. A peer is found
by its address and a handshake, with nothing else running. Reads and writes are one-sided: the peer's program
takes no part. Which transport moves a slice (memory of the same process, shared memory, TCP) is the engine's
choice; ``Segment.regions`` shows it. docs/transfer.md is the guide.

Calls block and release the GIL; they may come from any thread. No call waits longer than its deadline without
progress. ``AsyncTransferEngine`` has the same verbs for asyncio.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

from moonpool.core.config import paths
from moonpool.core.config.cluster_token import check_token_length
from moonpool.core.errors import Closed, ConfigError, InvalidArgument
from moonpool.core.service.addresses import parse_address
from moonpool.core.transfer.metadata.backend import Metadata
from moonpool.core.transfer.metadata.naming import Naming, engine_name, store_of
from moonpool.core.transfer.outside import library_paths
from moonpool.core.transfer.region import Region, RegionTable, check_text
from moonpool.core.transfer.segment import Segment
from moonpool.core.transfer.transfer import WAIT_PIECE_S, Abandoned, Columns, Transfer, columns_of, one_slice
from moonpool.core.transfer.types import (
    Batch,
    Column,
    Local,
    Notification,
    PeerPath,
    PeerRail,
    Slice,
    TransferOptions,
)

if TYPE_CHECKING:
    from moonpool import _native
    from moonpool.core.service.data_tls import EngineTls

_LOOPBACK = "127.0.0.1:0"
ABANDONED_LOOK_S = 0.01


class EngineFacts:
    """An engine's description of itself, for the blocking facade and for asyncio."""

    _native: _native.Engine
    _naming: Naming | None

    @property
    def name(self) -> str:
        """The name that other engines open as a segment."""
        return self._native.name

    @property
    def addresses(self) -> list[str]:
        """Where peers open it, "ip:port" each, with the real ports."""
        return self._native.addresses

    @property
    def segment_id(self) -> bytes:
        """16 random bytes that no other engine has."""
        return self._native.segment_id

    def transports(self) -> dict[str, str]:
        """Each transport, best first -> "" when it works here, else a sentence with the reason."""
        return self._native.transports()

    def paths(self, segment: Segment) -> list[PeerPath]:
        """How each transport reaches that peer, or why it does not, and what it has cost, in the order in
        which a transfer of small slices tries them. Asks nothing of the peer."""
        return [_path_of(row) for row in self._native.paths(segment.handle)]

    def metrics(self) -> dict[str, int]:
        """Counters (``*_total``) and gauges by name; docs/transfer.md describes them."""
        return self._native.metrics() | ({} if self._naming is None else self._naming.metrics())

    @property
    def publication_problem(self) -> str:
        """ "" while this engine's name is published, or where it is to be published nowhere; else why it is
        not, in one sentence. The engine goes on trying."""
        return "" if self._naming is None else self._naming.problem

    def has_abandoned_copies(self) -> bool:
        """Whether a card may still make copies of a transfer that failed, as when it hangs. Until it does
        not, the memory of the card that such a transfer was to write must not be used again. Never waits."""
        return self._native.has_abandoned_copies()


class TransferEngine(EngineFacts):
    """One process's end of the transfers: its port, threads and registered memory.

    name:       what peers call this engine; default: host and process id.
    listen:     "host:port" or several; port 0 is a free one, see ``addresses``. None: no peer can open this
                engine, but it can open others. Any address but a loopback one needs a token that was chosen,
                of 16 bytes or more.
    token:      the cluster token; None: the configured one (MOONPOOL_CLUSTER_TOKEN or
                MOONPOOL_CLUSTER_TOKEN_FILE), else the one that this user's processes on this host share.
    tenant:     only engines of the same tenant reach each other's memory.
    transports: which may be used, of "loopback", "shm", "cuda_ipc", "rdma", "efa", "tcp", "file" and
                "cufile"; None: all that work here.
    outside_transports: libraries with a transport each that is built outside of Moonpool, by their paths, or
                by the names of entry points in the group "moonpool.transports" of installed packages.
    rdma_devices: names of the RDMA devices to use, as "mlx5_0"; (): all that work here.
    rdma_library: libibverbs, where it is not the system's, by name or path.
    efa_provider: the provider of libfabric for "efa"; another than "efa", as "tcp", is for tests, and both
                engines need it.
    efa_devices: names of the devices that "efa" uses, as "rdmap0s6"; (): all that work here.
    interface:  the network interface for connections to peers; "": as the system routes.
    host_id:    what names this host; "": its boot id. Engines with the same one try shared memory.
    metadata:   the store in which engines find each other by name, as "etcd://h1:2379", or a ``Metadata``;
                "": none, peers are opened by address. None: the configured one (cluster.metadata).
    advertise:  "host" or "host:port" that is published there; "": the addresses that this engine listens on.
    io_threads: threads for TCP. connections_per_peer: TCP connections to each peer.
    timeout_s:  the longest wait without progress of every call that gives no ``deadline_s``.
    tls:        of connections by TCP, as core.service.data_tls.engine_tls makes it: with it this engine opens
                no other, and is opened by none, in plain. None: by the configuration (cluster.tls_data), else
                as the node of this user says.

    Raises ConfigError for an address in use or not allowed, for TLS without a certificate, and for a name
    that another engine has published; InvalidArgument for an RDMA or EFA device that this host has not, with
    the list of those that it has; AuthError where the store of names refuses us. After ``close()`` every call
    raises Closed; in a child of fork() every call raises Forked.
    """

    def __init__(
        self,
        name: str = "",
        *,
        listen: str | Sequence[str] | None = _LOOPBACK,
        token: bytes | None = None,
        tenant: str = "default",
        transports: Sequence[str] | None = None,
        outside_transports: Sequence[str | os.PathLike[str]] = (),
        rdma_devices: Sequence[str] = (),
        rdma_library: str = "",
        efa_provider: str = "efa",
        efa_devices: Sequence[str] = (),
        interface: str = "",
        host_id: str = "",
        metadata: str | Metadata | None = None,
        advertise: str = "",
        io_threads: int = 2,
        connections_per_peer: int = 2,
        timeout_s: float = 5.0,
        tls: EngineTls | None = None,
    ) -> None:
        store = store_of(metadata, token)
        self._native = native = open_engine(
            engine_name(name, store),
            listen=listen,
            token=token,
            tenant=tenant,
            transports=transports,
            outside_transports=outside_transports,
            rdma_devices=rdma_devices,
            rdma_library=rdma_library,
            efa_provider=efa_provider,
            efa_devices=efa_devices,
            interface=interface,
            host_id=host_id,
            io_threads=io_threads,
            connections_per_peer=connections_per_peer,
            timeout_s=timeout_s,
            tls=tls,
        )
        self._naming: Naming = name_engine(native, store, tenant=tenant, host_id=host_id, advertise=advertise)
        self._abandoned = Abandoned(native)
        self._regions = RegionTable(native)
        self._closed = False
        # Looked up once: with 4 KiB over shared memory each attribute counts.
        self._transfer = native.transfer

    def wait_for_abandoned_copies(self) -> None:
        """After a transfer that failed: returns when no card makes copies of it any more. A card that hangs
        keeps the caller waiting until this engine is closed."""
        with suppress(Closed):
            while self.has_abandoned_copies():
                time.sleep(ABANDONED_LOOK_S)

    def close(self) -> bool:
        """Cancels all transfers, deregisters all memory and disconnects all peers -> whether nothing accesses
        that memory any more.

        False: a peer that was stopped in the middle of a copy, or a device, may. The engine keeps the memory
        alive, and a further close() waits again.
        """
        self._closed = True
        self._naming.close()
        return self._regions.close_all(may_free=self._native.close())

    def __del__(self) -> None:
        # Not set: the constructor raised, and no native engine exists.
        if not getattr(self, "_closed", True):
            self.close()  # before the memory is freed

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def metrics(self) -> dict[str, int]:
        """See EngineFacts.metrics."""
        if self._closed:
            raise Closed("this engine is closed", operation="metrics")
        return super().metrics()

    # ---- memory

    def register(self, memory: Any, location: str = "") -> Region:
        """Makes memory usable as ``local`` here and reachable for peers.

        memory:   a writable bytes-like object, a contiguous tensor or array (numpy, torch, CuPy, DLPack) in
                  memory of the host or of a CUDA card, or (address, length). It is held, not copied.
        location: a label of at most 64 bytes, shown to peers; no transport reads it. "": "cpu:0", or "cuda:"
                  and the card's ordinal in this process.

        Memory of a card: what the engine's streams have queued is not waited for. Call it, and ``write`` from
        it, when the work that writes there has ended (``torch.cuda.current_stream().synchronize()``).

        Raises InvalidArgument for other objects, for a range that overlaps a registered one, and for an
        address that is no memory of this process; Unavailable where the card cannot be used.
        """
        return self._regions.register(memory, location)

    def allocate(self, nbytes: int, location: str = "cpu:0") -> Region:
        """New registered memory, zeros, page aligned, which engines on this host map: the fastest kind.

        location: "node:2": of that NUMA node, which may have no CPU; "dax:/dev/dax0.0": of that DAX device;
                  any other is a label.

        Raises InvalidArgument for a size that cannot be, TooLarge when the system has not that much memory.
        """
        return self._regions.allocate(nbytes, location)

    # ---- peers

    def open(self, name: str) -> Segment:
        """A peer's memory, by handshake with its engine: at "host:port", or, with ``metadata``, of this name;
        or a file, by "file:///path".

        A name is looked up in the store; the answer is remembered, and holds while the store is away.

        Raises Unavailable when no process listens there or no engine has the name, AuthError for another
        token or tenant, Timeout when it says nothing within ``timeout_s``, ProtocolError when it is no
        engine.
        """
        return self._naming.open(name)

    def open_file(
        self, path: str | os.PathLike[str], *, size: int | None = None, writable: bool = True
    ) -> Segment:
        """A file or a block device of this host, as a segment: its one region is the file, ``at(offset)`` the
        byte at that offset. No other process takes part.

        size:     bytes; the file is made when there is none, and made longer (by a hole) when it is shorter.
                  None: it is there, and stays as long as it is.
        writable: False: writes are refused. True, and the system lets it only be read: each write fails with
                  the reason.

        ``open("file:///path")`` is the same without options. Done means that readers on this host find the
        bytes in the file, not that they survive a power failure. Multiples of 4,096 bytes at such offsets go
        past the page cache; other ranges cost more. Files take no messages.

        Raises InvalidArgument with the system's reason, or for what is neither a file nor a block device;
        TooLarge for a device that is shorter than ``size``.
        """
        return Segment(self._native, open_file(self._native, path, size, writable))

    # ---- moving bytes

    def read(
        self,
        segment: Segment,
        local: Local | Column,
        remote: int | Column,
        length: int | Column | None = None,
        **options: Unpack[TransferOptions],
    ) -> int:
        """Copies ``length`` bytes from the peer's address ``remote`` to ``local``; returns how many.

        local:  an address in registered memory, a Region, or an object whose memory is registered; without
                ``length`` all of it.
        remote: an address in the peer; ``segment.at(offset)`` makes one.
        With lists (or numpy arrays of uint64) of addresses: many slices in one call; ``length`` is then a
        list, or one for all.

        options and errors: as of ``transfer``.
        """
        if type(local) is int and type(length) is int:
            if not options:  # an empty ** costs as well
                return self._transfer(segment.handle, "r", local, remote, length)
            return self._transfer(segment.handle, "r", local, remote, length, **options)
        return self._run(slices_of(segment, "r", local, remote, length), **options)

    def write(
        self,
        segment: Segment,
        local: Local | Column,
        remote: int | Column,
        length: int | Column | None = None,
        **options: Unpack[TransferOptions],
    ) -> int:
        """Copies ``length`` bytes from ``local`` to the peer's address ``remote``; arguments as of ``read``.

        When it returns, the bytes are in the peer's memory.
        """
        if type(local) is int and type(length) is int:
            if not options:  # an empty ** costs as well
                return self._transfer(segment.handle, "w", local, remote, length)
            return self._transfer(segment.handle, "w", local, remote, length, **options)
        return self._run(slices_of(segment, "w", local, remote, length), **options)

    def transfer(self, slices: Batch | Sequence[Slice], **options: Unpack[TransferOptions]) -> int:
        """Moves all slices, reads and writes of any peers mixed; returns their bytes once all are done.

        slices:  ``Slice``s, or a ``Batch`` of columns, which costs less. They run in no order.
        options: ``priority``, ``deadline_s`` and ``notify``, see ``TransferOptions``.

        Raises TransferError when a slice failed on every path that there is: it names the peer, the path, the
        bytes done and the cause, and has the state of each slice. Raises InvalidArgument, and moves nothing,
        for local memory that is not registered.
        """
        return self._run(columns_of(slices), **options)

    def submit(self, slices: Batch | Sequence[Slice], **options: Unpack[TransferOptions]) -> Transfer:
        """Starts what ``transfer`` does, and returns at once.

        Raises TooLarge when too much waits already, InvalidArgument as ``transfer`` does. The Transfer
        reports later errors.
        """
        columns = columns_of(slices)
        if self._abandoned.tickets:
            self._abandoned.sweep()
        ticket = submit(self._native, columns, **options)
        return Transfer(self._native, ticket, columns.asked, self._abandoned)

    # ---- peers that are kept out

    def shut_out(self, segment_id: bytes) -> None:
        """Keeps the engine with that ``segment_id`` out of this one's memory, over every path: when it
        returns, no byte lands of what that engine had under way, and its transfers to this one fail.

        It lasts until ``admit``. A new engine of that process has another ``segment_id``. Raises Timeout when
        the peer was stopped in the middle of a copy: it begins no other, and a further call waits again.
        """
        self._native.shut_out(segment_id)

    def admit(self, segment_id: bytes) -> None:
        """Takes back an engine that was shut out. Until it opens this one anew, TCP alone reaches it."""
        self._native.admit(segment_id)

    # ---- messages

    def notify(self, segment: Segment, message: bytes) -> None:
        """Sends a message to a peer, which finds it in ``notifications()``.

        Raises Unavailable, Timeout, or TooLarge for a message over the limit.
        """
        self._native.notify(segment.handle, message)

    def notifications(self, timeout_s: float = 0.0) -> list[Notification]:
        """The messages that arrived since the last call, in their order; waits at most ``timeout_s`` for the
        first one.
        """
        give_up_s = time.monotonic() + timeout_s
        while True:
            found = self._native.notifications()
            left_s = give_up_s - time.monotonic()
            if found or left_s <= 0:
                return [Notification(*row) for row in found]
            # in pieces: another thread may take the messages, or close the engine
            poll = select.poll()  # select() knows no descriptor above 1,023
            poll.register(self._native.eventfd, select.POLLIN)
            poll.poll(1000 * min(left_s, WAIT_PIECE_S))
            self._abandoned.sweep()  # empties the eventfd too

    def _run(self, columns: Columns, **options: Unpack[TransferOptions]) -> int:
        segments, ops, local, remote, lengths = columns
        return self._transfer(segments, ops, local, remote, lengths, **options)


def open_engine(
    name: str,
    *,
    listen: str | Sequence[str] | None,
    token: bytes | None,
    transports: Sequence[str] | None,
    outside_transports: Sequence[str | os.PathLike[str]],
    rdma_devices: Sequence[str],
    efa_devices: Sequence[str],
    tls: EngineTls | None,
    **options: Any,
) -> _native.Engine:
    """The native engine of both facades."""
    from moonpool import _native
    from moonpool.core.service.data_tls import configured_engine_tls

    if not options["timeout_s"] > 0:  # NaN is not either
        raise InvalidArgument(f"timeout_s must be above 0, not {options['timeout_s']}", operation="engine")
    for what in ("tenant", "host_id", "interface", "rdma_library", "efa_provider"):
        check_text(options[what], f"the {what} of an engine")
    check_text(name, "the name of an engine")
    own_rdma, own_efa = _listed(rdma_devices), _listed(efa_devices)
    for kind, devices in (("RDMA", own_rdma), ("EFA", own_efa)):
        for device in devices:
            check_text(device, f"the name of an {kind} device")
    addresses = [] if listen is None else [listen] if isinstance(listen, str) else list(listen)
    for address in addresses:
        _check_listen(address, token)
    if tls is None:
        tls = configured_engine_tls(listens=bool(addresses))
    native = _native.Engine(
        name,
        addresses,
        token or paths.read_or_create_token(),
        transports=None if transports is None else list(transports),
        outside_transports=library_paths(outside_transports),
        rdma_devices=own_rdma,
        efa_devices=own_efa,
        tls_server=tls.server,
        tls_client=tls.client,
        **options,
    )
    if (notes := native.notes) is not None:
        from moonpool.core.transfer.engine_notes import log_notes

        log_notes(notes)
    return native


def _path_of(row: Any) -> PeerPath:
    cells = [*row[:-1], tuple(PeerRail(*rail) for rail in row[-1])]
    return PeerPath(*cells)


def _listed(names: Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def name_engine(
    native: _native.Engine, store: Metadata | None, *, tenant: str, host_id: str, advertise: str
) -> Naming:
    """The naming of both facades; the engine is closed when it fails."""
    try:
        return Naming(native, store, tenant=tenant, host_id=host_id, advertise=advertise)
    except BaseException:
        native.close()
        raise


def open_file(native: _native.Engine, path: str | os.PathLike[str], size: int | None, writable: bool) -> int:
    """See TransferEngine.open_file; returns the segment's handle."""
    if size is not None and not 0 <= size < 1 << 62:
        raise InvalidArgument(f"no file has {size} bytes", operation="open_file")
    name = os.fsdecode(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"the path {name!r} is not UTF-8", operation="open_file") from None
    return native.open_file(os.path.abspath(name) if name else "", size=size, writable=writable)


def _check_listen(address: str, token: bytes | None) -> None:
    if parse_address(address, "listen").is_loopback:
        return
    chosen = token or any(name in os.environ for name in (paths.TOKEN_VARIABLE, paths.TOKEN_FILE_VARIABLE))
    if not chosen:
        raise ConfigError(
            f"listen = {address} can be reached from other hosts, which needs a cluster token: set "
            f"{paths.TOKEN_VARIABLE} or {paths.TOKEN_FILE_VARIABLE}, or listen on {_LOOPBACK}",
            operation="engine",
            key="listen",
            peer=address,
        )
    check_token_length(token or paths.read_or_create_token(), f"listen = {address}", "listen")


def slices_of(segment: Segment, op: str, local: Any, remote: Any, length: Any) -> Columns:
    """What ``read`` and ``write`` were given: lists of addresses, or one slice."""
    if hasattr(remote, "__len__"):
        return columns_of(Batch("read" if op == "r" else "write", segment, local, remote, length))
    return one_slice(segment, op, local, remote, length)


def submit(native: _native.Engine, columns: Columns, **options: Unpack[TransferOptions]) -> int:
    """Starts a transfer; returns its ticket."""
    segments, ops, local, remote, lengths = columns
    return native.submit(segments, ops, local, remote, lengths, **options)
