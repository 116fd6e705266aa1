"""The L2 adapter of LMCache's server: ``{"type": "moonpool"}``, or ``{"type": "plugin", "module_path":
"moonpool.connectors.lmcache.adapter", "class_name": "MoonpoolL2Adapter"}``.

The pool pins what lookup_and_lock finds until it is unlocked: no node, this one or another, evicts it before
it is loaded. The pins belong to the connection and end when this process dies.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from moonpool import _native
from moonpool.connectors.lmcache.chunk_format import described
from moonpool.connectors.lmcache.identity import fingerprint, layout_mark, name_of
from moonpool.connectors.lmcache.job_queue import JobQueue
from moonpool.connectors.lmcache.layout_check import ambiguous, bytes_of
from moonpool.connectors.lmcache.listing import Listing
from moonpool.connectors.lmcache.locks import HELD_S, UNASKED_S, Lock, Locks
from moonpool.connectors.lmcache.native import PLUG
from moonpool.connectors.lmcache.parallel_chunks import ParallelChunks
from moonpool.connectors.lmcache.pool import open_pool
from moonpool.connectors.lmcache.settings import Settings
from moonpool.core.errors import Closed, Error, InvalidArgument

log = init_logger("lmcache.moonpool.adapter")
LIST_MAX = 10_000_000
LAYOUTS_MAX = 64  # layouts that are looked up for one key
_STORED, _REFUSED = 0, 2
_AMBIGUOUS = (
    "moonpool: nothing is stored or found: this KV is of a type of 8 bits that LMCache does not name; set "
    'the option "form" to what it is, such as "fp8_e4m3"'
)


def wire_key(key: ObjectKey) -> str:
    """LMCache's own text form of a key, the one that native clients see."""
    text = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
    return f"{text}@{key.cache_salt}" if key.cache_salt else text


def parse_wire_key(text: str) -> EncodedObjectKey | None:
    """The inverse; None for a name that is no key (a digest stands for it)."""
    parts = text.split("@")
    if len(parts) not in (4, 5):
        return None
    try:
        rank, group = int(parts[1], 16), int(parts[2], 16)
    except ValueError:
        return None
    return EncodedObjectKey(parts[3], parts[0], rank, group, parts[4] if len(parts) == 5 else "")


class Names:
    """The names of keys in the pool.

    With a form the key is the name. Without a form the name is ``KEY@@MARK``, with a mark of the layout,
    since LMCache's key has neither type nor shape. A lookup uses the layouts that LMCache passes with it;
    without any, the layouts that this server has seen for the same model and group.
    """

    def __init__(self, form: str) -> None:
        self._marks: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._plain = bool(form)

    def of(self, key: ObjectKey, layout: MemoryLayoutDesc | MemoryObj) -> str | None:
        """None: without a form it is not known what these bytes are."""
        if self._plain:
            return name_of(wire_key(key))
        if isinstance(layout, MemoryLayoutDesc):
            shapes, dtypes = layout.shapes, layout.dtypes
        else:
            shapes, dtypes = described(layout)
        if ambiguous(dtypes):
            return None
        mark = layout_mark(shapes, dtypes)
        self._marks[key.model_name, key.object_group_id].add(mark)
        return name_of(f"{wire_key(key)}@@{mark}")

    def all_of(self, key: ObjectKey) -> list[str]:
        """The name under each layout that was seen."""
        if self._plain:
            return [name_of(wire_key(key))]
        marks = sorted(self._marks.get((key.model_name, key.object_group_id), ()))
        return [name_of(f"{wire_key(key)}@@{mark}") for mark in marks]


class MoonpoolL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """options: those of Settings; ``form`` (see native.MoonpoolClient) is needed here only with a serde, and
    for types of 8 bits that have no name of their own. Eviction is the pool's: no capacity is declared to
    LMCache.

    Raises ConfigError for wrong options, and with ``require_pool`` Unavailable or AuthError.
    """

    def __init__(self, options: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(max_capacity_bytes=0)
        settings = Settings.of_server(options, "adapter_params")
        # l1_memory_desc is not needed: the node's memory is mapped here, not LMCache's there.
        self._names = Names(settings.form)
        self._locks = Locks()
        self._numbers = itertools.count(1)
        self._listing = Listing(self._stored)
        self._ambiguous_said = threading.Event()
        self._chunks = ParallelChunks(settings.threads)
        mark = fingerprint(PLUG, {"form": settings.form})
        self._pool = open_pool(settings, lambda: settings.dial(mark, settings.timeout_s), log=log)
        self._stores: JobQueue[L2StoreResult] = JobQueue("store", create_event_notifier(), log)
        self._lookups: JobQueue[tuple[Bitmap, Lock | None]] = JobQueue(
            "lookup", create_event_notifier(), log, self._expire
        )
        self._loads: JobQueue[Bitmap] = JobQueue("load", create_event_notifier(), log)

    def get_store_event_fd(self) -> int:
        """Readable when a store task has ended."""
        return self._stores.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup task has ended."""
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        """Readable when a load task has ended."""
        return self._loads.notifier.fileno()

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queues a store of ``objects`` under ``keys``, in order. Returns the task id; never waits."""
        number = next(self._numbers)
        self._stores.submit(number, lambda: self._store(keys, objects), L2StoreResult(False, 0))
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of the store tasks that ended since the last call, by task id."""
        return self._stores.take_all()

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        client = self._pool.client
        if client is None:
            return L2StoreResult(False, 0)
        names = [self._named(key, memory) for key, memory in zip(keys, objects, strict=True)]
        if None in names:
            return L2StoreResult(False, 0)
        parts = [bytes_of(memory) for memory in objects]
        try:
            told = self._chunks.run(
                [memory.get_size() for memory in objects],
                lambda first, end: client.put(names[first:end], parts[first:end])[:2],
            )
        except Error as error:
            self._pool.heard(error)
            return L2StoreResult(False, 0)
        outcomes = b"".join(piece for piece, _ in told)
        if _REFUSED in outcomes:
            refusal = next(text for _, text in told if text)
            log.warning("moonpool: not all of %d chunks were stored (%s)", len(keys), refusal)
        held = [i for i, outcome in enumerate(outcomes) if outcome != _REFUSED]
        sizes = [objects[i].get_size() if outcomes[i] == _STORED else 0 for i in held]
        # With size 0: the pool evicts without notice, so a sum of what this server stored would only grow and
        # soon be wrong.
        self._notify_keys_stored([keys[i] for i in held], [0] * len(held))
        return L2StoreResult(_REFUSED not in outcomes, sum(sizes))

    def _named(self, key: ObjectKey, layout: MemoryLayoutDesc | MemoryObj) -> str | None:
        name = self._names.of(key, layout)
        if name is None and not self._ambiguous_said.is_set():
            self._ambiguous_said.set()
            log.warning(_AMBIGUOUS)
        return name

    # Lookup and lock

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Queues a lookup that pins what it finds in the pool. Returns the task id; never waits."""
        number = next(self._numbers)
        self._lookups.submit(
            number, lambda: self._lookup(keys, group_layout_descs), (Bitmap(len(keys)), None)
        )
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """One bit per key of the task, set where it is there and locked; None while it runs. Once."""
        answer = self._lookups.take(task_id)
        if answer is None:
            return None
        found, lock = answer
        if lock is not None:
            self._locks.hold(lock)
        return found

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Ends one lock on each of ``keys``. Never waits."""
        self._locks.release(keys)

    def _expire(self) -> None:
        before = self._locks.expired
        if self._locks.expire() and not before:
            log.warning(
                "moonpool: LMCache gave a lookup up, or did not unlock what it found; its locks end after %d "
                "s, or %d s when the lookup was answered",
                UNASKED_S,
                HELD_S,
            )

    def _lookup(
        self, keys: list[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]
    ) -> tuple[Bitmap, Lock | None]:
        found = Bitmap(len(keys))
        client = self._pool.client
        names: list[str] = []
        owners: list[int] = []
        for i, key in enumerate(keys):
            layout = layouts.get(key.object_group_id)
            named = self._names.all_of(key) if layout is None else [self._named(key, layout)]
            candidates = [name for name in named if name is not None]
            names += candidates
            owners += [i] * len(candidates)
        if client is None or not names:
            return found, None
        try:
            flags, pin = client.pin(names)
        except Error as error:
            self._pool.heard(error)
            return found, None
        hits = sorted({owner for owner, flag in zip(owners, flags, strict=True) if flag == 1})
        found.batched_set(hits)
        return found, None if pin is None else self._locks.add(pin, [keys[i] for i in hits])

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queues a load of ``keys`` into ``objects``, in order. Returns the task id; never waits."""
        number = next(self._numbers)
        self._loads.submit(number, lambda: self._load(keys, objects), Bitmap(len(keys)))
        return number

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """One bit per key of the task, set where it was loaded; None while it runs. Once."""
        return self._loads.take(task_id)

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        loaded = Bitmap(len(keys))
        under: dict[int, tuple[Any, list[int]]] = {}
        for i, key in enumerate(keys):
            pin = self._locks.pin_of(key)
            under.setdefault(id(pin), (pin, []))[1].append(i)
        done = []
        for pin, indices in under.values():
            named = [(i, self._named(keys[i], objects[i])) for i in indices]
            read = [(i, name) for i, name in named if name is not None]
            sizes = self._read(pin, [name for _, name in read], [bytes_of(objects[i]) for i, _ in read])
            done += [i for (i, _), n in zip(read, sizes, strict=True) if n == objects[i].get_size()]
        loaded.batched_set(done)
        if done:
            self._notify_keys_accessed([keys[i] for i in done])
        return loaded

    def _read(self, pin: _native.Pin | None, names: list[str], into: list[Any]) -> Sequence[int | None]:
        """The sizes of what was copied; what the pin does not cover is read as it is now."""
        client = self._pool.client
        if client is None or not names:
            return [None] * len(names)

        def piece(first: int, end: int) -> list[int | None]:
            if pin is not None:
                try:
                    return client.pinned_into(pin, names[first:end], into[first:end])
                except Closed:  # unlocked meanwhile
                    pass
            return client.get_into(names[first:end], into[first:end])

        def fitting(first: int, end: int) -> list[int | None]:
            try:
                return piece(first, end)
            except (
                InvalidArgument
            ):  # one is larger than its buffer: another form, and a miss of this key alone
                if end - first == 1:
                    return [None]
                return [size for i in range(first, end) for size in fitting(i, i + 1)]

        try:
            told = self._chunks.run([_size_of(part) for part in into], fitting)
        except Error as error:
            self._pool.heard(error)
            return [None] * len(names)
        return [size for sizes in told for size in sizes]

    # The rest

    def delete(self, keys: list[ObjectKey]) -> None:
        """Gone at once, for all servers of the pool, in the layouts that this one has seen, or, when it has
        seen none, in all. A server that has them locked reads on."""
        client = self._pool.client
        if client is None:
            return
        try:
            names = [self._names.all_of(key) or self._stored_names(client, key) for key in keys]
            if any(names):
                client.remove([name for each in names for name in each])
        except Error as error:
            self._pool.heard(error)
            return
        gone = [key for key, each in zip(keys, names, strict=True) if each]
        self._notify_keys_deleted(gone, [0] * len(gone))

    def _stored_names(self, client: _native.Client, key: ObjectKey) -> list[str]:
        """As after a restart: no layout was seen yet, so the pool is asked for the names."""
        rows = client.list(f"{wire_key(key)}@@".encode(), LAYOUTS_MAX)
        return [row[0].decode() for row in rows]

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Keys in the pool, whichever server stored them, in order of their names; those of several layouts
        once. The cursor is the last key of the page before."""
        if page_size <= 0:
            raise ValueError(f"page_size must be above 0, not {page_size}")
        prefix = "" if model_name is None else f"{model_name}@"
        try:
            rows, more = self._listing.page(prefix, page_size, cursor)
        except Error as error:
            self._pool.heard(error)
            return KeyListPage((), None)
        return KeyListPage(tuple(KeyEntry(parse_wire_key(text), size) for text, size in rows), more)

    def _stored(self, prefix: str) -> list[tuple[str, int]]:
        """Keys and sizes; what has several layouts once, and no digests."""
        client = self._pool.client
        if client is None:
            return []
        rows = client.list(prefix.encode(), LIST_MAX)
        found = {row[0].decode().partition("@@")[0]: row[1] for row in rows}
        return [(text, size) for text, size in found.items() if parse_wire_key(text) is not None]

    def report_status(self) -> dict[str, Any]:
        """Healthy also without the pool: LMCache's server counts the health of all adapters as its own, and
        it serves without."""
        client = self._pool.client
        return {
            "is_healthy": True,
            "type": "moonpool",
            "pool_connected": client is not None and client.connected,
            "locked_keys": len(self._locks),
            "expired_locks": self._locks.expired,
        }

    def close(self) -> None:
        """Waits for the tasks that run, fails those that wait, ends all locks and disconnects."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        self._chunks.close()
        self._locks.clear()
        self._pool.close()


def _size_of(part: Any) -> int:
    return int(part[1]) if isinstance(part, tuple) else memoryview(part).nbytes
