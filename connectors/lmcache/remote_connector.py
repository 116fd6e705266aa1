"""The remote connector of LMCache's in-process mode: whole batches between its host memory and the pool, with
no copy in between, by native threads; or chunks in place, without even that (lent).

Coroutines run on LMCache's storage loop, ``batched_contains`` and the other plain calls on its lookup
threads. An error is a miss here: LMCache then computes.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from lmcache import torch_device_type
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from moonpool import _native
from moonpool.connectors.lmcache import lora, vllm_engine
from moonpool.connectors.lmcache.chunk_format import HEADER_BYTES_MAX, ChunkFormat, chunk_format_of, described
from moonpool.connectors.lmcache.identity import name_of, remote_identity
from moonpool.connectors.lmcache.layout_check import LayoutCheck, ambiguous, bytes_of
from moonpool.connectors.lmcache.lora import tagged
from moonpool.connectors.lmcache.pinned_chunks import PinnedChunks, refusal
from moonpool.connectors.lmcache.pool import open_pool
from moonpool.connectors.lmcache.settings import Settings
from moonpool.connectors.lmcache.vllm_engine import identity_with
from moonpool.connectors.lmcache.zero_copy import ZeroCopy
from moonpool.connectors.weights import Pending, wait_for
from moonpool.core.errors import Error

log = init_logger("lmcache.moonpool.remote")
LIST_MAX = 1_000_000
FINISH_S = 10.0  # for stores that are under way when the engine ends
FULL = "@@full"  # behind the name of a full chunk as the fingerprint has it: it needs no header
ZERO_COPY_SHARE = 4  # views pin at most one part in this many of the node's memory


class MoonpoolConnector(RemoteConnector):  # type: ignore[misc]
    """One for each RemoteBackend of LMCache.

    Pings are not answered on purpose: LMCache's health monitor would then stop its own cache in host memory,
    too, while the pool is away.
    """

    def __init__(self, context: ConnectorContext, settings: Settings) -> None:
        """Raises Unavailable without a node, AuthError for a wrong token, only where the pool is required."""
        config, metadata = context.config, context.metadata
        super().__init__(config, metadata)
        self._loop: asyncio.AbstractEventLoop = context.loop
        self._memory = context.local_cpu_backend  # None in a process that only looks up
        self._layout = LayoutCheck(config, metadata)
        self._form = settings.form
        self._plain = config.remote_serde == "naive"
        # With local_cpu LMCache keeps what it gets in its own cache; blending writes into it.
        self._may_lend = (
            torch_device_type == "cpu"
            and self._plain
            and not (config.local_cpu or config.enable_blending or config.enable_pd)
        )
        self._zero_copy = ZeroCopy(0)
        self._waiting: dict[int, asyncio.Future[tuple[bool, str, list[bool] | None]]] = {}
        self._idle = threading.Event()
        self._idle.set()
        self._refusal = ""
        self._apart = False
        self._lora, self._lora_said = lora.serves_lora(), False
        self._batches = _native.BatchClient(threads=settings.threads)
        self._mark = b""
        engine, role = vllm_engine.current(), getattr(metadata, "role", None)
        self._pinned = self._pinned_chunks(context, settings.gpu_pin, engine)

        def mark() -> bytes:
            found = identity_with(engine, role)
            self._mark = remote_identity(config, metadata, settings.form, found)
            return self._mark

        try:
            wait_for(mark, _say) if settings.require_pool else mark()
        except Pending as pending:
            _say(f"{pending}; LMCache goes on without the pool until then")
        except Error as error:
            if settings.require_pool:
                raise
            self._apart = True
            self._mark = remote_identity(config, metadata, settings.form)
            log.warning("moonpool: nothing is stored or retrieved: %s", error)
        self._pool = open_pool(
            settings,
            lambda: settings.dial(self._mark or mark(), settings.timeout_s),
            log=log,
            on_joined=self._joined,
            on_left=self._batches.detach,
        )
        self._pin()
        if self._memory is not None:
            self._free_memory = self._memory.close
            self._close_hook = self._before_memory_is_freed
            self._memory.close = self._close_hook
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._batches.event_fd(), self._collect)
        log.info(
            "moonpool: chunks of %d bytes, fingerprint %s, tenant %s, namespace %s, pool %s",
            self.full_chunk_size_bytes,
            self._mark.hex()[:16] or "to be known",
            settings.tenant,
            settings.namespace,
            settings.socket(),
        )

    def _pinned_chunks(self, context: ConnectorContext, wanted: int, engine: Any) -> PinnedChunks | None:
        if not wanted or self._memory is None:
            return None
        if why := refusal(context.config, context.metadata, engine, torch_device_type):
            log.warning("moonpool: gpu_pin has no effect: %s", why)
            return None
        return PinnedChunks(context.metadata.local_worker_id, wanted, log)

    def _pin(self) -> None:
        """Of the node that this engine found at its start: later, its CUDA calls would wait."""
        if self._pinned is not None and self._pinned.pin(self._pool.client):
            arena_bytes = self._pool.ask(lambda client: client.stat()["arena_bytes"], 0)
            self._zero_copy.bytes_max = arena_bytes // ZERO_COPY_SHARE

    def _joined(self, client: _native.Client) -> None:
        if self._may_lend:
            self._zero_copy.bytes_max = client.stat()["arena_bytes"] // ZERO_COPY_SHARE
        self._batches.attach(client)

    def _before_memory_is_freed(self) -> None:
        """LMCache frees its host memory before it closes its remote backends, so this must be hooked: native
        threads may still read from it."""
        if self._loop.is_running():
            with contextlib.suppress(
                Exception
            ):  # every call handed to the loop before this one has begun by then
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(1)
        self._idle.wait(FINISH_S)
        self._batches.close()  # waits for the copies under way and drops the rest
        self._free_memory()

    # Is it there

    def support_batched_contains(self) -> bool:
        """True: one question for many keys."""
        return True

    def batched_contains(self, keys: builtins.list[CacheEngineKey]) -> int:
        """How many leading keys the pool has."""
        if self._pool.client is None or self._is_ambiguous(keys):
            return 0
        flags = self._pool.ask(lambda client: client.exists(_both_names(keys)), b"")
        return _leading([flag == 1 for flag in flags])

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether the pool has ``key``. Waits for the node; False when it does not answer."""
        return self.batched_contains([key]) == 1

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the pool has ``key``. False when the node does not answer."""
        return await self.batched_async_contains("", [key]) == 1

    async def batched_async_contains(
        self, lookup_id: str, keys: builtins.list[CacheEngineKey], pin: bool = False
    ) -> int:
        """How many leading keys the pool has; 0 when the node does not answer. lookup_id, pin: unused."""
        if self._is_ambiguous(keys):
            return 0
        _, _, found = await self._ended(self._batches.submit_batch_exists(_both_names(keys)))
        return _leading(found or [])

    # Put

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Stores one chunk; see ``batched_put``."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """True: one call for many chunks."""
        return True

    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: builtins.list[MemoryObj]
    ) -> None:
        """Stores all chunks that the pool accepts. The log has the reason of a refusal once."""
        if self._is_ambiguous(keys):
            return
        forms = [_form(memory) for memory in memory_objs]
        names = [
            _full_name(key) if form == self._layout.told else _name(key)
            for key, form in zip(keys, forms, strict=True)
        ]
        parts = [
            bytes_of(memory) if form == self._layout.told else [form.header(), bytes_of(memory)]
            for form, memory in zip(forms, memory_objs, strict=True)
        ]
        number = self._batches.submit_batch_set(names, parts)
        for memory in memory_objs:
            memory.ref_count_up()  # ours until the batch has ended, also when the caller is cancelled before
        ok, error, _ = await self._ended(number, memory_objs)
        for memory in memory_objs:
            memory.ref_count_down()
        self._say_refusal("" if ok else f"not all of {len(keys)} chunks were stored ({error})")

    def _is_ambiguous(self, keys: Sequence[CacheEngineKey]) -> bool:
        """Whether what these keys stand for may be other KV than what this engine means by them. LMCache may
        learn of a type that has no name of its own only at its first transfer."""
        if self._apart:
            return True
        if self._lora and not all(tagged(key) for key in keys):
            if not self._lora_said:
                self._lora_said = True
                log.warning("moonpool: %s", lora.SENTENCE)
            return True
        if self._form or not ambiguous(self._layout.dtypes):
            return False
        self._say_refusal(
            "nothing is stored or retrieved: some layers are of a type of 8 bits that LMCache does not name; "
            'set the option "form" to what they are'
        )
        return True

    def _say_refusal(self, text: str) -> None:
        if text and text != self._refusal:
            log.warning("moonpool: %s", text)
        self._refusal = text

    # Get

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """One chunk as a memory object of LMCache, or None; see ``batched_get``."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """True: one call for many chunks."""
        return True

    async def batched_get(self, keys: builtins.list[CacheEngineKey]) -> builtins.list[MemoryObj | None]:
        """For each key its chunk, or None. One native call reads the full chunks; two more read all that have
        a header: the last chunk of a prompt, compressed ones, and full ones of several groups."""
        found: builtins.list[MemoryObj | None] = [None] * len(keys)
        if self._pool.client is None or self._memory is None or self._is_ambiguous(keys):
            return found
        try:
            rest = builtins.list(range(len(keys)))
            if self._plain and self._layout.full() == self._layout.told:
                rest = await self._get_full(keys, found)
            if rest:
                await self._get_rest(keys, rest, found)
        except BaseException:  # a caller that gives up, most of all
            _give_back(found)
            raise
        return found

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: builtins.list[CacheEngineKey]
    ) -> builtins.list[MemoryObj]:
        """The leading chunks that are there; the others are given back."""
        found = await self.batched_get(keys)
        first_miss = next((i for i, memory in enumerate(found) if memory is None), len(found))
        _give_back(found[first_miss:])
        return [memory for memory in found[:first_miss] if memory is not None]

    async def _get_full(
        self, keys: builtins.list[CacheEngineKey], found: builtins.list[MemoryObj | None]
    ) -> builtins.list[int]:
        """Fills in full chunks; which keys are still open. What LMCache has no memory for is a miss."""
        names = [_full_name(key) for key in keys]
        lent = min(self._zero_copy.room_for(self._layout.told.size), len(names))
        if lent:
            views = await self._views(names[:lent], self._pinned)
            if views is None:
                return []
            for i, view in enumerate(views):
                if view is not None and len(view) == self._layout.told.size:
                    found[i] = self._zero_copy.lend(view, self._layout.told, self._layout.memory_format)
        # Of the pinned part nothing means that it lies elsewhere; of the whole pool, that it is not there.
        copied = [
            i for i in range(len(names)) if found[i] is None and (i >= lent or self._pinned is not None)
        ]
        memory_objs: builtins.list[MemoryObj] = []
        for _ in copied:
            memory = self._allocate(self._layout.shapes, self._layout.dtypes, self._layout.memory_format)
            if memory is None:
                break
            memory_objs.append(memory)
        places, without_memory = copied[: len(memory_objs)], set(copied[len(memory_objs) :])
        if memory_objs:
            buffers = [bytes_of(memory) for memory in memory_objs]
            if not await self._copy([names[i] for i in places], buffers, memory_objs, places, found):
                return []
        return [i for i in range(len(names)) if found[i] is None and i not in without_memory]

    async def _get_rest(
        self,
        keys: builtins.list[CacheEngineKey],
        rest: builtins.list[int],
        found: builtins.list[MemoryObj | None],
    ) -> None:
        """Chunks with a header; a miss where this engine cannot have stored such a one."""
        views = await self._views([_name(keys[i]) for i in rest])
        places, names, buffers, heads, memory_objs = [], [], [], [], []
        for i, view in zip(rest, views or (), strict=False):
            form = None if view is None else ChunkFormat.parse(view[:HEADER_BYTES_MAX], len(view))
            if form is None or not self._layout.could_be(form):
                continue
            memory = self._room_for(form)
            if memory is None:
                break
            into = memory.raw_data if isinstance(memory, BytesBufferMemoryObj) else bytes_of(memory)
            places.append(i)
            names.append(_name(keys[i]))
            heads.append((bytearray(form.header_bytes), form.header()))
            buffers.append([heads[-1][0], into])
            memory_objs.append(memory)
        del views  # they are pins
        if not memory_objs:
            return
        await self._copy(names, buffers, memory_objs, places, found)
        for i, (head, wanted) in zip(places, heads, strict=True):
            memory = found[i]
            if memory is not None and head != wanted:  # another one by now
                memory.ref_count_down()
                found[i] = None

    async def _copy(
        self,
        names: builtins.list[str],
        buffers: builtins.list[Any],
        memory_objs: builtins.list[MemoryObj],
        places: Sequence[int],
        found: builtins.list[MemoryObj | None],
    ) -> bool:
        """Copies each object into its memory and puts that in its place, or gives it back. False: the pool
        did not answer, so asking for more would only wait."""
        try:
            number = self._batches.submit_batch_get(names, buffers)
        except BaseException:
            _give_back(memory_objs)
            raise
        answered, _, ok = await self._ended(number, memory_objs)
        for i, memory, came in zip(places, memory_objs, ok or [False] * len(memory_objs), strict=True):
            if came:
                found[i] = memory
            else:
                memory.ref_count_down()
        return answered

    async def _views(
        self, names: builtins.list[str], pinned: PinnedChunks | None = None
    ) -> builtins.list[memoryview | None] | None:
        """For each object its bytes in place, pinned while the view lives; None: the pool did not answer.
        pinned: only of what lies there."""
        return await self._loop.run_in_executor(
            None,
            self._pool.ask,
            lambda client: pinned.views(names) if pinned else builtins.list(client.get_views(names)),
            None,
        )

    def _room_for(self, form: ChunkFormat) -> MemoryObj | None:
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
        """Removes a chunk from the pool. Whether it was there; False when the node does not answer."""
        return self._pool.ask(lambda client: b"\1" in client.remove(_both_names([key]))[0], False)

    async def list(self) -> builtins.list[str]:
        """All keys of this model in the pool, whichever process stored them."""
        rows = await self._loop.run_in_executor(
            None, self._pool.ask, lambda client: client.list(b"", LIST_MAX), []
        )
        return sorted({row[0].decode().removesuffix(FULL) for row in rows})

    async def close(self) -> None:
        """Waits for the copies under way; operations that have not begun are misses."""
        self._loop.remove_reader(self._batches.event_fd())
        await self._loop.run_in_executor(None, self._batches.close)
        for future in self._waiting.values():
            if not future.done():
                future.set_result((False, "this connector was closed", None))
        self._waiting.clear()
        self._idle.set()  # a thread that frees the memory now need not wait
        if self._memory is not None and self._memory.close is self._close_hook:
            self._memory.close = self._free_memory
        if self._pinned is not None:
            self._pinned.close()
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
        return ok, error, found

    def _collect(self) -> None:
        for number, ok, error, found in self._batches.drain_completions():
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_result((ok, error, found))
            if error and not self._batches.attached:
                self._pool.failed(error)
        if not self._waiting:
            self._idle.set()


def _say(text: str) -> None:
    log.info("moonpool: %s", text)


def _name(key: CacheEngineKey) -> str:
    return name_of(key.to_string())


def _full_name(key: CacheEngineKey) -> str:
    return name_of(key.to_string() + FULL)


def _both_names(keys: Sequence[CacheEngineKey]) -> list[str]:
    return [name for key in keys for name in (_full_name(key), _name(key))]


def _leading(flags: Sequence[bool]) -> int:
    """How many leading keys are there, under one name or the other."""
    either = [full or other for full, other in zip(flags[::2], flags[1::2], strict=True)]
    return next((i for i, there in enumerate(either) if not there), len(either))


def _give_back(found: Sequence[MemoryObj | None]) -> None:
    for memory in found:
        if memory is not None:
            memory.ref_count_down()


def _form(memory: MemoryObj) -> ChunkFormat:
    return chunk_format_of(memory.get_memory_format().value, *described(memory), memory.get_size())
