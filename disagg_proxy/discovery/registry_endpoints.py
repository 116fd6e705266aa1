"""HTTP endpoints of the registry: engines register, routers query; checks API keys."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from moonpool._native import ProxyRequest
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.api_keys import WANTS_KEY, KeyCheck
from moonpool.disagg_proxy.audit import ProxyAudit
from moonpool.disagg_proxy.clients import Clients
from moonpool.disagg_proxy.conductor.plan import FAILED, Answer, refused
from moonpool.disagg_proxy.discovery.cache_query_api import CacheQueryApi
from moonpool.disagg_proxy.discovery.host_resolver import HostResolver
from moonpool.disagg_proxy.discovery.registration import Registration
from moonpool.disagg_proxy.discovery.registry import Registry

QUERIES_MAX = 256  # queries that wait; their bodies count in bodies_bytes_max
RESOLVING_MAX = 64  # registrations whose names are being resolved
_log = logging.getLogger("moonpool.proxy")


class RegistryEndpoints:
    """Runs on the event loop; one thread answers queries, because long prompts take time.

    registrars: API keys that may register.
    askers:     API keys that may query.
    resolver:   replaces host names in registrations by addresses.
    audit:      is told what changed and what was refused.
    clients:    a query is about the blocks that the asker's tenant finds; None: about all.
    """

    def __init__(
        self,
        registry: Registry,
        queries: CacheQueryApi,
        registrars: KeyCheck,
        askers: KeyCheck,
        resolver: HostResolver,
        audit: ProxyAudit,
        clients: Clients | None = None,
    ) -> None:
        self._registry = registry
        self._queries = queries
        self._resolver = resolver
        self._audit = audit
        self._resolving: set[asyncio.Task[None]] = set()
        self._registrars = registrars
        self._askers = askers
        self._clients = clients
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefix-queries")
        self._room = threading.Semaphore(QUERIES_MAX)

    def answer(self, request: ProxyRequest, reply: Callable[[Answer], None]) -> None:
        """Answers a POST. reply: called once, on any thread."""
        if _of_a_web_page(request):
            why = "a web page may not do this: send it without Origin and Sec-Fetch-Site"
            return reply(refused(403, why, "web_page"))
        path = request.path
        registers = path in (b"/register", b"/unregister")
        keys = self._registrars if registers else self._askers
        if not keys.fits(request.headers("authorization")):
            self._audit.key_refused(request)
            return reply(WANTS_KEY)
        if path == b"/register":
            return self._register(request, self._audited(request, reply))
        if registers:
            return self._audited(request, reply)(self._unregister(request))
        if not self._room.acquire(blocking=False):
            return reply(refused(503, f"{QUERIES_MAX} queries wait already; ask again later", "busy"))
        self._thread.submit(self._ask, request, reply)

    def close(self) -> None:
        """Waits for the running query; drops those that wait."""
        self._thread.shutdown(cancel_futures=True)

    def _audited(self, request: ProxyRequest, reply: Callable[[Answer], None]) -> Callable[[Answer], None]:
        """``reply``, which also tells the audit log of a refusal."""

        def tell(answer: Answer) -> None:
            if answer.status != 200:
                self._audit.registration_refused(request, answer)
            reply(answer)

        return tell

    def _unregister(self, request: ProxyRequest) -> Answer:
        answer = self._registry.unregister(bytes(request.body))
        if answer.status == 200:
            self._audit.unregistered(request, answer)
        return answer

    def _admit(self, request: ProxyRequest, told: Registration) -> Answer:
        before = self._registry.said_before(told.key)
        answer = self._registry.admit(told)
        if answer.status == 200 and (before is None or not before.says(told)):
            self._audit.registered(request, told)
        return answer

    def _register(self, request: ProxyRequest, reply: Callable[[Answer], None]) -> None:
        told = self._registry.read(bytes(request.body))
        if isinstance(told, Answer):
            return reply(told)
        try:
            if not self._resolver.is_needed_for(told):
                return reply(self._admit(request, told))
        except ConfigError as error:
            return reply(refused(400, str(error), "registration"))
        if len(self._resolving) >= RESOLVING_MAX:
            why = f"the names of {RESOLVING_MAX} registrations are being resolved; register again later"
            return reply(refused(503, why, "busy"))
        task = asyncio.get_running_loop().create_task(self._register_by_name(request, told, reply))
        self._resolving.add(task)
        task.add_done_callback(self._resolving.discard)

    async def _register_by_name(
        self, request: ProxyRequest, told: Registration, reply: Callable[[Answer], None]
    ) -> None:
        answer = refused(503, "the proxy ends", "busy")
        try:
            resolved = await self._resolver.resolve(told, self._registry.said_before(told.key))
            answer = self._admit(request, resolved)
        except ConfigError as error:
            answer = refused(400, str(error), "registration")
        except Exception:
            _log.exception("a registration could not be taken")
            answer = FAILED
        finally:  # the client is told at once
            reply(answer)

    def _ask(self, request: ProxyRequest, reply: Callable[[Answer], None]) -> None:
        try:
            by = self._queries.by_tokens if request.path == b"/query" else self._queries.by_hashes
            reply(by(bytes(request.body), self._salt_of(request)))
        except Exception:  # the client is told at once
            _log.exception("a query could not be answered")
            reply(FAILED)
        finally:
            self._room.release()

    def _salt_of(self, request: ProxyRequest) -> str:
        client = self._clients and self._clients.find(request.headers("authorization"))
        return self._clients.salt_of(client) if self._clients and client else ""


def _of_a_web_page(request: ProxyRequest) -> bool:
    """Whether a browser sent the request for a web page. On loopback no key is needed, and any page in a
    browser there can send a POST without reading the answer. Browsers add Origin to each POST, also after DNS
    rebinding."""
    site = request.headers("sec-fetch-site")
    return request.headers("origin") is not None or site not in (None, b"none")
