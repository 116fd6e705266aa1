"""``MoonpoolTransferEngine``: the methods that SGLang calls on its transfer engine, over a
moonpool.TransferEngine.

SGLang makes one for each scheduler, encoder and receiver of embeddings, sends its ``session_id`` and the
addresses of its memory to peers over its own sockets, and lets peers write there. It calls from many threads.
Codes are SGLang's: 0, and below 0 for a failure, with one sentence in the log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import moonpool
from moonpool.connectors.sglang.transfer.memory import NotRegistered, Registrations
from moonpool.connectors.sglang.transfer.settings import LISTEN, Settings
from moonpool.core.errors import Closed, ConfigError, Error, TransferError, Unavailable
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.transfer.peers import Peers

FAILED = -1
TIMEOUT_S = 5.0  # the longest wait of a call without progress
SAY_AGAIN_S = 1.0
SAID_MAX = 256
_FAULTS = (Error, OSError, MemoryError, ValueError)
_log = logging.getLogger("sglang.moonpool.transfer")


class MoonpoolTransferEngine:
    """SGLang's transfer engine, on moonpool's.

    hostname: the address by which peers reach this host.
    gpu_id, ib_device: accepted and not used.
    engine: moonpool's TransferEngine.
    session_id: what peers pass to ``transfer_sync``, "host:port".

    Raises ConfigError when the engine cannot listen there, or may not: every address but a loopback one needs
    a cluster token.
    """

    def __init__(self, hostname: str, gpu_id: int | None = None, ib_device: str | None = None) -> None:
        settings = Settings.read(os.environ)
        self.hostname = hostname
        self.gpu_id = gpu_id or 0
        self.ib_device = "" if os.environ.get("MC_FORCE_TCP") == "1" else ib_device
        self.engine = _listening(hostname.strip("[]"), settings)
        self.session_id = str(
            Address(hostname.strip("[]"), parse_address(self.engine.addresses[0], "listen").port)
        )
        self._memory = Registrations(self.engine)
        self._peers = Peers(self.engine.open)
        self._said: dict[tuple[str, type[BaseException]], float] = {}
        self._lock = threading.Lock()
        works = [name for name, why in self.engine.transports().items() if not why]
        _log.info("moonpool: transfer engine at %s (%s)", self.session_id, ", ".join(works))

    def close(self) -> None:
        """Ends it: what waits fails, peers lose its memory. May be called twice."""
        self.engine.close()
        self._peers.clear()

    # ---- memory

    def register(self, ptr: int, length: int) -> None:
        """Raises RuntimeError, as SGLang's does."""
        try:
            self._memory.add(ptr, length)
        except _FAULTS as error:
            raise RuntimeError(f"moonpool cannot register memory: {error}") from error

    def deregister(self, ptr: int) -> None:
        """When it returns, no transfer touches the memory any more. Raises RuntimeError."""
        try:
            self._memory.remove(ptr)
        except _FAULTS as error:
            raise RuntimeError(f"moonpool cannot deregister memory: {error}") from error

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        """All or none. Raises RuntimeError for memory that the engine cannot move: SGLang does not look at
        this code, and no request could ever be served."""
        try:
            kept = [(ptr, length) for ptr, length in zip(ptrs, lengths, strict=True) if length]
            self._memory.add_all([ptr for ptr, _ in kept], [length for _, length in kept])
        except NotRegistered as error:
            raise RuntimeError(f"moonpool cannot register memory: {error}") from error
        except _FAULTS as error:
            return self._failed("register", f"{len(ptrs)} ranges", error)
        return 0

    def batch_deregister(self, ptrs: list[int]) -> int:
        """All that there are."""
        code = 0
        for ptr in ptrs:
            try:
                self._memory.remove(ptr)
            except _FAULTS as error:
                code = self._failed("deregister", f"{ptr:#x}", error)
        return code

    # ---- moving bytes

    def transfer_sync(self, session_id: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        """Writes to the peer. When it returns 0 the bytes are in the peer's memory."""
        return self.batch_transfer_sync(session_id, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        """All slices in one call of the native engine, in no order."""
        try:
            if 0 in lengths:
                rows = zip(buffers, peer_buffer_addresses, lengths, strict=True)
                buffers, peer_buffer_addresses, lengths = _columns([row for row in rows if row[2]])
            if lengths:
                self.engine.write(self._peers.get(session_id), buffers, peer_buffer_addresses, lengths)
        except _FAULTS as error:
            if isinstance(error, (TransferError, Unavailable)):
                self._peers.forget_if_gone(session_id)
                self.engine.wait_for_abandoned_copies()  # SGLang gives the memory to other requests
            return self._failed("transfer to", session_id, error)
        return 0

    # ---- session

    def get_session_id(self) -> str:
        """The address that peers name this engine by, "host:port"."""
        return self.session_id

    def send_probe(self, peer_session_id: str) -> int:
        """0 when the peer answers now."""
        try:
            self._peers.get(peer_session_id).refresh()
        except _FAULTS as error:
            self._peers.forget(peer_session_id)
            return self._failed("probe of", peer_session_id, error)
        return 0

    def get_engine(self) -> moonpool.TransferEngine:
        """The transfer engine."""
        return self.engine

    def get_ib_device(self) -> str | None:
        """The device that SGLang was given; moonpool does not use it."""
        return self.ib_device

    # ---- inside

    def _failed(self, what: str, whom: str, error: BaseException) -> int:
        """Logs the reason, at most once a second for a peer and kind: with a dead peer all requests fail."""
        key, now_s = (whom, type(error)), time.monotonic()
        with self._lock:
            say = now_s >= self._said.get(key, now_s)
            if say:
                if len(self._said) >= SAID_MAX:
                    self._said.clear()
                self._said[key] = now_s + SAY_AGAIN_S
        if say and not isinstance(error, Closed):
            _log.error("moonpool: %s %s failed: %s", what, whom, error)
        return FAILED


def _listening(hostname: str, settings: Settings) -> moonpool.TransferEngine:
    """An engine that listens at the first free port."""
    host = settings.host or hostname
    trouble: Error | None = None
    for port in settings.ports:
        try:
            return moonpool.TransferEngine(
                listen=str(Address(host, port)),
                transports=settings.transports,
                timeout_s=TIMEOUT_S,
                metadata="",
            )
        except ConfigError:
            raise  # no token, or a transport that does not exist: no port will help
        except Error as error:
            trouble = error
    raise ConfigError(
        f"{trouble}; the engine listens at the address that SGLang gives, on any port, unless {LISTEN} says "
        f"otherwise: 0.0.0.0 where peers reach this host by an address that it does not have itself",
        operation="listen",
        key=LISTEN,
    ) from trouble


def _columns(rows: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
