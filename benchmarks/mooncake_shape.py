"""Our store in the shape of ``mooncake.store``, so that a script written for that package can drive it.

    from benchmarks.mooncake_shape import MooncakeDistributedStore

Only what such benchmarks call. ``setup`` takes the address of Mooncake's master in its last argument: here
it is the path of a node's Unix socket. A process with ``global_segment_size`` above 0 runs the node itself,
as a Mooncake process brings its segment; with 0 it is a client of the node there. Results are Mooncake's: 0
or a size when it worked, a negative code when it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moonpool import Error, InvalidArgument, Presence, PutResult, Store, _native
from moonpool.core.config import paths
from moonpool.core.config.native_settings import node_settings

INVALID_PARAMS = -600
NO_AVAILABLE_HANDLE = -200
OBJECT_NOT_FOUND = -704
RPC_FAIL = -900


class ReplicateConfig:
    """Accepted and not looked at: one node holds one replica."""


class MooncakeDistributedStore:
    """One process's store. Not open before ``setup`` returned 0."""

    def __init__(self) -> None:
        self._open_store: Store | None = None
        self._server: _native.Server | None = None

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        """master_server_addr: a socket path. global_segment_size: bytes of the node to run there, or 0."""
        token = paths.read_or_create_token()
        try:
            if global_segment_size > 0:
                self._server = _native.Server(
                    master_server_addr, [("default", global_segment_size)], token, node_settings()
                )
                self._server.start()
            self._open_store = Store(master_server_addr, token=token)
        except Error as error:
            return code_of(error)
        return 0

    def close(self) -> int:
        if self._open_store is not None:
            self._open_store.close()
        if self._server is not None:
            self._server.stop()
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Nothing to do: any memory can be put from."""
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return 0

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        return self.batch_put([key], [value])[0]

    def get(self, key: str) -> bytes:
        """b"" is a miss."""
        try:
            view = self._store.get(key)
        except Error:
            return b""
        return b"" if view is None else bytes(view)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        return self.batch_put([key], [(buffer_ptr, size)])[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def get_buffer(self, key: str) -> memoryview | None:
        return self.batch_get_buffer([key])[0]

    def batch_put(self, keys: list[str], values: Sequence[Any]) -> list[int]:
        """Not one of Mooncake's names: what its put verbs have in common."""
        return self._codes(len(keys), lambda: [code_of_put(r) for r in self._store.put(keys, values)])

    def batch_put_from(
        self,
        keys: list[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        return self.batch_put(keys, list(zip(buffer_ptrs, sizes, strict=True)))

    def batch_get_into(self, keys: list[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """For each key the object's bytes, or a negative code."""

        def get() -> list[int]:
            found = self._store.get(keys, list(zip(buffer_ptrs, sizes, strict=True)))
            return [OBJECT_NOT_FOUND if size is None else size for size in found]

        return self._codes(len(keys), get)

    def batch_get_buffer(self, keys: list[str]) -> list[memoryview | None]:
        try:
            return self._store.get(keys)
        except Error:
            return [None] * len(keys)

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1, 0, or -1 when the node does not answer."""
        code = {Presence.HIT: 1, Presence.MISS: 0, Presence.UNKNOWN: -1}
        return [code[presence] for presence in self._store.exists(keys)]

    def get_size(self, key: str) -> int:
        view = self.get_buffer(key)
        return OBJECT_NOT_FOUND if view is None else view.nbytes

    def remove(self, key: str, force: bool = False) -> int:
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        """force makes no difference: whoever reads an object goes on reading it."""
        return self._codes(
            len(keys), lambda: [0 if gone else OBJECT_NOT_FOUND for gone in self._store.remove(keys)]
        )

    @property
    def _store(self) -> Store:
        if self._open_store is None:
            raise InvalidArgument("call setup first", operation="setup")
        return self._open_store

    def _codes(self, count: int, call: Callable[[], list[int]]) -> list[int]:
        try:
            return call()
        except Error as error:
            return [code_of(error)] * count


def code_of(error: Error) -> int:
    return INVALID_PARAMS if isinstance(error, InvalidArgument) else RPC_FAIL


def code_of_put(result: PutResult) -> int:
    """Mooncake's put of an existing key says 0 and keeps the old bytes."""
    return 0 if result else NO_AVAILABLE_HANDLE
