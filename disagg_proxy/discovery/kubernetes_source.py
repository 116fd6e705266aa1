"""Engines that are pods of a Kubernetes cluster, selected by labels.

It lists all pods, page by page, and then watches from the resourceVersion of that list. A watch ends every
few minutes and is resumed at its last version; when the server no longer has that version (410), the source
lists again, after a pause if that happens twice within SOON_S. A pod is an engine while it runs and has an
address; the proxy checks its health itself. A pod that is being deleted has ended.

Inside a cluster it reads the service account's token for each connection, because the token changes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl

import aiohttp
import msgspec

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.debounce import Debounce
from moonpool.disagg_proxy.discovery.engine_record import EngineRecord, name_of
from moonpool.disagg_proxy.discovery.membership import OFFERED_MAX
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, SourceListener
from moonpool.disagg_proxy.discovery.watching_source import Lost, WatchingSource, content_of, lines_of
from moonpool.disagg_proxy.setting_error import bad

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 500  # pods for each list request
CONNECT_S = 5.0
ANSWER_S = 30.0
WATCH_S = 240  # the server ends a watch after this long; it is resumed
SILENT_S = 120.0  # the server sends bookmarks about once a minute
AT_ONCE_S = 0.05  # a watch that ends sooner counts as failed
SOON_S = 10.0  # two answers 410 within this time count as a failure, with a pause
PORT = 8000
_OPTIONS = ("api", "scheme", "port", "role", "events", "replay", "bootstrap", "model")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_log = logging.getLogger("moonpool.proxy")


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Status(msgspec.Struct):
    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")


class _Pod(msgspec.Struct):
    metadata: _Meta
    status: _Status = msgspec.field(default_factory=_Status)


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[_Pod] = []


class _Change(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: _ListMeta


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""


_list = msgspec.json.Decoder(_List)
_change = msgspec.json.Decoder(_Change)
_pod = msgspec.json.Decoder(_Pod)
_bookmark = msgspec.json.Decoder(_Bookmark)
_failure = msgspec.json.Decoder(_Failure)


class _TooOld(Exception):
    """The server no longer has this resourceVersion (410)."""


class KubernetesSource(WatchingSource):
    """The source ``kubernetes:TEXT``.

    text:     ``[NAMESPACE/]SELECTOR[?OPTION=VALUE&...]``; docs/discovery.md has the options.
    account:  the folder of the service account.
    silent_s: after this long without a message it lists all pods again.
    Raises ConfigError.
    """

    def __init__(
        self,
        text: str,
        environ: Mapping[str, str] = os.environ,
        account: Path = ACCOUNT,
        *,
        retry_s: float = 0.5,
        silent_s: float = SILENT_S,
    ) -> None:
        self._selector, namespace, self._options = parse(text)
        self._account = account
        self._api = self._options.get("api") or _api_of(environ)
        tls = _tls_of(account) if self._api.startswith("https://") else None
        super().__init__(f"kubernetes:{text}", [self._api], tls, retry_s=retry_s)
        self._namespace = namespace or _read(account / "namespace") or "default"
        self._silent_s = silent_s
        self._forgot_s = -math.inf  # time of the last answer 410

    async def _follow(self, session: aiohttp.ClientSession, listener: SourceListener) -> None:
        with Debounce(listener) as told:
            while True:
                engines, ended, version = await self._read_all(session)
                told.all(engines, ended)
                try:
                    while True:
                        version = await self._watch(session, told, version)
                except (_TooOld, aiohttp.SocketTimeoutError) as error:
                    if isinstance(error, _TooOld):
                        self._forgot()
                    # list again; if the server is away, the list fails

    def _forgot(self) -> None:
        """Notes an answer 410. Raises Lost for the second one within SOON_S: servers send it for a while
        after their start, and each list is work for them."""
        now_s = asyncio.get_running_loop().time()
        before_s, self._forgot_s = self._forgot_s, now_s
        if now_s - before_s < SOON_S:
            raise Lost("again and again it no longer knows what it has just told (410)")

    async def _read_all(
        self, session: aiohttp.ClientSession
    ) -> tuple[dict[str, DiscoveredEngine | None], list[str], str]:
        """(engine of each pod or None, names that are being deleted, resourceVersion)"""
        pods: dict[str, _Pod] = {}
        query = {"labelSelector": self._selector, "limit": str(PAGE)}
        while True:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
            async with session.get(
                self._path, params=query, headers=self._headers(), timeout=timeout
            ) as answer:
                content = await content_of(answer)
            if answer.status == 410 and "continue" in query:  # the list expired between two pages
                self._forgot()
                pods.clear()
                del query["continue"]
                continue
            if answer.status != 200:
                raise Lost(_why(answer.status, content, self._namespace))
            page = _list.decode(content)
            pods |= {self._name(pod): pod for pod in page.items}
            if not page.metadata.continue_ or len(pods) >= OFFERED_MAX:
                for name in self._odd.keys() - pods.keys():
                    del self._odd[name]
                engines = {name: self._engine(name, pod) for name, pod in pods.items()}
                ended = [name_of(name) for name, pod in pods.items() if pod.metadata.deletion_timestamp]
                return engines, ended, page.metadata.resource_version
            query["continue"] = page.metadata.continue_

    async def _watch(self, session: aiohttp.ClientSession, told: Debounce, version: str) -> str:
        """Follows changes until the server ends the watch; returns the last version."""
        query = {
            "labelSelector": self._selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._silent_s)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        async with session.get(self._path, params=query, headers=self._headers(), timeout=timeout) as answer:
            if answer.status == 410:
                raise _TooOld
            if answer.status != 200:
                raise Lost(_why(answer.status, await content_of(answer), self._namespace))
            async for line in lines_of(answer):
                change = _change.decode(line)
                if change.type == "ERROR":
                    failure = _failure.decode(change.object)
                    if failure.code == 410:
                        raise _TooOld
                    raise Lost(f"the watch failed: {failure.message or failure.code}")
                if change.type == "BOOKMARK":
                    version = _bookmark.decode(change.object).metadata.resource_version or version
                    continue
                pod = _pod.decode(change.object)
                version = pod.metadata.resource_version or version
                name = self._name(pod)
                if change.type == "DELETED":
                    self._odd.pop(name, None)
                    told.drop(name)
                else:
                    told.put(name, self._engine(name, pod))
                if change.type == "DELETED" or pod.metadata.deletion_timestamp:
                    told.ended(name_of(name))
        if clock() - began_s < AT_ONCE_S:
            raise Lost("it ended the watch at once")
        return version

    @property
    def _path(self) -> str:
        return "/api/v1/pods" if self._namespace == "*" else f"/api/v1/namespaces/{self._namespace}/pods"

    def _headers(self) -> dict[str, str]:
        token = _read(self._account / "token")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _name(self, pod: _Pod) -> str:
        """A unique name: with all namespaces, the namespace (which has no dot) precedes the pod's name."""
        name = pod.metadata.name
        return f"{pod.metadata.namespace}.{name}" if self._namespace == "*" else name

    def _engine(self, name: str, pod: _Pod) -> DiscoveredEngine | None:
        """The engine of a pod; None: it does not run, or, with a warning, its options are invalid."""
        if pod.metadata.deletion_timestamp or pod.status.phase != "Running" or not pod.status.pod_ip:
            return None
        try:
            found = self._row(pod).found(name_of(name))
        except (ConfigError, ValueError) as error:
            if self._odd.get(name) != str(error):
                self._odd[name] = str(error)
                _log.warning("%s: pod %s is no engine: %s", self.name, name, error)
            return None
        self._odd.pop(name, None)
        return found

    def _row(self, pod: _Pod) -> EngineRecord:
        """The record of a pod. An annotation moonpool.io/OPTION overrides the label of that name, which
        overrides the option of the source."""
        meta = pod.metadata
        told = self._options | {
            option: value
            for kind in (meta.labels or {}, meta.annotations or {})
            for option in _OPTIONS
            if (value := kind.get(f"moonpool.io/{option}"))
        }
        host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
        return EngineRecord(
            url=f"{_scheme(told.get('scheme', 'http'))}://{host}:{_port(told.get('port', str(PORT)))}",
            role=told.get("role", "both"),
            bootstrap=told.get("bootstrap", ""),
            events=f"tcp://{host}:{_port(told['events'])}" if told.get("events") else "",
            replay=f"tcp://{host}:{_port(told['replay'])}" if told.get("replay") else "",
            model=told.get("model", ""),
        )


def parse(text: str) -> tuple[str, str, dict[str, str]]:
    """(selector, namespace ("": the proxy's own, "*": all), options). Raises ConfigError."""
    named, _, query = text.partition("?")
    namespace, slash, selector = named.partition("/")
    # A label's name may have a slash, too, behind a name with dots, which a namespace has not.
    if not slash or (namespace != "*" and not _NAMESPACE.fullmatch(namespace)):
        namespace, selector = "", named
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not selector or options.keys() - set(_OPTIONS):
        raise bad(
            "discovery",
            "engines in Kubernetes are kubernetes:[NAMESPACE/]LABEL=VALUE[?OPTION=VALUE&...], "
            f"with the options {', '.join(_OPTIONS)}; not {text!r}",
        )
    return selector, namespace, options


def _api_of(environ: Mapping[str, str]) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise bad(
            "discovery",
            "this is no pod of a Kubernetes cluster; name the API server, such as that of `kubectl "
            "proxy`: kubernetes:NAMESPACE/app=vllm?api=http://127.0.0.1:8001",
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _tls_of(account: Path) -> ssl.SSLContext:
    authority = account / "ca.crt"
    try:
        return ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
    except (OSError, ssl.SSLError) as error:
        raise bad("discovery", f"the cluster's certificate {authority} cannot be read: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _scheme(text: str) -> str:
    if text not in ("http", "https"):
        raise ValueError(f"a scheme is http or https, not {text!r}")
    return text


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"a port is 1 to 65535, not {text!r}")
    return int(text)


def _why(status: int, content: bytes, namespace: str) -> str:
    try:
        said = _failure.decode(content).message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        said = ""
    if status in (401, 403):
        where = "the cluster" if namespace == "*" else f"the namespace {namespace}"
        return f"{said or status}; its service account needs to get, list and watch pods of {where}"
    return f"it answered {status}{': ' if said else ''}{said}"
