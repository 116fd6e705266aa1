"""Puts the proxy together: ``serve`` runs it on a loop that exists, ``process.run`` as a process of its own.

Threads: the relay's (``_native.Relay``), which serves all sockets and calls Python once for each request, for
the decision; the tokenizer threads, which tokenise text and decide about it; and the event loop that
``serve`` is called on, for health checks, endpoints and signals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from prometheus_client.registry import Collector

from moonpool._native import ProxyRequest, Relay, Turns
from moonpool.core.config.proxy_section import ProxyCommon
from moonpool.core.config.setting import settings_of
from moonpool.core.errors import Error
from moonpool.core.service import audit
from moonpool.core.service.addresses import Address, parse_address
from moonpool.disagg_proxy.api_keys import read_access_keys
from moonpool.disagg_proxy.audit import ProxyAudit
from moonpool.disagg_proxy.conductor.hidden_pool import HiddenPool
from moonpool.disagg_proxy.conductor.plan import FAILED, Answer, Decision
from moonpool.disagg_proxy.conductor.policy import make_policy, turns_of
from moonpool.disagg_proxy.data_plane.counters import Counters, look
from moonpool.disagg_proxy.discovery.allowed_networks import AllowedNetworks
from moonpool.disagg_proxy.discovery.block_hash_index import BlockHashIndex
from moonpool.disagg_proxy.discovery.cache_query_api import CacheQueryApi
from moonpool.disagg_proxy.discovery.host_resolver import HostResolver
from moonpool.disagg_proxy.discovery.membership import Membership
from moonpool.disagg_proxy.discovery.own_addresses import OwnAddresses
from moonpool.disagg_proxy.discovery.reconciler import Reconciler
from moonpool.disagg_proxy.discovery.registry import Registry
from moonpool.disagg_proxy.discovery.registry_endpoints import RegistryEndpoints
from moonpool.disagg_proxy.discovery.registry_file import RegistryFile
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.discovery.source_kinds import make_sources
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator
from moonpool.disagg_proxy.endpoints.admin import AdminEndpoints
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.events.pool_discovery import PoolDiscovery
from moonpool.disagg_proxy.events.pool_search import PoolSearch
from moonpool.disagg_proxy.events.prefix_indexes import HOLDERS_MAX, PrefixIndexes
from moonpool.disagg_proxy.events.stream_watch import StreamWatch
from moonpool.disagg_proxy.events.subscribed_streams import SubscribedStreams
from moonpool.disagg_proxy.events.subscriber import Subscriber
from moonpool.disagg_proxy.fleet import Fleet
from moonpool.disagg_proxy.listen_sockets import take_over_or_bind
from moonpool.disagg_proxy.peers.metrics import PeerCollector
from moonpool.disagg_proxy.peers.peer_sync import PeerSync
from moonpool.disagg_proxy.settings import (
    EngineSpec,
    ProxySettings,
    parse_tokenizers,
)
from moonpool.disagg_proxy.takeover import Offer, Predecessor
from moonpool.disagg_proxy.tls import EngineTls, made_relay
from moonpool.disagg_proxy.tokens.engine_source import EngineSource
from moonpool.disagg_proxy.tokens.local_source import LocalSource
from moonpool.disagg_proxy.tokens.prompt_ids import ASKED_MAX
from moonpool.disagg_proxy.tokens.source import TokenSource
from moonpool.disagg_proxy.tokens.tokenizer_threads import TokenizerThreads
from moonpool.disagg_proxy.tracing.recorder import Recorder, exporter_of
from moonpool.disagg_proxy.ui.snapshot import ProxyGroup, SnapshotBuilder

_log = logging.getLogger("moonpool.proxy")
_BACKLOG = 1024
_OBSERVE_EVERY_S = 0.25


class Proxy:
    """All parts of one proxy: the relay's thread, and everything else on the running loop. ``open``, then
    ``linger``, then ``drain``, then ``close``."""

    def __init__(
        self,
        settings: ProxySettings,
        decide: Callable[[ProxyRequest], Decision] | None = None,
        sockets: Sequence[socket.socket] = (),
        replaced: asyncio.Event | None = None,
    ) -> None:
        """Constructs all parts.

        decide:   replaces the settings' policy; called on the relay's thread.
        sockets:  bound sockets that replace the settings' address; their owner hands them to a successor.
        replaced: set when another proxy has taken over.
        """
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._keys = read_access_keys(settings)
        self._audit = ProxyAudit(self._keys.clients)
        self._networks = AllowedNetworks(settings.discovery_allow)
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: list[socket.socket] = list(sockets)
        self._is_one_of_several = bool(sockets)
        self._predecessor: Predecessor | None = None
        self._offer: Offer | None = None
        self.replaced = asyncio.Event() if replaced is None else replaced  # another proxy has our address
        self._indexes = PrefixIndexes()
        self._locator = PrefixLocator(self._indexes)
        policy = make_policy(settings.policy)
        self._engine_tls = EngineTls(settings)
        tokens = (
            _token_source(settings, lambda: self.engines, self._engine_tls) if policy.uses_tokens else None
        )
        self._dispatcher = Dispatcher(
            policy,
            self._locator,
            tokens,
            places=settings.places,
            loop=self._loop,
            resume=self._resume,
            observed=lambda: self.relay.take_observations(),
            clock=lambda: self.relay.now(),
            handover=settings.handover,
            admission=settings.admission,
            hidden_pool=HiddenPool(self._pool_remedy),
            policy_name=settings.policy,
            clients=self._keys.clients,
            switch_headers=settings.switch_headers,
            neighbour_tokens_min=settings.neighbour_tokens_min,
            withdrawn=self._audit.key_refused,
        )
        self._tokenises = isinstance(tokens, LocalSource) and decide is None
        self._text_threads: TokenizerThreads | None = None
        self._recorder = self._record_spans()
        if self._recorder is not None:
            self._dispatcher.subscribe(self._recorder)
        self._subscriber = self._listen_to_events() if policy.uses_tokens else None
        self._streams = StreamWatch(
            self._subscriber,
            self._locator.unheard_since,
            lambda: self.relay.now(),
            lambda: self._locator.telling_prompts,
        )
        first = settings.places + settings.pool_nodes
        self._further_streams = SubscribedStreams(self._subscriber, first, HOLDERS_MAX - first)
        self._pool_discovery = self._discover_pool()
        self._peer_sync = self._make_peer_sync()
        # A recorder of spans hears of each choice, and the row of a client may have switches.
        asks = decide is not None or self._recorder is not None or bool(settings.clients_file)
        turns = None if asks else turns_of(policy)
        self.relay = self._make_relay(decide, turns)
        self.fleet = Fleet(
            settings,
            self.relay,
            self._dispatcher,
            self._locator,
            self._subscriber,
            self._recorder,
            self._engine_tls,
        )
        events = {source.name: source for source in settings.events if not source.pool}
        for spec in settings.engines:
            self.fleet.join(DiscoveredEngine(spec, events.get(spec.name)))
        self._registry = self._register()
        self._reconciler = self._follow()
        self.ui = SnapshotBuilder(
            self._dispatcher,
            self.counters,
            self.relay.now,
            settings.policy,
            self._group,
            self._streams,
            tuple if self._pool_discovery is None else self._pool_discovery.masters,
        )
        self._pages = self._make_pages()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that may get requests, ordered by place."""
        return self._dispatcher.engines

    async def open(self) -> str:
        """Checks every engine once, then listens. Returns the URL. Raises ConfigError if it cannot bind."""
        await self._bind()
        if self._registry is not None:
            self._registry.own = OwnAddresses(self._own_addresses())
        if self._subscriber is not None:
            self._subscriber.start()
        if self._peer_sync is not None:
            follows = self._predecessor is not None or self._is_one_of_several
            self._peer_sync.bus.start(waits=self._settings.take_over and follows)
        if self._tokenises:
            self._text_threads = TokenizerThreads(
                self.relay.next_text,
                self.relay.overdue_text,
                self._dispatcher.prompts.tokenise,
                self._dispatcher.told,
                self.relay.now,
            )
        self._tasks = [self._loop.create_task(self._observe_forever())]
        if self._pool_discovery is not None:
            self._pool_discovery.start()
        await self.fleet.start()
        if self._reconciler is not None:
            await self._reconciler.start()
            await self.fleet.checked()
        for listening in self._listening:
            listening.listen(_BACKLOG)
            self.relay.listen(listening.fileno())
        host, port = self._listening[0].getsockname()[:2]
        if self._predecessor is not None:
            await self._predecessor.release()
            audit.record("take_over", address=str(Address(host, port)))
        if not self._is_one_of_several:
            self._offer = Offer(self._settings.host, port, self._listening, self.replaced.set)
        if not self._settings.loopback and not self._keys.relayed:
            _log.warning(
                "the proxy listens on %s without authentication: any client that reaches it may use the "
                "engines",
                host,
            )
        return f"{self._settings.scheme}://{Address(host, port)}"

    def reload(self) -> None:
        """Reads the files of keys and opens the access log again. An error of either is logged and changes
        nothing of it."""
        try:
            self.relay.reopen_access_log()
        except Error as error:
            _log.error("SIGHUP: the access log stays as it was: %s", error)
        relayed = self._keys.reload()
        if relayed is not None:
            self.relay.set_api_keys(relayed)

    async def linger(self, over: asyncio.Event) -> None:
        """Serves on for stop_delay_s seconds, or until ``over`` is set or another proxy has taken over;
        /health answers 503 from now on. Sets ``over``."""
        self._pages.stopping = not self.replaced.is_set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.deadlines.stop_delay_s):
                await _any_of(over, self.replaced)
        over.set()

    async def drain(self) -> bool:
        """Stops accepting; requests in flight have drain_s seconds to finish. Returns whether all did."""
        why = "another proxy has taken over" if self.replaced.is_set() else "it was asked to stop"
        audit.record("drain", why=why)
        await self._stop_listening()
        if self._peer_sync is not None and self.replaced.is_set():
            self._peer_sync.bus.let_go()
        self._dispatcher.limit_wait(self._settings.deadlines.drain_s / 2)
        return await asyncio.to_thread(self.relay.drain, self._settings.deadlines.drain_s)

    async def close(self) -> None:
        """Ends everything now. May be called at any time, also after a failed ``open``."""
        await self._stop_listening()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pool_discovery is not None:
            await self._pool_discovery.close()
        if self._reconciler is not None:
            await self._reconciler.close()
        await self.fleet.close()
        await self._dispatcher.close()
        await asyncio.to_thread(self.relay.close)
        await asyncio.to_thread(self._pages.close)
        if self._peer_sync is not None:
            await asyncio.to_thread(self._peer_sync.stop)
        if self._text_threads is not None:
            await asyncio.to_thread(self._text_threads.join)
        if self._subscriber is not None:
            await asyncio.to_thread(self._subscriber.stop)
        if self._recorder is not None:
            self._recorder.on_records(self.relay.take_observations())
            await asyncio.to_thread(self._recorder.close)

    def counters(self) -> Counters:
        """The counters, as of now."""
        counters = look(self.relay)
        counters.policy_errors += self._dispatcher.late_errors
        return counters

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        if not self.counters().intact:
            raise AssertionError("an invariant of the data plane is broken")
        self.fleet.check_integrity()
        if self._reconciler is not None:
            self._reconciler.check_integrity()
        self._dispatcher.check_integrity(
            0 if self._peer_sync is None else len(self._peer_sync.remote_inflight)
        )

    def _make_relay(self, decide: Callable[[ProxyRequest], Decision] | None, turns: Turns | None) -> Relay:
        """Starts the relay and its thread; engines join later. Raises ConfigError for files of TLS that
        cannot be used."""
        settings, dispatcher = self._settings, self._dispatcher
        return made_relay(
            settings,
            engines=[],
            engines_max=settings.places,
            settings=_relay_settings(settings),
            api_keys=self._keys.relayed,
            access_log=settings.access_log,
            instance=os.urandom(6).hex(),
            retry_after_s=settings.health.interval_s,
            spans=self._recorder is not None,
            texts_max=ASKED_MAX if self._tokenises else 0,
            decide=dispatcher.decide if decide is None else lambda request, *_: decide(request),
            uses_tokens=dispatcher.uses_tokens and decide is None,
            page=self._page,
            refused=self._refused,
            gone=self._gone,
            registry=settings.registers,
            relay_paths=list(settings.relay_paths),
            turns=turns,
        )

    def _make_pages(self) -> AdminEndpoints:
        settings = self._settings
        shown: list[Collector] = []
        if self._recorder is not None:
            shown.append(self._recorder)
        if self._peer_sync is not None:
            shown.append(PeerCollector(self._peer_sync))
        return AdminEndpoints(
            self._dispatcher,
            self._locator,
            self._subscriber,
            self.counters,
            settings.policy,
            self.ui,
            shown,
            self._reconciler,
            self._registry_pages(),
            self._keys.readers,
            self._audit,
            self._streams,
        )

    def _group(self) -> ProxyGroup:
        """The position of this process among the proxies, for /ui."""
        settings, peer_sync = self._settings, self._peer_sync
        group = ProxyGroup(settings.process_number, settings.processes, settings.process_listen)
        if peer_sync is not None:
            group.others = sum(bool(row["connected"]) for row in peer_sync.bus.stats().values())
            group.their_requests = len(peer_sync.remote_inflight)
        return group

    def _make_peer_sync(self) -> PeerSync | None:
        """The exchange with other proxies; None: there are none."""
        settings = self._settings
        if not settings.peers.listen:
            return None
        if not self._dispatcher.uses_tokens:
            _log.warning("the policy %s keeps no books that proxies could exchange", settings.policy)
            return None
        return PeerSync(settings.peers, self._dispatcher, self._locator, waits=settings.take_over)

    def _resume(self, request: ProxyRequest, decision: Decision) -> None:
        self.relay.resume(request, decision)

    def _record_spans(self) -> Recorder | None:
        """The recorder of spans; None: not configured. Raises ConfigError if spans cannot be made."""
        exporter = exporter_of(self._settings.otlp_endpoint)
        if exporter is None:
            return None
        names = [""] * self._settings.places
        return Recorder(exporter, names, self._settings.policy, clock=lambda: self.relay.now())

    def _register(self) -> Registry | None:
        """The registry; None: engines cannot register."""
        settings = self._settings
        if not settings.registers:
            return None
        file = RegistryFile(settings.discovery_registry_file) if settings.discovery_registry_file else None
        return Registry(
            self._further_streams,
            clock=self._loop.time,
            is_there=self._is_there,
            file=file,
            networks=self._networks,
        )

    def _own_addresses(self) -> list[tuple[str, int]]:
        """(address, port) of each socket of this process, and of those at which its siblings are reached
        alone."""
        bound = [one.getsockname()[:2] for one in self._listening]
        settings = self._settings
        if not settings.process_listen:
            return bound
        own = parse_address(settings.process_listen, "proxy.process_listen")
        hosts = {str(host) for host, port in bound if port == own.port}
        first = own.port - settings.process_number
        return bound + [(host, first + number) for host in hosts for number in range(settings.processes)]

    def _is_there(self, spec: EngineSpec) -> bool:
        found = self.fleet.find(spec.name)
        return found is not None and found.spec.address == spec.address

    def _registry_pages(self) -> RegistryEndpoints | None:
        registry = self._registry
        if registry is None:
            return None
        sequences = BlockHashIndex()
        if self._subscriber is not None:
            self._subscriber.subscribe(sequences)
        queries = CacheQueryApi(self._indexes, lambda: self.engines, registry.publishers.values, sequences)
        return RegistryEndpoints(
            registry,
            queries,
            self._keys.registrars,
            self._keys.askers,
            HostResolver(self._networks),
            self._audit,
            self._keys.clients,
        )

    def _follow(self) -> Reconciler | None:
        """The reconciler; None: there are no sources. Raises ConfigError for an invalid one."""
        settings = self._settings
        if not settings.discovery:
            return None
        registry = self._registry
        sources = make_sources(settings.discovery, registry)
        membership = Membership(
            [source.name for source in sources],
            fixed=settings.engines,
            grace_s=settings.discovery_grace_s,
            engines_max=settings.places,
        )
        reconciler = Reconciler(sources, membership, self.fleet)
        self.fleet.freed = reconciler.look
        return reconciler

    def _listen_to_events(self) -> Subscriber | None:
        settings = self._settings
        if not settings.events and not settings.discovery and settings.pool is None:
            return None
        # Streams of engines are added when they join.
        pool = tuple(source for source in settings.events if source.pool)
        places = {source.name: settings.places + number for number, source in enumerate(pool)}
        return Subscriber(
            pool,
            self._indexes,
            places,
            followed=self._locator.hears,
            prompts=lambda: self._locator.telling_prompts,
        )

    def _discover_pool(self) -> PoolDiscovery | None:
        """Finds the pool's nodes; None: they are not looked for."""
        settings = self._settings
        if settings.pool is None:
            return None
        by_hand = [source.endpoint for source in settings.events if source.pool]
        if self._subscriber is None:
            return PoolDiscovery(PoolSearch(settings.pool, by_hand), None)
        # A master may tell of any number of nodes: half of the holders stays for publishers that register.
        streams = self._further_streams.part((self._further_streams.free + 1) // 2)
        return PoolDiscovery(PoolSearch(settings.pool, by_hand), streams)

    def _pool_remedy(self) -> str:
        """What to do where engines get blocks that no event explains. On any thread."""
        if (remedy := self._streams.remedy()) is not None:
            return remedy
        if self._pool_discovery is None:
            return "let it look for nodes (--pool auto), or name each with --pool-events NAME=ENDPOINT"
        return self._pool_discovery.remedy()

    def _page(self, request: ProxyRequest) -> Decision:
        """Called on the relay's thread. Endpoints are answered on the loop, where they delay no request."""
        self._loop.call_soon_threadsafe(self._make_page, request)
        return None

    def _make_page(self, request: ProxyRequest) -> None:
        def reply(answer: Answer) -> None:
            self.relay.resume(request, answer)

        try:
            self._pages.answer(request, reply)
        except Exception:  # the client is told at once
            _log.exception("a page could not be made")
            reply(FAILED)

    def _refused(self, place: int, why: str) -> None:
        """Called on the relay's thread: an engine refused a connection."""
        self._loop.call_soon_threadsafe(self._engine_refused, place, why)

    def _engine_refused(self, place: int, why: str) -> None:
        engine = self.fleet.engine(place)
        if engine is not None:
            engine.refused(why)

    def _gone(self, place: int) -> None:
        """Called on the relay's thread: the last request of a leaving engine is over."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.fleet.gone, place)

    async def _observe_forever(self) -> None:
        """Processes observations periodically, also while no request arrives."""
        while True:
            await asyncio.sleep(_OBSERVE_EVERY_S)
            try:
                self._dispatcher.learn()
                if self._peer_sync is not None:
                    self._peer_sync.expire(self.relay.now())
                self.ui.gather()
                self._audit.sum_up(self.counters, self.relay.now())
                for trouble in self.relay.take_tls_trouble():
                    _log.error("%s", trouble)
                self._streams.look()
            except Exception:  # this task also enforces the deadlines of texts
                _log.exception("what was observed could not be learnt")
            if self._text_threads is not None:
                self._text_threads.expire()

    async def _bind(self) -> None:
        if self._is_one_of_several:
            return
        self._predecessor = await take_over_or_bind(self._settings, self._listening)

    async def _stop_listening(self) -> None:
        if self._offer is not None:
            await self._offer.close()
        if self._predecessor is not None:
            self._predecessor.close()
        for listening in self._listening:
            listening.close()
        self._listening.clear()


def _relay_settings(settings: ProxySettings) -> dict[str, object]:
    """The settings that the data plane names. It gives up a request without a decision, but not while the
    request may wait for one.
    """
    values = {each.name: each.value_in(settings) for each in settings_of(ProxyCommon)}
    values |= asdict(settings.internals)
    if settings.admission.queue_max:
        values["decide_s"] = settings.deadlines.decide_s + settings.admission.queue_deadline
    return {name: values[name] for name in Relay.setting_names()}


def _token_source(
    settings: ProxySettings, engines: Callable[[], Sequence[Engine]], tls: EngineTls
) -> TokenSource | LocalSource | None:
    """The source of token ids; None: no text is tokenised. Raises ConfigError for an unreadable tokenizer."""
    if [*settings.tokenizer] == ["none"]:
        return None
    if settings.tokenizer:
        return LocalSource(parse_tokenizers(settings.tokenizer))

    def urls(model: str) -> list[str]:
        return [
            engine.url.rstrip("/")
            for engine in engines()
            if engine.liveness.healthy and (engine.models is None or model in engine.models or not model)
        ]

    def key_of(root: str) -> str:
        return next((engine.key for engine in engines() if engine.url.rstrip("/") == root), "")

    return EngineSource(urls, key_of=key_of, tls=tls.context, tls_name=tls.name)


async def serve(
    settings: ProxySettings,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
    sockets: Sequence[socket.socket] = (),
    replaced: asyncio.Event | None = None,
    hung_up: asyncio.Event | None = None,
) -> None:
    """Serves until ``stop`` is set, the task is cancelled, or another proxy has taken over the address; then
    lingers, drains and returns.

    ready:   called once with the URL when requests are accepted and every engine was checked once.
    hurry:   ends the lingering when it is set, and is set by its end.
    hung_up: set to have the proxy ``reload``; cleared by that.
    Raises ConfigError if the address cannot be bound.
    """
    proxy = Proxy(settings, sockets=sockets, replaced=replaced)
    try:
        url = await proxy.open()
        if ready is not None:
            ready(url)
        stop, hung_up = stop or asyncio.Event(), hung_up or asyncio.Event()
        while not stop.is_set() and not proxy.replaced.is_set():
            await _any_of(stop, proxy.replaced, hung_up)
            if hung_up.is_set():
                hung_up.clear()
                proxy.reload()
        await proxy.linger(hurry or asyncio.Event())
        if not await proxy.drain():
            _log.warning(
                "requests were still running after %g s and were cut off", settings.deadlines.drain_s
            )
    finally:
        await proxy.close()


async def _any_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
