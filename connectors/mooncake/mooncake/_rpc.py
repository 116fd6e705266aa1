"""``RpcInterface``: bytes and tensors to another process's callback.

They travel as messages of moonpool's transfer engine, so both sides know the cluster token. A message has at
most a MiB, so larger data goes in pieces; the receiver puts them together on one thread and calls back there.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

import moonpool
from moonpool.core.errors import Error, InvalidArgument
from moonpool.core.service.addresses import parse_address

from ._codes import code_of, logger
from ._hosts import session_of

PIECE_BYTES = 512 << 10
PENDING_MAX = 1024  # data of which pieces are missing
PENDING_BYTES_MAX = 1 << 30  # bytes of incomplete messages of one sender
LISTEN_S = 0.1
OK, FAILED = 0, -1


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """Before each piece. sender is random, so that two never have the same; shape and dtype are of a tensor,
    whose dtype is not empty."""

    sender: bytes
    number: int
    index: int
    count: int
    source: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class ReceivedData:
    """What a callback gets."""

    source_address: str
    _data: bytes

    @property
    def data_size(self) -> int:
        """Number of bytes."""
        return len(self._data)

    def get_bytes(self) -> bytes:
        """The bytes."""
        return self._data

    def get_memory_view(self) -> memoryview:
        """The bytes as a view."""
        return memoryview(self._data)


@dataclass(frozen=True, slots=True)
class ReceivedTensor:
    """What a callback for tensors gets: the bytes, and what they are."""

    source_address: str
    _data: bytes
    dtype: str
    shape: list[int]

    @property
    def total_bytes(self) -> int:
        """Number of bytes."""
        return len(self._data)

    def get_data_size(self) -> int:
        """Number of bytes."""
        return len(self._data)

    def get_data_as_bytes(self) -> bytes:
        """The bytes of the numbers."""
        return self._data

    def get_memory_view(self) -> memoryview:
        """The bytes of the numbers as a view."""
        return memoryview(self._data)


class RpcInterface:
    """A server, a client, or both. Methods return False or FAILED before they are initialized."""

    def __init__(self) -> None:
        self._engine: moonpool.TransferEngine | None = None
        self._peers: dict[str, moonpool.Segment] = {}
        self._numbers = itertools.count(1)
        self._name = secrets.token_bytes(8)
        self._pending: OrderedDict[tuple[bytes, int], dict[int, bytes]] = OrderedDict()
        self._pending_bytes: Counter[bytes] = Counter()
        self._on_data: Callable[[ReceivedData], object] | None = None
        self._on_tensor: Callable[[ReceivedTensor], object] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def initialize(
        self, listen_address: str = "", thread_count: int = 0, timeout_seconds: int = 30, pool_size: int = 100
    ) -> bool:
        """A server where there is an address to listen on, else a client."""
        return self._begin(listen_address or None, timeout_seconds)

    def initialize_client(self, pool_size: int = 100, timeout_seconds: int = 30) -> bool:
        """Whether this end may send now. timeout_seconds: of one message."""
        return self._begin(None, timeout_seconds)

    def initialize_server(
        self, listen_address: str, thread_count: int = 8, timeout_seconds: int = 30
    ) -> bool:
        """Whether this end may receive at ``listen_address`` once it is started. timeout_seconds: of one
        message."""
        return self._begin(listen_address, timeout_seconds)

    def _begin(self, listen: str | None, timeout_s: float) -> bool:
        if self._engine is not None:
            return True
        try:
            if listen is not None:
                parse_address(listen, "listen_address")
            self._engine = moonpool.TransferEngine(listen=listen, timeout_s=timeout_s, metadata="")
        except Error as error:
            code_of(error, "initialize_rpc")
            return False
        return True

    @property
    def address(self) -> str:
        """Where a server listens, with its real port; "" for a client."""
        return next(iter(self._engine.addresses), "") if self._engine is not None else ""

    def start_server(self) -> bool:
        """Returns at once; callbacks run on a thread."""
        if self._engine is None:
            return False
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(
                target=_listen,
                args=(weakref.ref(self), self._engine, self._stop),
                name="mooncake-rpc",
                daemon=True,
            )
            self._thread.start()
        return True

    def start_server_async(self) -> bool:
        """As start_server, which does not wait either."""
        return self.start_server()

    def stop_server(self) -> None:
        """Ends the server and the client. Does nothing the second time."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        engine, self._engine = self._engine, None
        self._peers.clear()
        if engine is not None:
            engine.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.stop_server()

    def set_data_receive_callback(self, callback: Callable[[ReceivedData], object], /) -> None:
        """Called with each message of bytes, on the thread that receives."""
        self._on_data = callback

    def set_tensor_receive_callback(self, callback: Callable[[ReceivedTensor], object], /) -> None:
        """Called with each tensor, on the thread that receives."""
        self._on_tensor = callback

    # ---- sending

    def send_data(self, target_address: str, data: Any) -> int:
        """0 when the other process has all of it and is going to call back."""
        return self._send(target_address, bytes(memoryview(data).cast("B")), "", ())

    def send_tensor(self, target_address: str, tensor: Any) -> int:
        """Sends a tensor and waits: 0, or FAILED."""
        from ._tensor_header import bytes_of_tensor, parts_of

        try:
            _, held = parts_of(tensor)
        except InvalidArgument as error:
            code_of(error, "send_tensor")
            return FAILED
        data = bytes_of_tensor(held).tobytes()
        return self._send(target_address, data, str(held.dtype).removeprefix("torch."), tuple(held.shape))

    def send_data_async(self, target_address: str, data: Any, loop: Any) -> Any:
        """A future of ``loop`` for what send_data() returns."""
        return _future(loop, self.send_data, target_address, data)

    def send_tensor_async(self, target_address: str, tensor: Any, loop: Any) -> Any:
        """As send_tensor, as a future of ``loop``."""
        return _future(loop, self.send_tensor, target_address, tensor)

    def _send(self, target: str, data: bytes, dtype: str, shape: tuple[int, ...]) -> int:
        if self._engine is None:
            logger.warning("send: call initialize() before")
            return FAILED
        number = next(self._numbers)
        count = max(1, -(-len(data) // PIECE_BYTES))
        try:
            peer = self._peers.get(target) or self._engine.open(session_of(target))
            self._peers[target] = peer
            for index in range(count):
                piece = data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
                head = _Head(self._name, number, index, count, self.address, dtype, shape, piece)
                self._engine.notify(peer, msgspec.msgpack.encode(head))
        except Error as error:
            self._peers.pop(target, None)
            code_of(error, "send")
            return FAILED
        return OK

    # ---- receiving

    def _take(self, peer: str, message: bytes) -> None:
        try:
            head = msgspec.msgpack.decode(message, type=_Head)
        except msgspec.MsgspecError as error:
            logger.warning("a message of %s is none of ours: %s", peer, error)
            return
        if not 0 <= head.index < head.count:
            logger.warning("a message of %s is piece %d of %d", peer, head.index, head.count)
            return
        pieces = self._pending.setdefault((head.sender, head.number), {})
        self._pending_bytes[head.sender] += len(head.data) - len(pieces.get(head.index, b""))
        pieces[head.index] = head.data
        if len(pieces) < head.count:
            self._make_room(head.sender, peer)
            return
        self._drop(head.sender, head.number)
        data = b"".join(pieces[index] for index in sorted(pieces))
        source = head.source or peer
        try:
            if head.dtype:
                if self._on_tensor is not None:
                    self._on_tensor(ReceivedTensor(source, data, head.dtype, list(head.shape)))
            elif self._on_data is not None:
                self._on_data(ReceivedData(source, data))
        except Exception:  # a callback's fault must not end the server
            logger.exception("a callback failed with data of %s", source)

    def _make_room(self, sender: bytes, peer: str) -> None:
        """The oldest data of a sender that has too much of it, or the oldest of all."""
        while self._pending_bytes[sender] > PENDING_BYTES_MAX:
            number = next(number for name, number in self._pending if name == sender)
            logger.warning("%s has more than %d bytes under way: some are lost", peer, PENDING_BYTES_MAX)
            self._drop(sender, number)
        if len(self._pending) > PENDING_MAX:
            logger.warning("more than %d messages lack pieces: the oldest is lost", PENDING_MAX)
            self._drop(*next(iter(self._pending)))

    def _drop(self, sender: bytes, number: int) -> None:
        pieces = self._pending.pop((sender, number))
        self._pending_bytes[sender] -= sum(map(len, pieces.values()))
        if not self._pending_bytes[sender]:
            del self._pending_bytes[sender]


def _listen(
    reference: weakref.ref[RpcInterface], engine: moonpool.TransferEngine, stop: threading.Event
) -> None:
    """Receives messages until the interface has no other reference: this thread does not keep it alive."""
    while not stop.is_set():
        try:
            messages = engine.notifications(LISTEN_S)
        except Error:
            return
        interface = reference()
        if interface is None:
            return
        for message in messages:
            interface._take(message.peer, message.message)
        del interface


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """An end that sends, not initialised yet. The rank is not used."""
    return RpcInterface()


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """An end that receives."""
    return RpcInterface()


def _future(loop: asyncio.AbstractEventLoop, act: Callable[..., int], *arguments: Any) -> asyncio.Future[int]:
    return loop.run_in_executor(None, act, *arguments)
