"""Checks each engine by ``GET /health``, each time over a new connection, so that accepting is tested, too.
From a healthy engine it reads the models, whether it is an SGLang engine, and the address for hand-overs
(vLLM's bootstrap page; a context server of TensorRT-LLM).

There is one task for each engine on the proxy's loop; ``conductor/liveness.py`` decides what an outcome
means.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from dataclasses import replace

import msgspec

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.engines import tensorrt_llm
from moonpool.disagg_proxy.engines.bootstrap import Bootstrap, Rank, is_next, read_page
from moonpool.disagg_proxy.engines.engine import Engine, host_field
from moonpool.disagg_proxy.engines.sglang import HEALTH_S, PAGE, read_server_info
from moonpool.disagg_proxy.tls import EngineTls

_HEAD_BYTES_MAX = 64 << 10
_BODY_BYTES_MAX = 1 << 20
_NEXT_RANK_S = 0.5  # for each further port of a bootstrap address, which may have no listener
# Ports of one bootstrap address that are asked: ranks of one host, each with a page of its own.
_PAGES_MAX = 16
# Shortages of this process or host; they say nothing about the engine.
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
# Of the time of a check, for the one behind the first late one: an engine that stands still is known by two
# of them, and its requests leave it within 5 s.
LATE_SHARE = 0.5

_log = logging.getLogger("moonpool.proxy")


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class HealthChecker:
    """Checks one engine until cancelled.

    first: a future that is done after the first outcome, good or bad.
    pages: the bootstrap pages of all engines.
    """

    def __init__(self, engine: Engine, checks: HealthChecks, pages: Collection[Bootstrap] = ()) -> None:
        self._engine = engine
        self._checks = checks
        self._pages = pages
        self._loop = asyncio.get_running_loop()
        self._short = False  # logged: checks cannot be made
        self._broke = False  # logged: a check raised
        self.first: asyncio.Future[None] = self._loop.create_future()
        self._lates = 0  # in a row

    async def run(self) -> None:
        """Checks the engine every interval, until cancelled."""
        while True:
            began = self._loop.time()
            try:
                await self.check()
            except Exception:  # any other fault: the engine keeps its state, and is checked again
                self._engine.not_checked()
                if not self._broke:
                    self._broke = True
                    _log.exception("a check of engine %s broke; it keeps the state it had", self._engine.name)
            if not self.first.done():
                self.first.set_result(None)
            await asyncio.sleep(max(0.0, began + self._checks.interval_s - self._loop.time()))

    async def check(self) -> None:
        """Makes one check and reports its outcome to the engine."""
        engine, path = self._engine, self._checks.path
        connect_s = self._checks.timeout_s
        waits = self.first.done() if engine.waits is None else engine.waits
        timeout_s = max(connect_s, HEALTH_S) if waits else connect_s
        if self._lates == 1 and not waits:
            timeout_s *= LATE_SHARE
        lates, self._lates = self._lates, 0
        began = self._loop.time()
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of 3.11 can swallow a cancellation
                status, _, peer = await _get(engine.address, path, connect_s, key=engine.key, tls=engine.tls)
        except TimeoutError:
            self._lates = lates + 1
            took_s = timeout_s if self._loop.time() - began >= timeout_s else connect_s
            engine.answered_late(f"GET {path} was not answered within {took_s:g} s")
        except OSError as error:
            if _is_ours(error):
                self._not_checked(error)
            else:
                engine.refused(f"GET {path} failed: {_why(error)}")
        else:
            self._short = False
            if 200 <= status < 300:
                await self._look_at_models()
                if engine.sglang is None and not await self._look_at_server_info():
                    return engine.answered_late(f"GET {PAGE} was not answered within {HEALTH_S:g} s")
                if engine.asks_context:
                    await self._look_at_context()
                engine.answered_well(peer)
                page = engine.bootstrap if engine.bootstrap_server is None else None
                if page is not None and page.is_due(self._loop.time()):
                    await self._look_at_bootstrap(page)
            elif waits and status == 503 and self._loop.time() - began >= connect_s:
                engine.answered_late(f"GET {path} was answered with 503, as its scheduler was silent")
            else:
                engine.refused(f"GET {path} was answered with {status}")

    async def _look_at_models(self) -> None:
        """Reads /v1/models; after a failure the engine keeps its models."""
        with suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(self._checks.timeout_s):
                status, body, _ = await self._get("/v1/models")
            if status == 200:
                self._engine.set_models(models_of(body))
            elif status == 404:  # it has no such page; any other status says nothing of its models
                self._engine.set_models(None)

    async def _look_at_server_info(self) -> bool:
        """Reads /server_info, once until the engine leaves the rotation. SGLang's scheduler takes part in the
        answer, so it may be late. False: it timed out, and the kind of the engine is unknown."""
        try:
            body = await self._page(PAGE, max(self._checks.timeout_s, HEALTH_S))
        except TimeoutError:
            return False
        except OSError:  # it is asked again
            return True
        self._engine.set_server_info(None if body is None else read_server_info(body))
        return True

    async def _look_at_context(self) -> None:
        """Reads /server_info of a context server, at each check, since a restart changes its address."""
        with suppress(OSError):  # TimeoutError is one
            body = await self._page(tensorrt_llm.PAGE, self._checks.timeout_s)
            self._engine.set_context(None if body is None else tensorrt_llm.read_server_info(body))

    async def _page(self, path: str, timeout_s: float) -> bytes | None:
        """A page of the engine; None: it has none. Raises OSError."""
        async with asyncio.timeout(timeout_s):
            status, body, _ = await self._get(path)
        return body if status == 200 else None

    async def _get(self, path: str) -> tuple[int, bytes, tuple[str, int]]:
        engine = self._engine
        return await _get(engine.address, path, key=engine.key, tls=engine.tls)

    async def _look_at_bootstrap(self, bootstrap: Bootstrap) -> None:
        try:
            ranks = await _ranks_at(*bootstrap.address, self._checks.timeout_s, bootstrap.pages)
        except TimeoutError:
            return bootstrap.failed("no answer", self._loop.time())
        except OSError as error:
            if not _is_ours(error):
                bootstrap.failed(error.strerror or str(error), self._loop.time())
            return
        if not ranks:
            return bootstrap.failed("something else answers there", self._loop.time())
        if self._engine.liveness.healthy:  # it may have left the rotation meanwhile
            bootstrap.answered(ranks, self._loop.time(), self._pages)

    def _not_checked(self, error: OSError) -> None:
        self._engine.not_checked()
        if not self._short:
            self._short = True
            _log.warning(
                "the health of engine %s cannot be checked (%s); it keeps the state it had",
                self._engine.name,
                error.strerror or error,
            )


async def _ranks_at(
    host: str, port: int, timeout_s: float, pages: Set[tuple[str, int]] = frozenset()
) -> tuple[Rank, ...]:
    """What a bootstrap page says, and those of further ranks on the ports behind it, up to another of the
    pages of engines; () when it is none.

    Raises OSError: TimeoutError when it does not answer, or for want of our own, which says nothing of it. A
    following port that does not answer is taken to be no engine's.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    ranks: tuple[Rank, ...] = ()
    for number in range(port, min(port + _PAGES_MAX, 65536)):
        if ranks and (host, number) in pages:
            break
        try:
            async with asyncio.timeout_at(min(end_s, loop.time() + _NEXT_RANK_S) if ranks else end_s):
                status, body, _ = await _get((host, number), "/query")
        except OSError as error:  # TimeoutError is one
            if not ranks or _is_ours(error):
                raise
            break
        found = read_page(body, f"http://{host_field(host, number)}") if status == 200 else ()
        if ranks and not (len(found) == 1 and is_next(ranks[-1], found[0])):
            break
        ranks += tuple(replace(rank, number=len(ranks)) for rank in found) if ranks else found
        if len(found) != 1 or found[0].number is None:
            break
    return ranks


async def _get(
    address: tuple[str, int],
    path: str,
    connect_s: float | None = None,
    *,
    key: str = "",
    tls: EngineTls | None = None,
) -> tuple[int, bytes, tuple[str, int]]:
    """Status, body and the peer's address. HTTP/1.0, so that nothing comes in chunks. connect_s: for the
    connection alone, its TLS included. key: what is shown as Authorization. tls: None: in plain."""
    context, server_name = (None, None) if tls is None else (tls.context(), tls.name)
    async with asyncio.timeout(connect_s):
        reader, writer = await asyncio.open_connection(
            *address, limit=_HEAD_BYTES_MAX, ssl=context, server_hostname=server_name
        )
    try:
        peer = writer.get_extra_info("peername")
        if peer is None:  # the engine's reset was there before the loop looked
            raise ConnectionResetError("reset the connection that it had accepted")
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        writer.write(
            f"GET {path} HTTP/1.0\r\nHost: {host_field(*address)}\r\nUser-Agent: moonpool-proxy\r\n"
            f"{authorization}Connection: close\r\n\r\n".encode()
        )
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            status, length = int(head[0].split(b" ")[1]), _BODY_BYTES_MAX
            for line in head[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = min(int(value), _BODY_BYTES_MAX)
            body = await _read_up_to(reader, length)
        except asyncio.IncompleteReadError as error:
            why = "closed the connection before its answer was complete"
            if context is not None and not error.partial:
                why += "; where it asks for a certificate, set proxy.engine_tls_cert"
            raise ConnectionError(why) from None
        except (asyncio.LimitOverrunError, ValueError, IndexError):
            raise ConnectionError("sent a broken answer") from None
        return status, body, peer[:2]
    finally:
        writer.transport.abort()


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message.rstrip(".")
        return f"its certificate is not accepted ({said}); proxy.engine_tls_ca names whom to trust"
    if isinstance(error, ssl.SSLError):
        return f"TLS broke: {(error.reason or 'the connection ended').lower().replace('_', ' ')}"
    return error.strerror or str(error)


def _is_ours(error: OSError) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno in (socket.EAI_SYSTEM, socket.EAI_MEMORY)
    return error.errno in _OURS


async def _read_up_to(reader: asyncio.StreamReader, length: int) -> bytes:
    body = b""
    while len(body) < length and (piece := await reader.read(length - len(body))):
        body += piece
    return body


def models_of(body: bytes) -> dict[str, bytes] | None:
    """The models of a /v1/models answer: what it says of each, by id. None when it is no such answer."""
    try:
        rows = msgspec.json.decode(body, type=_ModelList).data
        return {msgspec.json.decode(row, type=_Model).id: bytes(row) for row in rows}
    except (msgspec.MsgspecError, ValueError, RecursionError):  # no JSON, no text, nested without end
        return None


def merged_models(engines: Mapping[str, dict[str, bytes] | None]) -> bytes:
    """One /v1/models page of what all engines serve; the first that serves a model describes it."""
    rows: dict[str, bytes] = {}
    for models in engines.values():
        for name, row in (models or {}).items():
            rows.setdefault(name, row)
    return b'{"object":"list","data":[' + b",".join(rows.values()) + b"]}"
