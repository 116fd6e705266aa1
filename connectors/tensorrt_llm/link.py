"""What the two halves of rank 0 share: TensorRT-LLM makes both in one process from one object of arguments,
and tells neither of the other. Other ranks have a worker alone.

The scheduler's half promises only objects that it has pinned (``Offer``), and the worker of its process uses
these pins: TensorRT-LLM cannot be told that a promised block was not loaded.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.objects import Refused, object_names, suffixes_of
from moonpool.connectors.tensorrt_llm import compat
from moonpool.connectors.tensorrt_llm.fetch import Fetch, Offer
from moonpool.connectors.tensorrt_llm.identity import identity, model_folder, read_config
from moonpool.connectors.tensorrt_llm.kv_memory import KvMemory, open_kv_memory
from moonpool.connectors.tensorrt_llm.layout import Memory, Shape, model_of, shape_of
from moonpool.connectors.tensorrt_llm.limits import Foreign, check
from moonpool.connectors.tensorrt_llm.pool import PoolClient, open_pool
from moonpool.connectors.tensorrt_llm.saves import Saves
from moonpool.connectors.tensorrt_llm.settings import Settings
from moonpool.connectors.tensorrt_llm.tokens import Known
from moonpool.connectors.weights import wait_for
from moonpool.core.store.keys import BLOCK_NAME_BYTES, Ranges, fingerprint

_links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Engine:
    """This rank's memory, once it is registered, and the pool for it."""

    shape: Shape
    memory: KvMemory
    saves: Saves
    pool: NodeConnection[PoolClient]
    fetch: Fetch
    mark: bytes  # the fingerprint
    foreign: Foreign

    def close(self) -> None:
        """Waits for copies under way, then disconnects."""
        self.memory.close()  # first: a native thread of the pool waits for a card's copies
        self.fetch.close()
        self.pool.close()


class Link:
    """What both halves of rank 0 share.

    count: events by name; docs/tensorrt_llm.md lists the names.
    """

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError for options that are wrong."""
        self.args = llm_args  # kept, so that its id stays its own
        self.log = compat.Log()
        server_url = getattr(getattr(llm_args, "kv_connector_config", None), "server_url", None)
        self.settings = Settings.read(os.environ, server_url)
        self.engine: Engine | None = None
        self.offers: dict[int, Offer] = {}  # that the worker of this process has not taken yet
        self.known = Known()
        self.count: Counter[str] = Counter()

    @classmethod
    def of(cls, llm_args: Any) -> Link:
        """The link of these arguments in this process."""
        with _lock:
            link = _links.get(id(llm_args))
            if link is None:
                link = _links[id(llm_args)] = cls(llm_args)
            return link

    def join(self, read: Callable[[], Memory]) -> None:
        """Connects, now that the memory is known. An engine that cannot use the pool logs one sentence and
        serves without it; with ``require_pool`` it raises. All ranks join or none does: all must load what
        rank 0 promises.

        read: returns the memory; may raise.
        """
        engine, trouble = None, None
        try:
            engine = self._join(read())
        except Exception as error:  # of torch and of the engine's own objects, too
            trouble = error
        marks = compat.gather(None if engine is None else engine.mark)
        if engine is not None and set(marks) != {engine.mark}:
            engine.close()
            trouble = Refused("another rank of this engine cannot use it, or has other files of the model")
        if trouble is None:
            self.engine = engine
        elif self.settings.require_pool:
            raise trouble
        else:
            self.log.warning("this engine serves without the pool: %s", trouble)

    def _join(self, memory: Memory) -> Engine:
        args, settings = self.args, self.settings
        folder = model_folder(args)
        config = read_config(folder)
        check(args, folder, config, memory)
        backend = str(getattr(args, "attn_backend", ""))
        size = int(args.tensor_parallel_size)
        shape = shape_of(
            memory, model_of(config, tp_rank=compat.rank() % size, tp_size=size, backend=backend)
        )
        foreign = Foreign.of(config)
        # TensorRT-LLM's ranks join together and here only, so the start waits.
        mark = wait_for(
            lambda: fingerprint(identity(args, folder, config, memory, shape)),
            functools.partial(self.log.info, "%s"),
        )
        kv_memory = open_kv_memory(args, memory, shape, settings, self.log)
        socket = str(settings.socket())
        try:
            pool = open_pool(
                lambda: PoolClient.dial(settings, mark),
                address=socket,
                log=self.log,
                required=settings.require_pool,
            )
        except BaseException:
            kv_memory.close()
            raise
        self.log.info(
            "blocks of %d bytes in %d objects (%s), fingerprint %s, tenant %s, namespace %s, pool %s",
            memory.bytes_per_block,
            len(shape.columns),
            shape.form,
            mark.hex()[:16],
            settings.tenant,
            settings.namespace,
            socket,
        )
        kv_memory.pin(None if pool.client is None else pool.client.client)
        return Engine(shape, kv_memory, Saves(), pool, Fetch(settings.fetch), mark, foreign)


def names(digests: bytes, ranges: tuple[Ranges, ...]) -> bytes:
    """The names of the objects ``ranges`` of these blocks, block by block."""
    return object_names(digests, suffixes_of(ranges)).tobytes()


def name_list(digests: bytes, ranges: tuple[Ranges, ...]) -> list[bytes]:
    """``names``, one by one."""
    joined = names(digests, ranges)
    return [joined[at : at + BLOCK_NAME_BYTES] for at in range(0, len(joined), BLOCK_NAME_BYTES)]
