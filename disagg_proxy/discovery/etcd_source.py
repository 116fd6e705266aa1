"""Engines under a prefix in etcd: one key for each. The value is an ``EngineRecord`` in JSON, or a URL alone.

It uses etcd's JSON gateway (``/v3/kv/range``, ``/v3/watch``) over HTTP: it reads the whole prefix at one
revision, then watches all later changes. After the end of a watch (etcd is away, a compaction) it reads all
again; the last list stays in force meanwhile. An engine puts its key with a lease and keeps that alive. When
the engine dies, the key goes with the lease; this looks like a deletion by a client, so the engine gets the
grace period.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp
import msgspec

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.debounce import Debounce
from moonpool.disagg_proxy.discovery.engine_record import EngineRecord, name_of
from moonpool.disagg_proxy.discovery.membership import OFFERED_MAX
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, SourceListener
from moonpool.disagg_proxy.discovery.watching_source import Lost, WatchingSource, content_of, lines_of
from moonpool.disagg_proxy.setting_error import bad

ENDPOINT = "http://127.0.0.1:2379"
VALUE_BYTES_MAX = 64 << 10
PAGE = 1000  # keys for each range request
CONNECT_S = 5.0
ANSWER_S = 10.0
SILENT_S = 30.0  # a watch is silent while nothing changes, and also when etcd's host is gone

_log = logging.getLogger("moonpool.proxy")


class _KeyValue(msgspec.Struct):
    key: str
    value: str = ""


class _Header(msgspec.Struct):
    revision: int = 0


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_KeyValue] = []
    more: bool = False


class _Event(msgspec.Struct):
    kv: _KeyValue
    type: str = "PUT"


class _Watched(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    events: list[_Event] = []
    canceled: bool = False
    cancel_reason: str = ""


class _Token(msgspec.Struct):
    token: str


class _Answer(msgspec.Struct):
    result: _Watched | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_range = msgspec.json.Decoder(_Range, strict=False)  # etcd writes numbers as text
_answer = msgspec.json.Decoder(_Answer, strict=False)


class EtcdSource(WatchingSource):
    """The source ``etcd:TEXT``.

    text:     ``URL[,URL...]/PREFIX``, or ``PREFIX`` for etcd at ETCDCTL_ENDPOINTS or on this host.
    environ:  certificates for https from ETCDCTL_CACERT, _CERT and _KEY; ETCDCTL_USER is NAME:PASSWORD.
    silent_s: after this long without a message it reads all keys again.
    Raises ConfigError.
    """

    def __init__(
        self,
        text: str,
        environ: Mapping[str, str] = os.environ,
        *,
        retry_s: float = 0.5,
        silent_s: float = SILENT_S,
    ) -> None:
        endpoints, self._prefix = parse(text, environ)
        tls = _tls_of(environ) if any(each.startswith("https://") for each in endpoints) else None
        super().__init__(f"etcd:{text}", endpoints, tls, retry_s=retry_s)
        self._user = environ.get("ETCDCTL_USER", "")
        self._silent_s = silent_s

    async def _follow(self, session: aiohttp.ClientSession, listener: SourceListener) -> None:
        await self._authenticate(session)
        while True:
            await self._read_and_watch(session, listener)

    async def _authenticate(self, session: aiohttp.ClientSession) -> None:
        if not self._user:
            return
        name, _, password = self._user.partition(":")
        said = await self._ask(session, "/v3/auth/authenticate", {"name": name, "password": password})
        session.headers["Authorization"] = msgspec.json.decode(said, type=_Token).token

    async def _read_and_watch(self, session: aiohttp.ClientSession, listener: SourceListener) -> None:
        """Reads all keys, then follows changes; returns after silent_s seconds without a message. Raises
        Lost and errors of aiohttp and msgspec."""
        values, revision = await self._read_all(session)
        for key in self._odd.keys() - values.keys():
            del self._odd[key]
        with Debounce(listener) as told:
            told.all({_order(key): self._engine(key, value) for key, value in values.items()})
            await self._watch(session, told, revision)

    async def _watch(self, session: aiohttp.ClientSession, told: Debounce, revision: int) -> None:
        """Follows changes; returns after silent_s seconds without a message."""
        begin, end = _range_of(self._prefix)
        create = {"key": begin, "range_end": end, "start_revision": str(revision + 1)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._silent_s)
        body = msgspec.json.encode({"create_request": create})
        async with session.post("/v3/watch", data=body, timeout=timeout) as answer:
            if answer.status != 200:
                raise Lost(f"/v3/watch was answered with {answer.status}")
            try:
                async for line in lines_of(answer):
                    watched = _watched_of(line)
                    for event in watched.events:
                        if event.type == "DELETE":
                            self._odd.pop(event.kv.key, None)
                            told.drop(_order(event.kv.key))
                        else:
                            told.put(_order(event.kv.key), self._engine(event.kv.key, event.kv.value))
            except aiohttp.SocketTimeoutError:
                return
        raise Lost("etcd closed the watch")

    async def _read_all(self, session: aiohttp.ClientSession) -> tuple[dict[str, str], int]:
        """(values by key, both in base64; their revision)"""
        begin, end = _range_of(self._prefix)
        values: dict[str, str] = {}
        revision = 0
        while True:
            asked = {"key": begin, "range_end": end, "limit": str(PAGE)}
            if revision:
                asked["revision"] = str(revision)
            page = _range.decode(await self._ask(session, "/v3/kv/range", asked))
            revision = revision or page.header.revision
            values |= {each.key: each.value for each in page.kvs}
            if not page.more or not page.kvs or len(values) >= OFFERED_MAX:
                return values, revision
            begin = base64.b64encode(base64.b64decode(page.kvs[-1].key) + b"\0").decode()

    @staticmethod
    async def _ask(session: aiohttp.ClientSession, path: str, body: object) -> bytes:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        async with session.post(path, data=msgspec.json.encode(body), timeout=timeout) as answer:
            content = await content_of(answer)
        if answer.status != 200:
            raise Lost(f"{path} was answered with {answer.status}: {content[:200].decode(errors='replace')}")
        return content

    def _engine(self, key: str, value: str) -> DiscoveredEngine | None:
        """The engine of a value; None, with a warning, for an invalid one."""
        if self._odd.get(key) == value:
            return None
        name = base64.b64decode(key).removeprefix(self._prefix).decode(errors="replace")
        try:
            found = _row(base64.b64decode(value)).found(name_of(name))
        except (ConfigError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._odd[key] = value
            _log.warning("%s: the value of %s is no engine: %s", self.name, name, error)
            return None
        self._odd.pop(key, None)
        return found


def parse(text: str, environ: Mapping[str, str]) -> tuple[list[str], bytes]:
    """(URLs of etcd's members, prefix of keys). Raises ConfigError."""
    *first, last = text.split(",") if "://" in text else [environ.get("ETCDCTL_ENDPOINTS") or ENDPOINT]
    parts = urlsplit(last)
    prefix = parts.path if "://" in text else text
    endpoints = [*first, f"{parts.scheme}://{parts.netloc}"]
    if "://" not in text:
        endpoints = [each if "://" in each else f"http://{each}" for each in last.split(",")]
    if not prefix.strip("/") or not all(re.fullmatch(r"https?://[^\s/]+", each) for each in endpoints):
        raise bad(
            "discovery",
            f"engines in etcd are named as etcd:http://host:2379/PREFIX or etcd:PREFIX, not {text!r}",
        )
    return endpoints, prefix.encode()


def _tls_of(environ: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=environ.get("ETCDCTL_CACERT") or None)
        if environ.get("ETCDCTL_CERT"):
            context.load_cert_chain(environ["ETCDCTL_CERT"], environ.get("ETCDCTL_KEY") or None)
    except (OSError, ssl.SSLError) as error:
        raise bad(
            "discovery", f"the certificates for etcd (ETCDCTL_CACERT, _CERT, _KEY) cannot be read: {error}"
        ) from error
    return context


def _range_of(prefix: bytes) -> tuple[str, str]:
    """The range of keys with this prefix, as (first, end) in base64."""
    behind = prefix.rstrip(b"\xff")
    end = behind[:-1] + bytes([behind[-1] + 1])
    return base64.b64encode(prefix).decode(), base64.b64encode(end).decode()


def _order(key: str) -> str:
    """A key as text that sorts in etcd's order."""
    return base64.b64decode(key).decode("latin-1")


def _row(value: bytes) -> EngineRecord:
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"it is longer than {VALUE_BYTES_MAX} bytes")
    text = value.strip()
    return (
        EngineRecord(url=text.decode())
        if text.startswith(b"http")
        else msgspec.json.decode(text, type=EngineRecord)
    )


def _watched_of(line: bytes) -> _Watched:
    """Raises Lost when the watch has ended: the revision was compacted, or there is no leader."""
    answer = _answer.decode(line)
    if answer.result is None:
        raise Lost(f"the watch failed: {bytes(answer.error)[:200].decode(errors='replace')}")
    if answer.result.canceled:
        raise Lost(f"the watch was cancelled: {answer.result.cancel_reason or 'compacted'}")
    return answer.result
