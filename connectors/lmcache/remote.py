"""The remote connector of LMCache's in-process mode: whole batches between its host memory and the pool, with
no copy in between, by native threads.

Coroutines run on LMCache's storage loop, ``batched_contains`` and the other plain calls on its lookup
threads. An error is a miss here: LMCache then computes.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat, MemoryObj, TensorMemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from moonpool import _native
from moonpool.connectors.lmcache.form import HEADER_BYTES_MAX, Form, described, form_of
from moonpool.connectors.lmcache.identity import fingerprint, name_of
from moonpool.connectors.lmcache.pool import Pool
from moonpool.connectors.lmcache.settings import SCHEME, Settings
from moonpool.core.errors import Error

log = init_logger("lmcache.moonpool.remote")
LIST_MAX = 1_000_000
FINISH_S = 10.0  # for stores that are under way when the engine ends
_PLUGIN = f"plugin://{SCHEME}"
_OPTIONS = "remote_storage_plugin."
# Where to find our class: LMCache's own options, beside ours under the same prefix.
_NOT_OURS = ("module_path", "class_name")


class MoonpoolAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector for ``moonpool://...`` and for ``remote_storage_plugins: ["moonpool"]``."""

    def __init__(self) -> None:
        super().__init__(f"{SCHEME}://")

    def can_parse(self, url: str) -> bool:
        return bool(super().can_parse(url)) or url == _PLUGIN or url.startswith(f"{_PLUGIN}.")

    def create_connector(self, context: ConnectorContext) -> MoonpoolConnector:
        """Raises IrrecoverableException, which LMCache lets through, for wrong options, and without a node
        where one is required.
        """
        try:
            return MoonpoolConnector(context, settings_of(context))
        except Error as error:
            raise IrrecoverableException(str(error)) from error


def settings_of(context: ConnectorContext) -> Settings:
    """From the URL, or from the options of the plugin: those of its instance before those of its type.

    Raises ConfigError."""
    if not context.url.startswith("plugin://"):
        return Settings.from_url(context.url)
    extra = (context.config.extra_config if context.config is not None else None) or {}
    name = context.url.removeprefix("plugin://")
    given: dict[str, object] = {}
    for owner in dict.fromkeys((SCHEME, name)):
        prefix = f"{_OPTIONS}{owner}."
        for key, value in extra.items():
            option = key.removeprefix(prefix)
            if key != option and "." not in option and option not in _NOT_OURS:
                given[option] = value
    return Settings.parse(given, f"{_OPTIONS}{SCHEME}")


def identity(config: Any, metadata: Any) -> bytes:
    """What must be equal before chunks are shared, beside LMCache's own key; the same in all processes of an
    engine, so nothing that only a worker knows."""
    return fingerprint(
        "remote",
        {
            "model": metadata.model_name,
            "world_size": metadata.world_size,
            "kv_dtype": str(metadata.kv_dtype).removeprefix("torch."),
            "kv_shape": [int(n) for n in metadata.kv_shape],
            "chunk_tokens": int(config.chunk_size),
            "mla": bool(metadata.use_mla),
            "layerwise": bool(config.use_layerwise),
            "serde": str(config.remote_serde),
            "hash": str(config.pre_caching_hash_algorithm),
        },
    )


class MoonpoolConnector(RemoteConnector):  # type: ignore[misc]
    """One for each RemoteBackend of LMCache.

    Pings are not answered on purpose: LMCache's health monitor would then stop its own cache in host memory,
    too, while the pool is away.
    """

    def __init__(self, context: ConnectorContext, settings: Settings) -> None:
        """Raises Unavailable without a node, AuthError for a wrong token, only where the pool is required."""
        super().__init__(context.config, context.metadata)
        self._loop: asyncio.AbstractEventLoop = context.loop
        self._memory = context.local_cpu_backend
        self._waiting: dict[int, asyncio.Future[tuple[bool, str, list[bool] | None]]] = {}
        self._idle = threading.Event()
        self._idle.set()
        self._refusal = ""
        self._batches = _native.BatchClient(threads=settings.threads)
        mark = identity(context.config, context.metadata)
        self._pool = Pool(
            lambda: settings.dial(mark, settings.timeout_s),
            self._batches.attach,
            address=str(settings.socket()),
            log=log,
            required=settings.require_pool,
        )
        self._memory.close = self._before_memory_is_freed(self._memory.close)
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._batches.event_fd(), self._collect)
        log.info(
            "moonpool: chunks of %d bytes, fingerprint %s, tenant %s, namespace %s, pool %s",
            self.full_chunk_size_bytes,
            mark.hex()[:16],
            settings.tenant,
            settings.namespace,
            settings.socket(),
        )

    def _before_memory_is_freed(self, free: Callable[[], None]) -> Callable[[], None]:
        """LMCache frees its host memory before it closes its remote backends, so this must be hooked: native
        threads may still read from it."""

        def close() -> None:
            self._idle.wait(FINISH_S)
            self._batches.close()  # waits for what is being copied now, and drops the rest
            free()

        return close

    # Is it there

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: builtins.list[CacheEngineKey]) -> int:
        """How many leading keys the pool has."""
        client = self._pool.client
        if client is None:
            return 0
        try:
            flags = client.exists(_names(keys))
        except Error as error:
            self._pool.heard(str(error))
            return 0
        self._pool.heard("")
        return next((i for i, flag in enumerate(flags) if flag != 1), len(keys))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.batched_contains([key]) == 1

    async def exists(self, key: CacheEngineKey) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    async def batched_async_contains(
        self, lookup_id: str, keys: builtins.list[CacheEngineKey], pin: bool = False
    ) -> int:
        _, _, found = await self._ended(self._batches.submit_batch_exists(_names(keys)))
        return (found or [False]).index(False) if not all(found or [False]) else len(keys)

    # Put

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: builtins.list[MemoryObj]
    ) -> None:
        """Stores all that the pool takes. What it refuses, or does not answer, is said once in the log."""
        parts = [[_form(memory).header(), _bytes_of(memory)] for memory in memory_objs]
        for memory in memory_objs:
            memory.ref_count_up()  # ours until the batch has ended, also when the caller is cancelled before
        ok, error, _ = await self._ended(self._batches.submit_batch_set(_names(keys), parts), memory_objs)
        for memory in memory_objs:
            memory.ref_count_down()
        if not ok and error != self._refusal:
            log.warning("moonpool: not all of %d chunks were stored (%s)", len(keys), error)
        self._refusal = "" if ok else error

    # Get

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: builtins.list[CacheEngineKey]) -> builtins.list[MemoryObj | None]:
        """Of each key its chunk, or None. Full chunks are copied by one native call; what has another form
        (the last chunk of a prompt, a layer, a compressed one) is looked at first."""
        found: builtins.list[MemoryObj | None] = [None] * len(keys)
        if self._pool.client is None:
            return found
        rest = builtins.list(range(len(keys)))
        if not any(hasattr(key, "layer_id") for key in keys):
            rest = await self._get_full(keys, found)
        for i in rest:
            found[i] = await self._get_any(keys[i])
        return found

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: builtins.list[CacheEngineKey]
    ) -> builtins.list[MemoryObj]:
        """The leading chunks that are there; the others are given back."""
        found = await self.batched_get(keys)
        first_miss = next((i for i, memory in enumerate(found) if memory is None), len(found))
        for memory in found[first_miss:]:
            if memory is not None:
                memory.ref_count_down()
        return [memory for memory in found[:first_miss] if memory is not None]

    async def _get_full(
        self, keys: builtins.list[CacheEngineKey], found: builtins.list[MemoryObj | None]
    ) -> builtins.list[int]:
        """Fills in full chunks; which keys are still open. What LMCache has no memory for is a miss."""
        memory_objs = []
        for _ in keys:
            memory = self._allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
            if memory is None:
                break
            memory_objs.append(memory)
        if not memory_objs:
            return []
        expected = _form(memory_objs[0]).header()
        heads = [bytearray(len(expected)) for _ in memory_objs]
        parts = [[head, _bytes_of(memory)] for head, memory in zip(heads, memory_objs, strict=True)]
        number = self._batches.submit_batch_get(_names(keys[: len(memory_objs)]), parts)
        _, _, ok = await self._ended(number, memory_objs)
        rest = []
        for i, memory in enumerate(memory_objs):
            if ok is not None and ok[i] and heads[i] == expected:
                found[i] = memory
            else:
                memory.ref_count_down()
                rest.append(i)
        return rest

    async def _get_any(self, key: CacheEngineKey) -> MemoryObj | None:
        """A chunk of whatever form; None for one that this engine cannot have stored."""
        form = await self._loop.run_in_executor(None, self._look, name_of(key.to_string()))
        if form is None or not self._could_be_ours(key, form):
            return None
        memory = self._room_for(form)
        if memory is None:
            return None
        head = bytearray(form.header_bytes)
        into = memory.raw_data if isinstance(memory, BytesBufferMemoryObj) else _bytes_of(memory)
        number = self._batches.submit_batch_get([name_of(key.to_string())], [[head, into]])
        _, _, ok = await self._ended(number, [memory])
        if not ok or not ok[0] or head != form.header():
            memory.ref_count_down()
            return None
        return memory

    def _look(self, name: str) -> Form | None:
        """Reads a header in place."""
        client = self._pool.client
        try:
            view = client.get_views([name])[0] if client is not None else None
        except Error as error:
            self._pool.heard(str(error))
            return None
        return None if view is None else Form.parse(view[:HEADER_BYTES_MAX], len(view))

    def _could_be_ours(self, key: CacheEngineKey, form: Form) -> bool:
        """Plain bytes are a serde's, which is in the fingerprint. Tensors must have our types, and our shapes
        but for the number of tokens."""
        if form.memory_format in (MemoryFormat.BINARY.value, MemoryFormat.BINARY_BUFFER.value):
            return True
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.meta_dtypes]
        if hasattr(key, "layer_id"):
            return len(form.groups) == 1 and form.groups[0][0] == dtypes[0]
        if form.memory_format != self.meta_fmt.value or [name for name, _ in form.groups] != dtypes:
            return False
        return all(
            len(shape) == 4 and (*shape[:2], shape[3]) == (*ours[:2], ours[3]) and shape[2] <= ours[2]
            for (_, shape), ours in zip(form.groups, self.meta_shapes, strict=True)
        )

    def _room_for(self, form: Form) -> MemoryObj | None:
        import torch

        memory_format = MemoryFormat(form.memory_format)
        if memory_format in (MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER):
            return BytesBufferMemoryObj(bytearray(form.size))
        memory = self._allocate(
            [torch.Size(shape) for _, shape in form.groups],
            [getattr(torch, name) for name, _ in form.groups],
            memory_format,
        )
        if memory is not None and memory.get_size() != form.size:
            memory.ref_count_down()
            return None
        return memory

    def _allocate(self, shapes: Any, dtypes: Any, memory_format: Any) -> MemoryObj | None:
        # Not waiting for room: it would be made on this very loop.
        return self._memory.allocate(shapes, dtypes, memory_format, busy_loop=False)

    # The rest

    def remove_sync(self, key: CacheEngineKey) -> bool:
        client = self._pool.client
        try:
            return client is not None and client.remove(_names([key])) == b"\1"
        except Error as error:
            self._pool.heard(str(error))
            return False

    async def list(self) -> builtins.list[str]:
        """All keys of this model in the pool, whoever stored them."""
        client = self._pool.client
        if client is None:
            return []
        rows = await self._loop.run_in_executor(None, client.list, b"", LIST_MAX)
        return [row[0].decode() for row in rows]

    async def close(self) -> None:
        """Waits for what is being copied; what has not begun is a miss."""
        self._loop.remove_reader(self._batches.event_fd())
        await self._loop.run_in_executor(None, self._batches.close)
        for future in self._waiting.values():
            if not future.done():
                future.set_result((False, "this connector was closed", None))
        self._waiting.clear()
        await self._loop.run_in_executor(None, self._pool.close)

    async def _ended(
        self, number: int, held: Sequence[MemoryObj] = ()
    ) -> tuple[bool, str, builtins.list[bool] | None]:
        """What became of a batch. Native threads use its memory until then, so a caller that is cancelled
        leaves ``held`` to be given back when the batch has ended."""
        future = self._loop.create_future()
        self._waiting[number] = future
        self._idle.clear()
        try:
            ok, error, found = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda _: [memory.ref_count_down() for memory in held])
            raise
        self._pool.heard("" if ok or found is None else error)
        return ok, error, found

    def _collect(self) -> None:
        for number, ok, error, found in self._batches.drain_completions():
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_result((ok, error, found))
        if not self._waiting:
            self._idle.set()


def _names(keys: Sequence[CacheEngineKey]) -> list[str]:
    return [name_of(key.to_string()) for key in keys]


def _form(memory: MemoryObj) -> Form:
    return form_of(memory.get_memory_format().value, *described(memory), memory.get_size())


def _bytes_of(memory: MemoryObj) -> Any:
    """Where the bytes lie: an address and a length, or a buffer."""
    if isinstance(memory, TensorMemoryObj):
        return memory.data_ptr, memory.get_size()
    return memory.byte_array
