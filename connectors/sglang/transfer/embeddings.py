"""``MoonpoolEmbeddings``: the store of SGLang's cache of embeddings (``--enable-mm-global-cache``), in the
pool. An encoder then finds what another one made of the same image.

SGLang names an embedding by its content, not by the model that made it. So each model with its weights has a
space of its own.

Without a node every lookup misses and every put fails; the store joins when a node appears.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from moonpool.connectors.identity import (
    config_of,
    is_dummy,
    plain,
    quantisation_files,
    weights_revision,
)
from moonpool.connectors.sglang.identity import arguments
from moonpool.connectors.sglang.transfer.settings import NODE
from moonpool.connectors.weights import Pending
from moonpool.core.config import paths
from moonpool.core.errors import ConfigError, Error, InvalidArgument, Unavailable
from moonpool.core.store.keys import Json, digest_of
from moonpool.core.store.store import Store
from moonpool.core.store.types import Presence

if TYPE_CHECKING:
    from moonpool.connectors.sglang.standins import EmbeddingStore
else:
    try:
        from sglang.srt.mem_cache.embedding_store import EmbeddingStore
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("sglang", "torch"):
            raise
        from moonpool.connectors.sglang.standins import EmbeddingStore


NAMES = ("mooncake", "moonpool")  # SGLang's command line knows the first one only
NAMESPACE = "embeddings"
RETRY_S = 0.5
TIMEOUT_S = 2.0
# How an image becomes what the encoder sees, and in which numbers.
_COUNTED = (
    *("torchao_config", "mm_process_config", "image_processor_backend", "disable_fast_image_processor"),
    "enable_precise_embedding_interpolation",
)
_log = logging.getLogger("sglang.moonpool.embeddings")
Answer = TypeVar("Answer")


class MoonpoolEmbeddings(EmbeddingStore):
    """The store. Methods return for each hash whether it worked. Any thread may call.

    storage_config: accepted and not used.
    """

    def __init__(self, storage_config: object = None) -> None:
        socket = os.environ.get(NODE) or str(paths.default_node_socket())
        space = b""
        with contextlib.suppress(Pending):  # until its weights are known it is as without a node
            space = _space()
        self._dial: Callable[[], Store] = lambda: Store(
            socket, namespace=NAMESPACE, fingerprint=space or _space(), timeout_s=TIMEOUT_S
        )
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._next_s = 0.0
        self._trouble = ""
        self._joined()
        name = f"{space.hex()[:16]}..." if space else "this model"
        _log.info("moonpool: embeddings of %s are shared through %s", name, socket)

    def close(self) -> None:
        """Ends the connection; misses from then on."""
        with self._lock:
            self._next_s = float("inf")
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def register_buffer(self, tensor: object) -> None:
        """The pool copies from and into any memory of the host: there is nothing to register."""

    def batch_get(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        """Into ``sizes`` bytes at ``ptrs``; an object of another size is a miss."""
        return self.batch_get_into_multi_buffers(hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes])

    def batch_put(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        """True: the pool has it now. What it had before stays."""
        return self.batch_put_from_multi_buffers(hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes])

    def batch_get_into_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Each one cut into pieces, one behind the other."""
        keys, wanted = self._keys(hashes), [sum(pieces) for pieces in sizes]

        def get(store: Store) -> list[bool]:
            parts = _parts(ptrs, sizes)
            try:
                got = store.get(keys, into=parts)
            except InvalidArgument:  # one that is larger than its buffer: the others are not
                got = [_get_one(store, key, part) for key, part in zip(keys, parts, strict=True)]
            return [found == size for found, size in zip(got, wanted, strict=True)]

        return self._ask(get) or [False] * len(hashes)

    def batch_put_from_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Stores one embedding per hash from the memory at ``ptrs``, of ``sizes`` bytes. Whether each is
        stored."""
        keys = self._keys(hashes)

        def put(store: Store) -> list[bool]:
            return [bool(result) for result in store.put(keys, _parts(ptrs, sizes))]

        return self._ask(put) or [False] * len(hashes)

    def batch_is_exist(self, hashes: list[str]) -> list[bool]:
        """Whether each embedding is in the pool; all False when the node does not answer."""
        keys = self._keys(hashes)

        def exist(store: Store) -> list[bool]:
            found = store.exists(keys)
            if Presence.UNKNOWN in found:
                raise Unavailable("the node does not answer")
            return [bool(one) for one in found]

        return self._ask(exist) or [False] * len(hashes)

    def _keys(self, hashes: list[str]) -> list[bytes]:
        return [self.get_key(one).encode() for one in hashes]

    def _ask(self, ask: Callable[[Store], Answer]) -> Answer | None:
        """The answer, or None when the pool does not answer; logs when that begins and when it ends."""
        store = self._joined()
        if store is None:
            return None
        try:
            answer = ask(store)
        except Error as error:
            self._heard(str(error))
            return None
        self._heard("")
        return answer

    def _joined(self) -> Store | None:
        """The store; dials at most every RETRY_S."""
        with self._lock:
            if self._store is None and time.monotonic() >= self._next_s:
                try:
                    self._store = self._dial()
                except (Error, OSError, ValueError) as error:  # a folder or a token that may not be read
                    self._next_s = time.monotonic() + RETRY_S
                    self._heard(str(error))
            return self._store

    def _heard(self, trouble: str) -> None:
        if trouble and not self._trouble:
            _log.warning(
                "moonpool: no embeddings from the pool (%s); they are computed until it answers", trouble
            )
        elif self._trouble and not trouble:
            _log.info("moonpool: the pool has embeddings again")
        self._trouble = trouble


def register() -> None:
    """Makes ``--mm-global-cache-backend mooncake`` (the only one that SGLang's command line allows) and
    ``moonpool`` mean this store. Raises ConfigError where SGLang has no such place."""
    try:
        from sglang.srt.mem_cache.embedding_store import EmbeddingStoreFactory
    except ImportError as error:
        raise ConfigError(
            f"this SGLang has no embedding cache to store for ({error})", operation="embeddings"
        ) from error
    for name in NAMES:
        EmbeddingStoreFactory.register_backend(name, __name__, MoonpoolEmbeddings.__name__)


def _parts(ptrs: list[list[int]], sizes: list[list[int]]) -> list[list[tuple[int, int]]]:
    return [
        [(ptr, size) for ptr, size in zip(starts, lengths, strict=True) if size]
        for starts, lengths in zip(ptrs, sizes, strict=True)
    ]


def _get_one(store: Store, key: bytes, part: list[tuple[int, int]]) -> int | None:
    try:
        return store.get(key, into=part)
    except InvalidArgument:
        return None


def _space() -> bytes:
    """What makes the embeddings of two encoders the same: 32 bytes."""
    from moonpool.connectors.sglang import compat

    args = compat.server_args()
    model = compat.model_config(args)
    quantisation = quantisation_files(args.model_path, getattr(model, "quantization", None))
    counted = {**arguments(args, _COUNTED), "quantisation": quantisation}
    return space_of(args.model_path, model.hf_config, model.dtype, args.load_format, counted)


def space_of(
    model_path: str,
    config: Any,
    dtype: object,
    load_format: object = "auto",
    counted: Mapping[str, Json] | None = None,
) -> bytes:
    """counted: the server's arguments that change an embedding. Raises ConfigError when it cannot be told
    which weights ``model_path`` stands for."""
    weights = "dummy" if is_dummy(load_format) else weights_revision(model_path, model_path, config)
    return bytes.fromhex(
        digest_of(
            {
                "config": config_of(config.to_dict()),
                "weights": weights,
                "dtype": plain(dtype),
                "arguments": dict(counted or {}),
            }
        )
    )
