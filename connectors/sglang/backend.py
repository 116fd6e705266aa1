"""``MoonpoolHiCache``: what SGLang's HiCache calls as its third tier. One question for a prefix, pages moved
between its host memory and the pool without a copy in between, and never an exception into the engine.

Every call comes from one of SGLang's storage threads and may wait; what the pool does not answer is a miss.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.objects import Refused, first_head, holds_first_copy, object_names, suffixes_of
from moonpool.connectors.sglang import compat, updates
from moonpool.connectors.sglang.identity import draft_revision, identity, serves_lora
from moonpool.connectors.sglang.layout import PageLayout, object_ranges, read_layout, rows
from moonpool.connectors.sglang.metrics import Tally
from moonpool.connectors.sglang.pool import NO_POOL, PoolClient, PoolConnection
from moonpool.connectors.sglang.settings import Settings
from moonpool.connectors.sglang.sidecars import (
    Parts,
    Sidecar,
    is_draft,
    read_sidecar,
    restorable,
    tells_its_layers,
)
from moonpool.connectors.weights import Pending, wait_for
from moonpool.core.errors import ConfigError, Error
from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES, Ranges, fingerprint
from moonpool.core.store.store import Store
from moonpool.core.store.types import presences, put_results

Result = TypeVar("Result")
Pages = npt.NDArray[np.uint32]
GIGA = 1e9


@dataclass(frozen=True)
class Memory:
    """This rank's host memory, and how a page is cut into objects."""

    layout: PageLayout
    ranges: tuple[Ranges, ...]
    table: _native.PartTable
    saves: bool

    @property
    def width(self) -> int:
        """Objects of a page."""
        return len(self.ranges)

    def names(self, keys: Sequence[str]) -> bytes:
        """The names of the objects of these pages, page by page. Raises ValueError for a key that is no
        SHA-256 in hexadecimal, as all of SGLang's page keys are."""
        digests = bytes.fromhex("".join(keys))
        if set(map(len, keys)) - {2 * DIGEST_BYTES}:
            raise ValueError(f"a page key has {2 * DIGEST_BYTES} hexadecimal digits, not {keys[0]!r:.80}")
        return object_names(digests, suffixes_of(self.ranges)).tobytes()

    def places(self, keys: Sequence[str], host_indices: Any) -> tuple[Pages, npt.NDArray[np.uint16]]:
        """(page, column) of each object of these pages.

        host_indices: SGLang's slots, those of a page side by side.

        Raises ValueError for slots that are not whole pages of the memory.
        """
        tokens = self.layout.tokens
        slots = np.asarray(host_indices, np.int64)
        if slots.size != len(keys) * tokens:
            raise ValueError(f"{slots.size} slots for {len(keys)} pages of {tokens} tokens")
        first = slots.reshape(len(keys), tokens)[:, 0]
        if first.size and (
            first.min() < 0 or first.max() >= self.layout.pages * tokens or (first % tokens).any()
        ):
            raise ValueError("a page begins outside the host memory, or not at a page's first slot")
        pages = np.repeat((first // tokens).astype(np.uint32), self.width)
        return pages, np.tile(np.arange(self.width, dtype=np.uint16), len(keys))

    def whole(self, ok: bytes, pages: int) -> list[bool]:
        """For each page, whether all of its objects are ``ok``; False for an answer of the wrong length."""
        if len(ok) != pages * self.width:
            return [False] * pages
        objects = np.frombuffer(ok, np.bool_).reshape(pages, self.width)
        good: list[bool] = np.logical_and.reduce(objects, axis=1).tolist()
        return good


class MoonpoolHiCache(compat.Storage):
    """Made by SGLang's ``dynamic`` backend; ``storage_config`` is its HiCacheStorageConfig."""

    def __init__(self, storage_config: Any, options: object = None) -> None:
        """Raises ConfigError for options that are wrong: the user is there to mend them."""
        self._log = compat.logger("hicache")
        self._config = storage_config
        self._settings = Settings.parse(storage_config.extra_config or {})
        self._tally = Tally(exported=bool(storage_config.enable_storage_metrics))
        self._memory: Memory | None = None
        self._pool: PoolConnection | None = None
        self._sidecars: dict[str, Sidecar] = {}
        self._mark = b""
        self._refusal = ""
        self._stats_lock = threading.Lock()
        self._stats = compat.StorageMetrics()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Reads the layout of the memory and connects. An engine that cannot use the pool logs one sentence
        and serves without it; with ``require_pool`` it raises."""
        super().register_mem_pool_host(mem_pool_host)
        try:
            self._join(mem_pool_host)
        except Exception as error:  # also what a newer SGLang's arguments or memory make of our questions
            self._leave(error)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside the KV. If it cannot be stored, nothing is: half a model is of no use."""
        name = _plain_name(host_pool_name)
        if name == "kv" or self._memory is None:
            return
        try:
            if self._config.pp_size > 1 and not tells_its_layers(name):
                raise Refused(
                    f"the KV of a model with a pool {name!r} does not tell which of the model's layers a "
                    f"pipeline stage has; use --pp-size 1"
                )
            draft = draft_revision(compat.server_args()) if is_draft(name) else ""
            page = compat.first_page(host_pool)
            self._sidecars[name] = read_sidecar(name, host_pool, self._config, page, draft)
        except Exception as error:
            self._leave(error)

    def weights_replaced(self) -> None:
        """Called by ``updates`` before the engine's weights change. Waits for calls under way."""
        if self._pool is not None:
            self._log.warning("moonpool: this engine leaves the pool: %s", updates.SENTENCE)
        try:
            self.close()
        except Exception:  # it is left all the same, and SGLang's scheduler would end
            self._log.exception("moonpool: an unexpected error while the pool was left")

    def _leave(self, error: Exception) -> None:
        """Called where ``error`` is handled."""
        self.close()
        if self._settings.require_pool:
            raise error
        kind = "" if isinstance(error, Refused | Error | OSError) else f"{type(error).__name__}: "
        self._log.warning("moonpool: this engine serves without the pool: %s%s", kind, error)

    def _join(self, host: Any) -> None:
        args = compat.server_args()
        self._check_keys(args)
        if (updater := compat.weight_updater()) is None:
            raise Refused(
                "this SGLang does not have its weights replaced where moonpool looks for it; use SGLang "
                "0.5.18 to 0.5.23, or a newer moonpool"
            )
        updates.watch(updater)
        updates.follow(self)
        model = compat.model_config(args)
        self._memory = self._read(host, 1 if self._config.is_mla_model else model.get_total_num_kv_heads())
        required, memory = self._settings.require_pool, self._memory
        socket = str(self._settings.socket())

        def mark() -> bytes:
            self._mark = fingerprint(identity(args, model, host))
            self._log.info(
                "moonpool: pages of %d bytes in %d objects, fingerprint %s, tenant %s, namespace %s, pool %s",
                memory.layout.bytes_per_page,
                memory.width,
                self._mark.hex()[:16],
                self._settings.tenant,
                self._settings.namespace,
                socket,
            )
            return self._mark

        with contextlib.suppress(Pending):  # the dial reports it; other errors are refusals
            wait_for(mark, functools.partial(self._log.info, "moonpool: %s")) if required else mark()
        self._pool = PoolConnection(
            lambda: PoolClient.dial(self._settings, self._mark or mark()), address=socket, log=self._log
        )
        self._pool.open(required=required)

    def _check_keys(self, args: Any) -> None:
        if compat.keys_have_namespaces():
            return
        if serves_lora(args):
            raise Refused(
                "the page keys of this SGLang leave LoRA adapters out, so their KV would be taken for each "
                "other's; start it without --enable-lora and --lora-paths, or use SGLang 0.5.23"
            )
        self._log.info("moonpool: the page keys of this SGLang leave cache_salt and extra_key out")

    def _read(self, host: Any, kv_heads: int) -> Memory:
        config = self._config
        if config.attn_cp_size > 1 or getattr(config, "dcp_size", 1) > 1:
            raise Refused("the pool does not know context parallelism yet")
        layout = read_layout(host)
        if config.pp_rank > 0 and layout.first_layer == 0:
            raise Refused(
                f"the KV of pipeline stage {config.pp_rank} says that it begins with the model's first "
                f"layer, so its pages would have the names of stage 0's; use --pp-size 1"
            )
        split = (kv_heads, layout.heads, config.tp_rank, config.tp_size)
        first = 0 if config.is_mla_model else first_head(*split)
        ranges = object_ranges(layout, kv_heads=kv_heads, first_head=first)
        table = _native.PartTable([rows(layout, each, first_head=first) for each in ranges])
        return Memory(layout, ranges, table, config.is_mla_model or holds_first_copy(*split))

    # What SGLang asks for, page by page

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages of ``keys`` the pool has, in all their objects: one question."""

        def ask(memory: Memory, client: PoolClient) -> int:
            names = memory.names(keys)
            answer = client.lookups.run(lambda w: w.submit_prefix(names, BLOCK_NAME_BYTES, memory.width))
            client.lookups.release(answer.pin_id)
            self._heard_lookup(answer.error, answer.why, whole=answer.blocks == len(keys))
            self._tally.add("hit_pages", answer.blocks)
            return int(answer.blocks)

        self._tally.add("lookups")
        self._tally.add("lookup_pages", len(keys))
        return self._call("lookup", ask, 0) if keys else 0

    def exists(self, key: str) -> bool:
        """Whether the pool has the page."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Loads pages into the slots ``host_indices``. Returns for each page whether all of its bytes were
        loaded. Loads read pinned objects, so a page that is evicted meanwhile is either whole or missing."""

        def load(memory: Memory, client: PoolClient) -> list[bool]:
            names = memory.names(keys)
            pages, columns = memory.places(keys, host_indices)
            started_s = time.perf_counter()
            found = client.loads.run(
                lambda w: w.submit_fetch(names, BLOCK_NAME_BYTES, memory.width, memory.table, pages, columns)
            )
            self._heard_lookup(found.lookup_error, found.lookup_why, whole=found.blocks == len(keys))
            good = memory.whole(found.ok, len(keys))
            loaded = sum(good)
            if found.blocks:
                self._tally.add("loaded_pages", loaded)
                self._tally.add("loaded_bytes", found.bytes_loaded)
                self._observe("prefetch", loaded, found.bytes_loaded, time.perf_counter() - started_s)
            if loaded < found.blocks:
                self._log.warning(
                    "moonpool: %d of %d pages were not loaded (%s); they are computed",
                    found.blocks - loaded,
                    found.blocks,
                    found.error or "the pool no longer has them",
                )
            return good

        missing = [False] * len(keys)
        result = self._call("load", load, missing) if keys else []
        self._tally.add("lost_pages", len(keys) - sum(result))
        return result

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages from the slots ``host_indices``. All True when the pool now has every object of every
        page; else all False, and SGLang goes on without."""

        def save(memory: Memory, client: PoolClient) -> list[bool]:
            if not memory.saves:  # a lower rank holds the same heads
                return stored
            names = memory.names(keys)
            pages, columns = memory.places(keys, host_indices)
            parents = _parents(memory, names, extra_info)
            # With pools beside it, a page goes as a whole; heads alone are touched together anyway.
            group_bytes = DIGEST_BYTES if self._sidecars else 0
            started_s = time.perf_counter()
            answer = client.saves.run(
                lambda w: w.submit_save(
                    names, BLOCK_NAME_BYTES, parents, memory.table, pages, columns, group_bytes
                )
            )
            self._tally.add("saved_bytes", answer.bytes_stored)
            if answer.refused:
                self._refused(len(keys), answer.error)
                return [False] * len(keys)
            self._heard("")
            self._refusal = ""
            self._tally.add("saved_pages", len(keys))
            self._observe("backup", len(keys), answer.bytes_stored, time.perf_counter() - started_s)
            return stored

        stored = [True] * len(keys)
        return self._call("save", save, [False] * len(keys)) if keys else []

    # Pools beside the KV

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """How many leading pages every pool can restore, as its hit policy demands; and what each has."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {compat.PoolName.KV: kv_pages} if kv_pages else {}
        lengths = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            policy = _plain_name(transfer.hit_policy)
            if policy == "block_groups":  # a second form of the KV: it never decides, and has no verdict here
                continue
            trailing = max(1, len(transfer.keys or ())) if policy == "trailing_pages" else None
            of_pool = restorable(self._present(transfer.name, keys[:kv_pages]), trailing)
            if of_pool:
                hits[transfer.name] = max(of_pool)
            lengths &= of_pool
        return compat.transfer_result(max(lengths, default=0), hits, lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Loads pages of other pools; of each, whether all of its bytes are there."""

        def load(client: PoolClient, sidecar: Sidecar, names: list[bytes], parts: list[Parts]) -> list[bool]:
            sizes = _raised(client.loads.run(lambda w: w.submit_get_into(names, parts)))
            wanted = [sum(size for _, size in each) for each in parts]
            good = [size == want for size, want in zip(sizes, wanted, strict=True)]
            self._tally.add("loaded_bytes", sum(want for want, ok in zip(wanted, good, strict=True) if ok))
            return good

        return {transfer.name: self._move("load", transfer, load) for transfer in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Stores pages of other pools; of each, whether the pool now has it."""

        def save(client: PoolClient, sidecar: Sidecar, names: list[bytes], parts: list[Parts]) -> list[bool]:
            # As with the KV: the pool evicts a chain from its end, so what is left of it is a prefix.
            parents = [*(sidecar.names(_last_prefix_key(extra_info)) or [b""]), *names[:-1]]
            groups = [name[:DIGEST_BYTES] for name in names]  # the KV's too
            answer = _raised(client.saves.run(lambda w: w.submit_put(names, parts, parents, groups=groups)))
            return [bool(result) for result in put_results(*answer)]

        return {transfer.name: self._move("save", transfer, save) for transfer in transfers}

    def _present(self, name: Any, keys: list[str]) -> list[bool]:
        def ask(memory: Memory, client: PoolClient) -> list[bool]:
            names = self._sidecars[_plain_name(name)].names(keys)
            flags = _raised(client.lookups.run(lambda w: w.submit_names("exists", names)))
            return [bool(presence) for presence in presences(flags)]

        absent = [False] * len(keys)
        return self._call("lookup", ask, absent) if keys else absent

    def _move(
        self,
        what: str,
        transfer: Any,
        move: Callable[[PoolClient, Sidecar, list[bytes], list[Parts]], list[bool]],
    ) -> list[bool]:
        keys = transfer.keys or []

        def moved(memory: Memory, client: PoolClient) -> list[bool]:
            sidecar = self._sidecars[_plain_name(transfer.name)]
            return move(client, sidecar, sidecar.names(keys), sidecar.parts(keys, transfer.host_indices))

        nothing = [False] * len(keys)
        return self._call(what, moved, nothing) if keys else nothing

    # The older interface, one tensor a page: SGLang uses it only without interface_v1, which Settings refuses

    def get(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError('moonpool moves pages by "interface_v1": 1 only', operation="config")

    batch_get = set = batch_set = get

    # Life

    def get_stats(self) -> compat.StorageMetrics:
        """What was moved since the last call, for SGLang's own histograms."""
        with self._stats_lock:
            stats, self._stats = self._stats, compat.StorageMetrics()
        return stats

    def clear(self) -> bool:
        """Removes every page of this model from the pool, also those that other engines share. False when the
        pool does not answer."""
        if self._pool is None or not self._mark:
            return False
        settings = self._settings
        try:
            with Store(
                str(settings.socket()),
                tenant=settings.tenant,
                namespace=settings.namespace,
                fingerprint=self._mark,
            ) as store:
                removed = store.remove_all()
        except NO_POOL as error:
            self._log.warning("moonpool: the pool was not cleared (%s)", error)
            return False
        self._log.info("moonpool: %d objects of this model were removed from the pool", removed)
        return True

    def close(self) -> None:
        """Detached: SGLang has ended its storage threads."""
        pool, self._pool, self._memory = self._pool, None, None
        if pool is not None:
            pool.close()

    # Helpers

    def _call(self, what: str, call: Callable[[Memory, PoolClient], Result], otherwise: Result) -> Result:
        """``call`` with the memory and the client, or ``otherwise``: the boundary that no error crosses."""
        memory, pool = self._memory, self._pool
        started_s = time.monotonic()
        try:
            client = None if pool is None else pool.client_now()
            if memory is None or pool is None or client is None:
                self._tally.add("unanswered")
                return otherwise
            result = call(memory, client)
            pool.ended(time.monotonic() - started_s, answered=what != "save" or result != otherwise)
            return result
        except Error as error:
            self._heard(str(error))
            if pool is not None:
                pool.ended(time.monotonic() - started_s, answered=False)
        except Exception:
            self._tally.add("survived_errors")
            self._log.exception("moonpool: an unexpected error in a %s; the engine goes on without", what)
        return otherwise

    def _heard(self, error: str) -> None:
        if error:
            self._tally.add("unanswered")
        if (pool := self._pool) is not None:
            pool.answered(error)

    def _heard_lookup(self, error: str, why: str, *, whole: bool) -> None:
        """A lookup was answered.

        why: which node did not answer although there is an answer, or "".
        whole: whether all that was asked for is there, so that perhaps the own node alone was asked.
        """
        if error or not why:
            self._heard(error)
        if why:
            self._tally.add("partly_answered")
        if (why or not whole) and not error and (pool := self._pool) is not None:
            pool.answered_in_part(why)

    def _refused(self, pages: int, reason: str) -> None:
        """Logs each reason once, until a save succeeds: a full pool refuses every call."""
        self._tally.add("refused_pages", pages)
        if reason != self._refusal:
            self._log.warning("moonpool: not all of %d pages were saved (%s)", pages, reason)
        self._refusal = reason

    def _observe(self, kind: str, pages: int, size: int, seconds: float) -> None:
        with self._stats_lock:
            getattr(self._stats, f"{kind}_pgs").append(pages)
            getattr(self._stats, f"{kind}_bandwidth").append(size / GIGA / max(seconds, 1e-9))


def _parents(memory: Memory, names: bytes, extra_info: Any) -> bytes:
    """For each object the name of the same heads and layers one page earlier; zeros where none is known."""
    unit = memory.width * BLOCK_NAME_BYTES
    return (memory.names(_last_prefix_key(extra_info)) or bytes(unit)) + names[:-unit]


def _last_prefix_key(extra_info: Any) -> list[str]:
    """The key of the page before the first one of a call, if SGLang passes it."""
    return (getattr(extra_info, "prefix_keys", None) or [])[-1:]


def _plain_name(name: Any) -> str:
    """SGLang's names of pools and policies are texts and members of an Enum at once."""
    return str(getattr(name, "value", name))


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
