"""``mooncake.engine``: TransferEngine, which moves bytes between registered memory of processes.

    engine = TransferEngine()
    engine.initialize("10.0.0.2", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(address, length)
    engine.transfer_sync_write("10.0.0.3:41234", address, peer_address, length)

A peer is named by its session id, "host:port" with the port of its get_rpc_port(), or where engines have a
metadata server by the local_hostname that it was given. Codes are 0 and below; the
sentence of what went wrong is in the log.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import msgspec

import moonpool
from moonpool.core import topology
from moonpool.core.errors import Closed, Error, InvalidArgument, TransferError, Unavailable
from moonpool.core.service.addresses import parse_address
from moonpool.core.transfer.peers import Peers
from moonpool.core.transfer.region import Region
from moonpool.core.transfer.transfer import Transfer
from moonpool.core.transfer.types import Batch, TransferState

from ._codes import code_of, coded, logger
from ._hosts import address_of, is_ip, session_of
from ._memory import number, same_length
from ._metadata import WITHOUT_SCHEME, store_named
from ._protocols import HOST_MEMORY, engine_options, managed_memory
from ._rpc import ReceivedData, ReceivedTensor, RpcInterface, create_rpc_client, create_rpc_server
from ._shared_segment import SharedSegment

FAILED = -1
NOT_REGISTERED = -3
OVERLAPPED = -7
NO_PEER = -102
NO_TRANSFER = 0  # what submitting methods return when nothing was started
TRANSFERS_MAX = 65_536

CoroRPCInterface = RpcInterface
SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False


class TransferOpcode(IntEnum):
    """The direction of a transfer, as the initiator sees it."""

    Read = 0
    Write = 1


Read, Write = TransferOpcode.Read, TransferOpcode.Write
Verb = Literal["read", "write"]
_VERB: dict[object, Verb] = {Read: "read", Write: "write"}


class TransferNotify:
    """A message that arrives after the bytes of its transfer."""

    __slots__ = ("msg", "name")

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg


class InnerTransferEngine:
    """What get_engine() gives, for the store's ``engine=``."""

    Read = TransferOpcode.Read
    Write = TransferOpcode.Write

    def __init__(self, engine: moonpool.TransferEngine) -> None:
        self.engine = engine


class TransferEngine:
    """One process's engine. initialize() may be tried again, and does nothing once it has worked.

    Before it, and after the end of the process's fork, methods return a code and crash nothing.
    """

    def __init__(self) -> None:
        self._engine: moonpool.TransferEngine | None = None
        self._regions: dict[int, Region] = {}
        self._managed: dict[int, Region] = {}
        self._managed_location = HOST_MEMORY
        self._peers = Peers(lambda name: self._open().open(session_of(name)))
        self._transfers: dict[int, tuple[Transfer, str]] = {}  # and the peer's session id
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    # ---- this engine and its address

    @coded("initialize", floor=FAILED)
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /
    ) -> int:
        """0; FAILED with a sentence in the log when peers could not reach this engine.

        local_hostname:  the address that peers use, with a port or without ("host:port" listens there).
        metadata_server: "P2PHANDSHAKE": peers open "host:port". Else a store in which this engine publishes
                         local_hostname as its name, and looks others up: "http://host:port/metadata",
                         "etcd://host:2379", "redis://:password@host:6379/0"; without a scheme it is etcd.
        protocol:        what moves bytes between hosts; TCP where that is not available, with a warning.
                         "cxl": where managed buffers lie; "nvmeof": names of the form "file:///path" are
                         segments.
        device_name:     "a,b", of that protocol; "": all. With "cxl" one DAX device, "/dev/dax0.0"; "": that
                         of MC_CXL_DEV_PATH.
        """
        return self._initialize(local_hostname, metadata_server, protocol, device_name)

    def _initialize(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        kind: str = WITHOUT_SCHEME,
    ) -> int:
        for text in (local_hostname, metadata_server, protocol, device_name, kind):
            if not isinstance(text, str):
                raise TypeError(f"initialize: expected a str, got {text!r:.80}")
        if self._engine is None:
            host, store = local_hostname or "127.0.0.1", store_named(metadata_server, kind)
            address = address_of(host, "local_hostname")
            is_name = not is_ip(address.host) and address.host != "localhost"
            self._managed_location = managed_memory(protocol, device_name)
            self._engine = moonpool.TransferEngine(
                session_of(host) if store else "",
                listen=str(address),
                metadata=store,
                advertise=address.host if is_name else "",
                **engine_options(protocol, device_name),
            )
        return 0

    @coded("initialize", floor=FAILED)
    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,
        /,
    ) -> int:
        """As initialize(). metadata_type: of a metadata_server without a scheme: "http", "etcd", "redis"."""
        return self._initialize(local_hostname, metadata_server, protocol, device_name, metadata_type)

    def get_rpc_port(self) -> int:
        """The port of session ids; 0 before initialize()."""
        return 0 if self._engine is None else parse_address(self._engine.addresses[0], "listen").port

    def get_engine(self) -> InnerTransferEngine | None:
        """The engine for the ``engine=`` of a store; None before initialize()."""
        return None if self._engine is None else InnerTransferEngine(self._engine)

    def get_engine_ptr(self) -> int:
        """0: the engine is no object of C++ that others could call."""
        return 0

    def get_local_topology(self, device_name: str | None = None) -> str:
        """The matrix of this machine as JSON: for each memory ("cpu:0" of NUMA node 0, "cuda:0" of a GPU, in
        the order of PCI addresses) the names of the NICs near it, and of the others.

        device_name: names with commas between them, of which alone the matrix is made; none: all.
        """
        if not isinstance(device_name, str | None):
            raise TypeError(f"get_local_topology: expected a str, got {device_name!r:.80}")
        wanted = {name.strip() for name in (device_name or "").split(",") if name.strip()}
        rows: dict[str, list[list[str]]] = {}
        for memory, near in topology.matrix(topology.read()).items():
            nics = [row for row in near if not wanted or row.nic in wanted]
            nearest = nics[0].rank if nics else None
            preferred = [row.nic for row in nics if row.rank == nearest]
            others = [row.nic for row in nics if row.rank != nearest]
            rows[memory.replace("gpu", "cuda:")] = [preferred, others]
        return json.dumps(rows)

    # ---- memory

    @coded("register_memory", floor=FAILED)
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """OVERLAPPED for memory of which some is registered already."""
        return self._register(buffer_addr, capacity, location)

    @coded("unregister_memory", floor=FAILED)
    def unregister_memory(self, buffer_addr: int, /) -> int:
        """When it returns no transfer touches the memory any more. NOT_REGISTERED for other addresses."""
        return self._unregister(number(buffer_addr))

    @coded("batch_register_memory", floor=FAILED)
    def batch_register_memory(
        self, buffer_addresses: list[int], capacities: list[int], location: str = "*"
    ) -> int:
        """All, or none and the first code."""
        same_length(buffer_addresses, capacities)
        done: list[int] = []
        code = 0
        try:
            for address, length in zip(buffer_addresses, capacities, strict=True):
                if code := self._register(address, length, location):
                    break
                done.append(address)
        except BaseException:
            self._unregister_all(done)
            raise
        if code:
            self._unregister_all(done)
        return code

    def batch_unregister_memory(self, buffer_addresses: list[int], /) -> int:
        """All that there are; the first code that is not 0."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), 0)

    def _register(self, address: int, length: int, location: str) -> int:
        engine = self._open()
        address, length = number(address), number(length)
        if any(
            start < address + length and address < start + one.length for start, one in self._all_regions()
        ):
            return OVERLAPPED
        region = engine.register((address, length), "" if location == "*" else location)
        with self._lock:
            self._regions[address] = region
        return 0

    def _unregister(self, address: int) -> int:
        """A Timeout leaves it registered, so that it can be done again."""
        region = self._regions.get(address)
        if region is None:
            return NOT_REGISTERED
        region.close()
        self._drop(self._regions, address, region)
        return 0

    def _unregister_all(self, addresses: Sequence[int]) -> None:
        for one in addresses:
            try:
                self._unregister(one)
            except Error as error:
                code_of(error, "batch_register_memory")

    def _drop(self, regions: dict[int, Region], address: int, region: Region) -> None:
        """Forgets the region, unless another one was registered there meanwhile."""
        with self._lock:
            if regions.get(address) is region:
                del regions[address]

    def _all_regions(self) -> list[tuple[int, Region]]:
        with self._lock:
            return [*self._regions.items(), *self._managed.items()]

    @coded("allocate_managed_buffer", floor=0)
    def allocate_managed_buffer(self, length: int, /) -> int:
        """The address of new registered memory, zeros; 0 when there is none. With the protocol "cxl" it lies
        on the DAX device."""
        region = self._open().allocate(number(length), self._managed_location)
        with self._lock:
            self._managed[region.address] = region
        return region.address

    @coded("free_managed_buffer", floor=FAILED)
    def free_managed_buffer(self, address: int, length: int, /) -> int:
        """FAILED for what allocate_managed_buffer() did not give."""
        region = self._managed.get(number(address))
        if region is None:
            raise InvalidArgument(f"no managed buffer is at {address:#x}")
        region.close()
        self._drop(self._managed, address, region)
        return 0

    @coded("write_bytes_to_buffer", floor=FAILED)
    def write_bytes_to_buffer(self, address: int, data: str | bytes, length: int, /) -> int:
        """The first ``length`` bytes of ``data`` into memory of this engine; FAILED outside of it."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if length > len(raw):
            raise InvalidArgument(f"{len(raw)} bytes are no {length}")
        self._inside(number(address), number(length))[:] = raw[:length]
        return 0

    def read_bytes_from_buffer(self, address: int, length: int, /) -> bytes:
        """The bytes of registered memory of this engine. Raises InvalidArgument outside of it."""
        return bytes(self._inside(number(address), number(length)))

    def _inside(self, address: int, length: int) -> memoryview:
        from ._tensors import memory_at

        if any(
            start <= address and address + length <= start + one.length for start, one in self._all_regions()
        ):
            return memory_at(address, length)
        raise InvalidArgument(f"{length} bytes at {address:#x} are not inside of registered memory")

    # ---- peers

    @coded("send_probe", floor=FAILED)
    def send_probe(self, peer_server_name: str) -> int:
        """0 when the peer answers now."""
        try:
            self._peers.get(peer_server_name).refresh()
        except Error as error:
            self._peers.forget(peer_server_name)
            if isinstance(error, Closed):
                raise
            code_of(error, "send_probe")
            return NO_PEER
        return 0

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Opens the peer, which is what there is to prepare."""
        return self.send_probe(segment_name)

    @coded("get_first_buffer_address", floor=0)
    def get_first_buffer_address(self, segment_name: str, /) -> int:
        """The address of the peer's first region; 0 without one, or when the peer is gone."""
        peer = self._peers.get(segment_name)
        peer.refresh()
        return peer.regions[0].address if peer.regions else 0

    # ---- moving bytes, waiting for them

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Writes ``length`` bytes at ``buffer`` to the peer's memory and waits: 0, or FAILED."""
        return self._one(Write, target_hostname, buffer, peer_buffer_address, length)

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Reads ``length`` bytes of the peer's memory to ``buffer`` and waits: 0, or FAILED."""
        return self._one(Read, target_hostname, buffer, peer_buffer_address, length)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Moves ``length`` bytes as ``opcode`` says and waits: 0, or FAILED.

        notify: arrives after the bytes; with length 0 it is sent alone.
        """
        return self._one(opcode, target_hostname, buffer, peer_buffer_address, length, notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """Writes slices, row i of the three lists each, and waits for all: 0, or FAILED."""
        return self._many(Write, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """Reads slices, row i of the three lists each, and waits for all: 0, or FAILED."""
        return self._many(Read, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Moves slices, row i of the three lists each, as ``opcode`` says and waits: 0, or FAILED.

        notify: arrives after the bytes.
        """
        return self._many(opcode, target_hostname, buffers, peer_buffer_addresses, lengths, notify)

    @coded("transfer", floor=FAILED)
    def _one(
        self,
        opcode: TransferOpcode,
        target: str,
        buffer: int,
        remote: int,
        length: int,
        notify: TransferNotify | None = None,
    ) -> int:
        buffer, remote, length = number(buffer), number(remote), number(length)
        verb = verb_of(opcode)
        try:
            peer = self._peers.get(target)
            message = None if notify is None else packed(notify)
            if length:
                move = self._open().write if verb == "write" else self._open().read
                move(peer, buffer, remote, length, notify=message)
            elif message is not None:
                self._open().notify(peer, message)
            return 0
        except (TransferError, Unavailable):
            self._peers.forget_if_gone(target)
            self._open().wait_for_abandoned_copies()  # the caller may use the memory again
            raise

    @coded("transfer", floor=FAILED)
    def _many(
        self,
        opcode: TransferOpcode,
        target: str,
        buffers: Sequence[int],
        remotes: Sequence[int],
        lengths: Sequence[int],
        notify: TransferNotify | None = None,
    ) -> int:
        verb = verb_of(opcode)
        try:
            peer = self._peers.get(target)
            message = None if notify is None else packed(notify)
            same_length(buffers, remotes, lengths)
            try:
                if len(lengths):
                    self._open().transfer(Batch(verb, peer, buffers, remotes, lengths), notify=message)
                    return 0
            except InvalidArgument:  # the address of no bytes may be anything, a number any kind of number
                columns = slices(buffers, remotes, lengths)
                if columns[2]:
                    self._open().transfer(Batch(verb, peer, *columns), notify=message)
                    return 0
            if message is not None:
                self._open().notify(peer, message)
            return 0
        except (TransferError, Unavailable):
            self._peers.forget_if_gone(target)
            self._open().wait_for_abandoned_copies()  # the caller may use the memory again
            raise

    # ---- moving bytes, looking at them later

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """A number for transfer_check_status(); NO_TRANSFER when nothing was started."""
        return self._submit(Write, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """As batch_transfer_async_write, in the other direction."""
        return self._submit(Read, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """As batch_transfer_async_write, in the direction of ``opcode``."""
        return self._submit(opcode, target_hostname, buffers, peer_buffer_addresses, lengths)

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """As batch_transfer_async_write, for one slice."""
        return self._submit(Write, target_hostname, [buffer], [peer_buffer_address], [length])

    @coded("transfer_check_status", floor=-2)
    def transfer_check_status(self, batch_id: int, /) -> int:
        """0 under way, 1 done, -1 failed or no such number, -2 no progress in time. An end is told once."""
        found = self._transfers.get(number(batch_id))
        if found is None:
            logger.warning("there is no transfer %d, or its end was told already", batch_id)
            return FAILED
        transfer, target = found
        state = transfer.state
        if state is TransferState.WAITING:
            return 0
        if state is not TransferState.DONE and self._open().has_abandoned_copies():
            return 0  # they may still write to the memory, which the caller uses again after the end
        with self._lock:
            if self._transfers.pop(batch_id, None) is None:
                return FAILED  # another thread was told just now
        if state is TransferState.DONE:
            return 1
        error = transfer.error
        logger.warning("transfer %d: %s", batch_id, error)
        if error is not None:
            self._peers.forget_if_gone(target)
        return -2 if "no progress" in str(error) else FAILED

    def get_batch_transfer_status(self, batch_ids: list[int], /) -> int:
        """Waits for all of them: 0, or FAILED when one failed."""
        failed = False
        for one in batch_ids:
            found = self._transfers.get(one)
            if found is not None:
                found[0].wait()
            while (code := self.transfer_check_status(one)) == 0:
                self._open().wait_for_abandoned_copies()
            failed |= code != 1
        return FAILED if failed else 0

    @coded("submit", floor=NO_TRANSFER)
    def _submit(
        self,
        opcode: TransferOpcode,
        target: str,
        buffers: Sequence[int],
        remotes: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        verb = verb_of(opcode)
        try:
            if len(self._transfers) >= TRANSFERS_MAX:
                self._forget_ended()
            peer = self._peers.get(target)
            try:
                same_length(buffers, remotes, lengths)
                transfer = self._open().submit(Batch(verb, peer, buffers, remotes, lengths))
            except InvalidArgument:
                transfer = self._open().submit(Batch(verb, peer, *slices(buffers, remotes, lengths)))
        except (TransferError, Unavailable):
            self._peers.forget_if_gone(target)
            raise
        name = next(self._numbers)
        with self._lock:
            self._transfers[name] = transfer, target
        return name

    def _forget_ended(self) -> None:
        """Forgets ended transfers that were not polled. Raises InvalidArgument when all are under way."""
        with self._lock:
            waiting = {
                name: one for name, one in self._transfers.items() if one[0].state is TransferState.WAITING
            }
            logger.warning("%d transfers were never looked at", len(self._transfers) - len(waiting))
            self._transfers = waiting
        if len(waiting) >= TRANSFERS_MAX:
            raise InvalidArgument(f"{TRANSFERS_MAX} transfers are under way already")

    # ---- messages

    def get_notifies(self) -> list[TransferNotify]:
        """The messages that arrived since the last call."""
        if self._engine is None:
            return []
        return [unpacked(one.peer, one.message) for one in self._engine.notifications()]

    # ---- inside

    def _open(self) -> moonpool.TransferEngine:
        if self._engine is None:
            raise Closed("call initialize() before", operation="engine")
        return self._engine


TransferEngine.TransferOpcode = TransferOpcode  # type: ignore[attr-defined]  # callers take it from there


def verb_of(opcode: object) -> Verb:
    """The verb of an opcode. Raises TypeError for what is no TransferOpcode."""
    try:
        return _VERB[opcode]
    except KeyError:
        raise TypeError(f"opcode is a TransferOpcode, not {opcode!r:.80}") from None


def slices(
    buffers: Sequence[int], remotes: Sequence[int], lengths: Sequence[int]
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The columns as plain numbers, without slices of no bytes. Raises InvalidArgument for columns of
    different lengths, TypeError for what is no number.
    """
    same_length(buffers, remotes, lengths)
    rows = [row for row in zip(buffers, remotes, map(number, lengths), strict=True) if row[2]]
    return [number(row[0]) for row in rows], [number(row[1]) for row in rows], [row[2] for row in rows]


def packed(notify: TransferNotify) -> bytes:
    """The bytes of a message. Raises TypeError for what is no TransferNotify."""
    if not isinstance(notify, TransferNotify):
        raise TypeError(f"notify is a TransferNotify, not {notify!r:.80}")
    return msgspec.msgpack.encode([notify.name, notify.msg])


def unpacked(peer: str, message: bytes) -> TransferNotify:
    """A message of an engine that is not of this API has its sender's name, and its bytes as text."""
    try:
        name, text = msgspec.msgpack.decode(message, type=tuple[str, str])
    except msgspec.MsgspecError:
        return TransferNotify(peer, message.decode(errors="replace"))
    return TransferNotify(name, text)


__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]
