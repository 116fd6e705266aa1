"""Engines that register themselves over HTTP, in the form of Mooncake's conductor ("Indexer API").

A registration is one publisher of KV events: one data-parallel rank of an instance, for a tenant. With
``url``, a member of ours, it is also an engine that gets requests; without, its events are only followed for
``/query``. A registration with ``url`` uses the engine's holder in the prefix indexes; every other one has a
holder of its own, numbered after the engines and the pool's nodes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.plan import Answer, refused
from moonpool.disagg_proxy.discovery.allowed_networks import AllowedNetworks
from moonpool.disagg_proxy.discovery.own_addresses import OwnAddresses
from moonpool.disagg_proxy.discovery.registration import TENANT, Name, Registration, RegistrationKey
from moonpool.disagg_proxy.discovery.registry_file import PendingWrite, RegistryFile, StoredRegistration
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, SourceListener
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec

REGISTRATION_BYTES_MAX = 64 << 10
PUBLISHERS_MAX = 4096
LOOK_EVERY_S = 0.25  # seconds between two reads of the file
LAST_S = 2.0  # longest wait of a stopping proxy for the file
DEAD_S = 60.0  # expired registrations leave the file after this: by then every process has expired them
_log = logging.getLogger("moonpool.proxy")


class _Unregistration(msgspec.Struct):
    instance_id: Name
    tenant_id: Name = TENANT
    dp_rank: int | None = None  # None: all of the instance


@dataclass(slots=True)
class ActiveRegistration:
    """A registration that is in force.

    row:       the registration and its number in the file.
    found:     the engine it stands for; None: none, or another rank stands for it.
    holder:    its own index in the prefix indexes; None: it uses the engine's, or has no events.
    expires_s: time at which it expires; infinity: never.
    """

    row: StoredRegistration
    found: DiscoveredEngine | None
    holder: int | None
    expires_s: float

    @property
    def told(self) -> Registration:
        """The registration."""
        return self.row.told


class EventStreams(Protocol):
    """Follows event streams that belong to no engine."""

    def follow(self, name: str, source: EventSource) -> int | None:
        """The holder of the stream in the prefix indexes; None: no holder is free."""

    def drop(self, name: str, holder: int) -> None:
        """Stops following the stream ``name`` and frees its holder."""


class Registry:
    """The source ``http``. Runs on the event loop.

    streams:  follows event streams of registrations without an engine.
    clock:    the event loop's, in seconds.
    is_there: whether the fleet has this engine.
    file:     keeps the registrations and shares them with other processes; None: memory only.
    networks: where engines may be; None: anywhere.
    own:      where the proxy itself listens; its owner sets it once that is known.
    """

    name = "http"

    def __init__(
        self,
        streams: EventStreams,
        *,
        clock: Callable[[], float],
        is_there: Callable[[EngineSpec], bool] = lambda spec: True,
        file: RegistryFile | None = None,
        networks: AllowedNetworks | None = None,
    ) -> None:
        self.publishers: dict[RegistrationKey, ActiveRegistration] = {}
        self.own = OwnAddresses()
        self._streams = streams
        self._clock = clock
        self._is_there = is_there
        self._file = file
        self._networks = networks
        self._listener: SourceListener | None = None
        self._changed = asyncio.Event()
        # Expired registrations, by their numbers and when; and registrations of the file that were refused.
        self._dead: dict[RegistrationKey, tuple[int, float]] = {}
        self._left_out: dict[RegistrationKey, StoredRegistration] = {}
        self._room = False  # a registration ended since: the refused ones may fit now
        self._unwritten = False

    async def run(self, listener: SourceListener) -> None:
        """Expires registrations that were not repeated in time, and follows the file. See ``Source.run``."""
        self._listener = listener
        if self._file is not None:
            await self._sync(self._file)
        listener.found(self._engines())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._expire(listener))
                if self._file is not None:
                    tasks.create_task(self._share(self._file))
        finally:
            if self._file is not None:
                await self._write_last(self._file)

    async def _expire(self, listener: SourceListener) -> None:
        while True:
            self._changed.clear()
            due_s = min((each.expires_s for each in self.publishers.values()), default=math.inf)
            wait_s = due_s - self._clock()
            try:
                async with asyncio.timeout(max(0.0, wait_s) if wait_s < math.inf else None):
                    await self._changed.wait()
            except TimeoutError:
                now_s = self._clock()
                over = [key for key, each in self.publishers.items() if each.expires_s <= now_s]
                if self._file is not None:
                    self._dead |= {key: (self.publishers[key].row.made, now_s) for key in over}
                    for key in list(self._dead)[:-PUBLISHERS_MAX]:  # as when the file cannot be written
                        del self._dead[key]
                self._end(over)
                listener.found(self._engines())  # they may come back: their engines get the grace period

    async def _share(self, file: RegistryFile) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._sync(file)

    async def _write_last(self, file: RegistryFile) -> None:
        """Writes what was answered since the last sync, for the successor of this proxy."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LAST_S):
                while file.changes:
                    try:
                        await file.sync({key: each.row for key, each in self.publishers.items()}, {})
                    except BlockingIOError:  # another process is writing, or the sync that was cancelled
                        await asyncio.sleep(LAST_S / 100)

    async def _sync(self, file: RegistryFile) -> None:
        """Reads registrations of other processes and of the time before a restart; writes those made here."""
        dead = {key: made for key, (made, at_s) in self._dead.items() if self._clock() - at_s > DEAD_S}
        writes = file.changes or dead
        known = {key: each.row for key, each in self.publishers.items()} if writes else {}
        try:
            try:
                rows = await file.sync(known, dead)
            except BlockingIOError:  # another process is writing; ours are written next time
                rows, dead = await file.read(), {}
        except OSError as error:
            if not self._unwritten:
                _log.warning(
                    "the registrations cannot be kept in %s (%s): a restart, or another process, will not "
                    "know them until they are made again",
                    file.path,
                    error.strerror or error,
                )
            self._unwritten = True
            return
        self._unwritten = False
        for key in dead:
            self._dead.pop(key, None)
        if rows is not None:
            self._follow(rows, file.changes)
        elif self._room and self._left_out:
            before = self._engines()
            self._take({})
            if before != self._engines():
                self._tell()

    def _follow(
        self,
        rows: Mapping[RegistrationKey, StoredRegistration],
        newer: Mapping[RegistrationKey, PendingWrite],
    ) -> None:
        """Applies the file's registrations, except keys with newer changes here. Removals come first, since a
        new registration may need the name, the holder or the room of a removed one."""
        before = self._engines()
        self._left_out = {key: row for key, row in self._left_out.items() if key in rows}
        ended = self._end([key for key in self.publishers if key not in rows and key not in newer])
        fresh = {}
        for key, row in rows.items():
            if key in newer:
                continue
            known = self.publishers.get(key)
            made = known.row.made if known is not None else self._dead.get(key, (None, 0.0))[0]
            if row.made == made or self._renew(row):
                self._left_out.pop(key, None)
            elif self._left_out.get(key) != row:
                fresh[key] = row
        self._take(fresh)
        if ended or before != self._engines():
            self._tell(ended)

    def _take(self, fresh: dict[RegistrationKey, StoredRegistration]) -> None:
        """Enters registrations of the file, and again refused ones once something has ended."""
        refused: dict[RegistrationKey, str] = {}
        while fresh or (self._room and self._left_out):
            tried = {**self._left_out, **fresh} if self._room else fresh
            self._room, fresh = False, {}
            for key, row in tried.items():
                try:
                    refusal = self._enter(row)
                except ConfigError as error:  # another process has written the file
                    refusal = _bad(str(error))
                if refusal is None:
                    self._left_out.pop(key, None)
                else:
                    if key not in self._left_out:
                        refused[key] = refusal.body.decode()
                    self._left_out[key] = row
        for key in refused.keys() & self._left_out.keys():
            _log.warning("the registration %s is left out: %s", key, refused[key])

    def read(self, body: bytes) -> Registration | Answer:
        """Parses the body of POST /register; an Answer if it is invalid."""
        if len(body) > REGISTRATION_BYTES_MAX:
            return _bad(f"a registration has {REGISTRATION_BYTES_MAX} bytes at most", status=413)
        try:
            told = msgspec.json.decode(body, type=Registration)
            told.found(), told.events()
        except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
            return _bad(str(error))
        return told

    def said_before(self, key: RegistrationKey) -> Registration | None:
        """The registration under this key; None: there is none."""
        known = self.publishers.get(key)
        return None if known is None else known.told

    def admit(self, told: Registration) -> Answer:
        """Registers or renews; the answer to POST /register. The registration must not have host names."""
        row = StoredRegistration(told, random.getrandbits(53))
        try:
            renewed = self._renew(row)
            if not renewed:
                refusal = self._enter(row)
                if refusal is not None:
                    return refusal
                self._tell()
        except ConfigError as error:
            return _bad(str(error))
        self._left_out.pop(row.told.key, None)
        if self._file is not None:
            self._file.told(row.told.key, row, renewed=renewed)
        return self._registered(row.told)

    def _renew(self, row: StoredRegistration) -> bool:
        """Renews an equal registration; False if there is none."""
        known = self.publishers.get(row.told.key)
        if known is None or not known.told.says(row.told):
            return False
        known.row, known.expires_s = row, self._expires_s(row)
        self._changed.set()
        return True

    def _enter(self, row: StoredRegistration) -> Answer | None:
        """Enters a registration; None on success, otherwise the refusal, and nothing has changed. Raises
        ConfigError for a contradictory one."""
        told = row.told
        found, events = told.found(), told.events()
        if self._networks is not None:
            self._networks.require_allowed(told.hosts())
        if found is not None:
            self.own.require_other(*found.spec.address)
        known = self.publishers.get(told.key)
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
            if holder is None:  # none was dropped, so the previous registration is unchanged
                return _bad("as many streams of events are followed as there may be", status=503)
        self.publishers[told.key] = ActiveRegistration(row, found, holder, self._expires_s(row))
        self._room |= known is not None
        if known is not None and known.found is not None and found is None:
            self._hand_on({known.found.name})
        self._changed.set()
        return None

    def _expires_s(self, row: StoredRegistration) -> float:
        return self._clock() + row.told.ttl_s if row.told.ttl_s else math.inf

    def unregister(self, body: bytes) -> Answer:
        """Answers POST /unregister."""
        if len(body) > REGISTRATION_BYTES_MAX:
            return _bad(f"a registration has {REGISTRATION_BYTES_MAX} bytes at most", status=413)
        try:
            told = msgspec.json.decode(body, type=_Unregistration)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _bad(str(error))
        keys = [
            key
            for key in {**self.publishers, **self._left_out}  # other processes may have accepted these
            if key[:2] == (told.instance_id, told.tenant_id) and told.dp_rank in (None, key.dp_rank)
        ]
        if not keys:
            return refused(404, f"there is no registration {told.instance_id}", "not_registered")
        for key in keys:
            self._left_out.pop(key, None)
        self._tell(self._end([key for key in keys if key in self.publishers]))
        if self._file is not None:
            for key in keys:
                self._file.told(key, None)
        said = {"status": "unregistered successfully", "removed_instances": [str(key) for key in keys]}
        return Answer(200, msgspec.json.encode(said))

    def _registered(self, told: Registration) -> Answer:
        said = {"status": "registered successfully", "instance_id": told.instance_id}
        if told.url:
            found = told.found()
            said["engine"] = "there" if found is not None and self._is_there(found.spec) else "waiting"
        return Answer(200, msgspec.json.encode(said))

    def _engine_of(self, name: str, but: RegistrationKey) -> DiscoveredEngine | None:
        """The engine of this name that a registration other than ``but`` stands for."""
        for key, each in self.publishers.items():
            if each.found is not None and each.found.name == name and key != but:
                return each.found
        return None

    def _engines(self) -> list[DiscoveredEngine]:
        return [each.found for each in self.publishers.values() if each.found is not None]

    def _end(self, keys: Iterable[RegistrationKey]) -> frozenset[str]:
        """Ends registrations; the names of the engines they stood for."""
        names = set()
        for key in keys:
            gone = self.publishers.pop(key)
            self._room = True
            if gone.holder is not None:
                self._streams.drop(str(key), gone.holder)
            if gone.found is not None:
                names.add(gone.found.name)
        self._hand_on(names)
        return frozenset(names)

    def _hand_on(self, names: Iterable[str]) -> None:
        """Lets the registration of another rank stand for each of these engines, if there is one."""
        orphans = set(names)
        for key, each in self.publishers.items():
            if each.told.url and key.instance_id in orphans:
                orphans.discard(key.instance_id)
                if each.holder is not None:
                    self._streams.drop(str(key), each.holder)
                each.found, each.holder = each.told.found(), None

    def _tell(self, ended: Set[str] = frozenset()) -> None:
        if self._listener is not None:
            self._listener.found(self._engines(), ended)
        self._changed.set()


def _bad(sentence: str, status: int = 400) -> Answer:
    return refused(status, sentence, "registration")
