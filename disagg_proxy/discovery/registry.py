"""Engines that register themselves over HTTP, in the form of Mooncake's conductor ("Indexer API").

A registration is one publisher of KV events: an instance, one of its data-parallel ranks, for a tenant. With
``url``, a member of ours, it is also an engine that requests go to; without, its events are only followed for
``/query``. The stream of a registration with ``url`` is the engine's own; each other one has a holder of its
own in the indexes, behind the engines' places and the pool's nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Protocol

import msgspec

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.plan import Answer, refused
from moonpool.disagg_proxy.discovery.source import Found, Listener
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec

REGISTRATION_BYTES_MAX = 64 << 10
PUBLISHERS_MAX = 4096
TENANT = "default"
_TYPES = ("vllm", "sglang")
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Part = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^|]*$")]  # of Key's text


class Registration(msgspec.Struct):
    """Members as Mooncake documents them; url, role, bootstrap and ttl_s are ours. ttl_s: it is to be made
    again within so long, 0: it stays until it is unregistered."""

    instance_id: _Part
    endpoint: Text = ""
    replay_endpoint: Text = ""
    type: Text = "vLLM"
    modelname: Text = ""
    lora_name: Text | None = None
    tenant_id: _Part = TENANT
    block_size: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    additionalsalt: Text = ""
    url: Text = ""
    role: Text = "both"
    bootstrap: Text | int = ""
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def key(self) -> Key:
        return Key(self.instance_id, self.tenant_id, self.dp_rank)


class Key(NamedTuple):
    instance_id: str
    tenant_id: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.instance_id}|{self.tenant_id}|{self.dp_rank}"


class _Unregistration(msgspec.Struct):
    instance_id: Name
    tenant_id: Name = TENANT
    dp_rank: int | None = None  # None: all of the instance


@dataclass(slots=True)
class Publisher:
    """found: the engine that it stands for; None: it stands for none, or another rank does. holder: of its
    own in the indexes; None: it has none, because it is an engine's, or has no events."""

    told: Registration
    found: Found | None
    holder: int | None
    expires_s: float


class Streams(Protocol):
    """Follows streams that belong to no engine."""

    def follow(self, name: str, source: EventSource) -> int | None:
        """The holder that it has in the indexes; None: there is none left."""

    def drop(self, name: str, holder: int) -> None: ...


class Keys:
    """Who may: whoever sends one of these. None at all: everybody."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def fits(self, authorization: bytes | None) -> bool:
        """All are compared, in constant time."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        fitting = [hmac.compare_digest(digest, each) for each in self._digests]
        return not self._digests or (scheme.lower() == b"bearer" and any(fitting))


class Registry:
    """A source of engines. On the event loop. is_there: whether requests go to this engine."""

    name = "http"

    def __init__(
        self,
        streams: Streams,
        *,
        clock: Callable[[], float],
        is_there: Callable[[EngineSpec], bool] = lambda spec: True,
    ) -> None:
        self.publishers: dict[Key, Publisher] = {}
        self._streams = streams
        self._clock = clock
        self._is_there = is_there
        self._listener: Listener | None = None
        self._changed = asyncio.Event()

    async def run(self, listener: Listener) -> None:
        """Ends registrations that were not made again in time."""
        self._listener = listener
        listener.found(self._engines())
        while True:
            self._changed.clear()
            due_s = min((each.expires_s for each in self.publishers.values()), default=math.inf)
            wait_s = due_s - self._clock()
            try:
                async with asyncio.timeout(max(0.0, wait_s) if wait_s < math.inf else None):
                    await self._changed.wait()
            except TimeoutError:
                now_s = self._clock()
                self._end([key for key, each in self.publishers.items() if each.expires_s <= now_s])
                listener.found(self._engines())  # they may come back: their engines are given the grace

    def register(self, body: bytes) -> Answer:
        """The answer to POST /register."""
        if len(body) > REGISTRATION_BYTES_MAX:
            return _bad(f"a registration has {REGISTRATION_BYTES_MAX} bytes at most", status=413)
        try:
            told = msgspec.json.decode(body, type=Registration)
            found, events = _found(told), _events(told)
        except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
            return _bad(str(error))
        expires_s = self._clock() + told.ttl_s if told.ttl_s else math.inf
        known = self.publishers.get(told.key)
        if known is not None and msgspec.structs.replace(known.told, ttl_s=told.ttl_s) == told:
            known.told, known.expires_s = told, expires_s
            self._changed.set()
            return self._registered(told)
        if known is None and len(self.publishers) >= PUBLISHERS_MAX:
            return _bad(f"there are {PUBLISHERS_MAX} registrations, and no room for more", status=503)
        if found is not None and (other := self._engine_of(found.name, told.key)) is not None:
            if other.spec.address != found.spec.address:
                return _bad(f"{found.name} is an engine at {other.spec.url}; give this one another id", 409)
            found = None  # another rank's registration is the engine's
        if known is not None and known.holder is not None:
            self._streams.drop(str(told.key), known.holder)
        holder = None
        if found is None and events is not None:
            holder = self._streams.follow(str(told.key), replace(events, name=str(told.key)))
            if holder is None:  # so none was dropped: what was registered before stays as it is
                return _bad("as many streams of events are followed as there may be", status=503)
        self.publishers[told.key] = Publisher(told, found, holder, expires_s)
        if known is not None and known.found is not None and found is None:
            self._hand_on({known.found.name})
        self._tell()
        return self._registered(told)

    def unregister(self, body: bytes) -> Answer:
        """The answer to POST /unregister."""
        if len(body) > REGISTRATION_BYTES_MAX:
            return _bad(f"a registration has {REGISTRATION_BYTES_MAX} bytes at most", status=413)
        try:
            told = msgspec.json.decode(body, type=_Unregistration)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _bad(str(error))
        keys = [
            key
            for key in self.publishers
            if key[:2] == (told.instance_id, told.tenant_id) and told.dp_rank in (None, key.dp_rank)
        ]
        if not keys:
            return refused(404, f"nobody is registered as {told.instance_id}", "not_registered")
        self._tell(self._end(keys))
        said = {"status": "unregistered successfully", "removed_instances": [str(key) for key in keys]}
        return Answer(200, msgspec.json.encode(said))

    def _registered(self, told: Registration) -> Answer:
        said = {"status": "registered successfully", "instance_id": told.instance_id}
        if told.url:
            found = _found(told)
            said["engine"] = "there" if found is not None and self._is_there(found.spec) else "waiting"
        return Answer(200, msgspec.json.encode(said))

    def _engine_of(self, name: str, but: Key) -> Found | None:
        """The engine of this name that another registration than ``but`` stands for."""
        for key, each in self.publishers.items():
            if each.found is not None and each.found.name == name and key != but:
                return each.found
        return None

    def _engines(self) -> list[Found]:
        return [each.found for each in self.publishers.values() if each.found is not None]

    def _end(self, keys: Iterable[Key]) -> frozenset[str]:
        """The names of the engines that they stood for."""
        names = set()
        for key in keys:
            gone = self.publishers.pop(key)
            if gone.holder is not None:
                self._streams.drop(str(key), gone.holder)
            if gone.found is not None:
                names.add(gone.found.name)
        self._hand_on(names)
        return frozenset(names)

    def _hand_on(self, names: Iterable[str]) -> None:
        """For engines of these names the next rank's registration stands, if there is one."""
        orphans = set(names)
        for key, each in self.publishers.items():
            if each.told.url and key.instance_id in orphans:
                orphans.discard(key.instance_id)
                if each.holder is not None:
                    self._streams.drop(str(key), each.holder)
                each.found, each.holder = _found(each.told), None

    def _tell(self, ended: Set[str] = frozenset()) -> None:
        if self._listener is not None:
            self._listener.found(self._engines(), ended)
        self._changed.set()


def _found(told: Registration) -> Found | None:
    if not told.url:
        if not told.endpoint:
            raise ConfigError("a registration has an endpoint (of KV events), a url (of an engine), or both")
        return None
    spec = EngineSpec(told.instance_id, told.url, told.role, str(told.bootstrap))
    return Found(spec, _events(told), told.modelname)


def _events(told: Registration) -> EventSource | None:
    if not told.endpoint:
        return None
    if told.type.lower() not in _TYPES:
        raise ConfigError(
            f"the events of a publisher of type {told.type!r} cannot be read; vLLM and SGLang can"
        )
    for endpoint in (told.endpoint, told.replay_endpoint):
        if endpoint and not endpoint.startswith("tcp://"):
            raise ConfigError(f"an endpoint is at tcp://host:port, not {endpoint!r}")
    return EventSource(told.instance_id, told.endpoint, told.replay_endpoint)


def _bad(sentence: str, status: int = 400) -> Answer:
    return refused(status, sentence, "registration")
