"""``mooncake.store``: MooncakeDistributedStore and the values around it.

    store = MooncakeDistributedStore()
    store.setup("10.0.0.2", "P2PHANDSHAKE", 4 << 30, 1 << 20, "tcp", "", "10.0.0.1:50051")
    store.put("key", b"value")

The methods stand in groups, one in each file: _objects, _parts, _replicas, _segments, _tensors, _parallel.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, overload

from moonpool.core.errors import Error, Timeout, Unavailable

from . import _access
from ._access import Beside, Settings, access_of, is_on, settings_of, size_of
from ._allocator import MooncakeHostMemAllocator, bind_to_numa_node, get_alloc_func_addr, get_free_func_addr
from ._codes import Code, code_of
from ._engram import EngramStore, EngramStoreConfig
from ._metadata import check_metadata_server
from ._no_f import MooncakeDistributedNoFRegister
from ._objects import BufferHandle
from ._parallel import Parallel
from ._parts import Parts
from ._pool import BufferLease, BufferLeaseView, BufferPool
from ._protocols import check_for_pool
from ._replicas import Replicas
from ._segments import Segments
from ._ssd import ssd_path_of
from ._tensor_header import _deserialize_tensor, _serialize_tensor, _tensor_metadata_size
from ._values import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ObjectDataType,
    ParallelAxis,
    QueryTaskResponse,
    ReadTarget,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
    TensorParallelism,
)

if TYPE_CHECKING:
    from ._access import Access
    from ._pages import ClientPages

RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
RegisteredBufferPool = BufferPool
ACTIVATION, GENERAL, GRADIENT, KVCACHE = (
    ObjectDataType.ACTIVATION,
    ObjectDataType.GENERAL,
    ObjectDataType.GRADIENT,
    ObjectDataType.KVCACHE,
)
METADATA, OPTIMIZER_STATE, SAMPLE, TENSOR = (
    ObjectDataType.METADATA,
    ObjectDataType.OPTIMIZER_STATE,
    ObjectDataType.SAMPLE,
    ObjectDataType.TENSOR,
)
UNKNOWN, WEIGHT = ObjectDataType.UNKNOWN, ObjectDataType.WEIGHT
COMPLETE, INITIALIZED, REMOVED, UNDEFINED = (
    ReplicaStatus.COMPLETE,
    ReplicaStatus.INITIALIZED,
    ReplicaStatus.REMOVED,
    ReplicaStatus.UNDEFINED,
)
FAILED, PENDING, PROCESSING, SUCCESS = (
    TaskStatus.FAILED,
    TaskStatus.PENDING,
    TaskStatus.PROCESSING,
    TaskStatus.SUCCESS,
)
REPLICA_COPY, REPLICA_MOVE = TaskType.REPLICA_COPY, TaskType.REPLICA_MOVE


class MooncakeDistributedStore(Parallel, Segments, Replicas, Parts):
    """A process's store. After close() it may be set up again."""

    def __init__(self) -> None:
        super().__init__()
        self._setting_up = threading.Lock()
        self._pages: ClientPages | None = None

    @overload
    def setup(self, config: dict[str, Any], /) -> int: ...

    @overload
    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int: ...

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Joins the pool of the master at ``master_server_addr``; 0, also when it is set up already.

        global_segment_size: bytes that this process gives the pool. 0: it uses other processes' memory.
        tenant_id: tenants share nothing. enable_client_http_server: /metrics and /health at client_http_port.
        engine: a transfer engine that listens at local_hostname already; the segment gets a port of its own.
        metadata_server, protocol and rdma_devices: looked at, and not needed: the nodes of a pool find each
        other through the master, and bytes take shared memory and TCP. local_buffer_size: not used.

        A TypeError for keywords that there are not; a code and a sentence in the log for what does not work.
        Without a master that answers (RPC_FAIL, RPC_TIMEOUT) the store goes on looking for it: once it is
        there, calls work.
        """
        if "config" in kwargs or (args and isinstance(args[0], dict)):
            return self._setup_by_dict(*args, **kwargs)
        return self._setup_by_values(*args, **kwargs)

    def _setup_by_dict(self, config: dict[str, Any]) -> int:
        def made() -> Access:
            return access_of(settings_of(config))

        if not is_on(config.get("enable_client_http_server", False)):
            return self._join(made, 0)
        return self._code(
            "setup",
            lambda: self._join(made, size_of(config.get("client_http_port", 9300), "client_http_port")),
        )

    def _setup_by_values(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        for text in (local_hostname, metadata_server, protocol, rdma_devices, master_server_addr, tenant_id):
            if not isinstance(text, str):
                raise TypeError(f"setup: expected a str, got {text!r:.80}")
        for size in (global_segment_size, local_buffer_size):
            if isinstance(size, (str, float)):
                raise TypeError(f"setup: sizes are int, got {size!r:.80}")

        def made() -> Access:
            check_for_pool(protocol, rdma_devices)
            check_metadata_server(metadata_server)
            size = size_of(global_segment_size, "global_segment_size")
            path = ssd_path_of(enable_ssd_offload, ssd_offload_path)
            settings = Settings(local_hostname, master_server_addr, size, tenant_id or "default", path)
            return access_of(settings if engine is None else settings.at_port(0, settings.host))

        return self._join(made, client_http_port if enable_client_http_server else 0)

    def init_all(self, protocol: str, rdma_devices: str, global_segment_size: int, /) -> int:
        """setup() with MOONCAKE_MASTER of the environment, or 127.0.0.1."""
        master = os.environ.get("MOONCAKE_MASTER", "127.0.0.1")
        return self.setup("127.0.0.1", "P2PHANDSHAKE", global_segment_size, 0, protocol, rdma_devices, master)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Joins through the `mooncake_client` (or any node) at ``server_address``, "host:port": over shared
        memory on the same host, else over TCP.
        """
        return self._join(lambda: Beside(server_address), 0)

    def _join(self, make: Any, http_port: int) -> int:
        def act() -> int:
            if self._access is not None:
                return int(Code.OK)
            self._let_go()  # ends what an earlier setup() waits for
            access: Access = make()
            try:
                if http_port:
                    from . import _pages  # aiohttp comes with it

                    self._pages = _pages.ClientPages(access, http_port)
                access.join(_access.JOIN_TIMEOUT_S)
            except (Unavailable, Timeout):
                self._waiting, self._closed = access, False
                _OPEN.add(self)
                raise
            except BaseException:
                self._close_pages()
                access.close()
                raise
            self._access, self._closed = access, False
            _OPEN.add(self)
            return int(Code.OK)

        with self._setting_up:
            return self._code("setup", act)

    def close(self) -> int:
        """Ends it, and the segment with it. 0, also the second time."""
        self._closed = True
        self._reading.clear()
        self._writing.clear()
        self._buffers.clear()
        try:
            self._hard_pins.release_all()
        finally:
            self._let_go()
        return int(Code.OK)

    def _let_go(self) -> None:
        """Of the pool, whatever fails on the way."""
        mounted = [self._mounted.popitem()[1] for _ in range(len(self._mounted))]
        accesses, self._access, self._waiting = (self._access, self._waiting), None, None
        with ExitStack() as stack:
            for one in (*accesses, *mounted):
                if one is not None:
                    stack.callback(one.close)
            stack.callback(self._close_pages)

    def _close_pages(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            pages.close()

    def __del__(self) -> None:
        if hasattr(self, "_pages"):  # else __init__ failed
            self.close()

    def get_hostname(self) -> str:
        """The segment of this process as descriptors name it, "host:port"; "" without one."""
        return self._access.segment if self._access is not None else ""

    def health_check(self) -> int:
        """0: all is well. 1: not set up, or closed. 2: the master, or the last node, is not to be reached."""
        if self._access is None and self._waiting is None:
            return 1
        try:
            access = self._open()
            access.store()
            access.members()
        except Error as error:
            code_of(error, "health_check")
            return 2
        return 0

    def alloc_from_mem_pool(self, size: int, /) -> int:
        """The address of new memory, 0 when there is none; it lives until the allocator's free()."""
        return MooncakeHostMemAllocator().alloc(size)

    def _get_pyclient_capsule(self) -> object:
        """What BufferPool takes for a store: this one; None when it is not set up."""
        return None if self._access is None and self._waiting is None else self


# At the end of the interpreter the threads that close() waits for stand still: so it comes before.
_OPEN: weakref.WeakSet[MooncakeDistributedStore] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for store in list(_OPEN):
        store.close()


def _get_pyclient_from_wrapper(wrapper: Any) -> object:
    return wrapper


__all__ = [
    "ACTIVATION",
    "COMPLETE",
    "FAILED",
    "GENERAL",
    "GRADIENT",
    "INITIALIZED",
    "KVCACHE",
    "METADATA",
    "OPTIMIZER_STATE",
    "PENDING",
    "PROCESSING",
    "REMOVED",
    "REPLICA_COPY",
    "REPLICA_MOVE",
    "SAMPLE",
    "SUCCESS",
    "TENSOR",
    "UNDEFINED",
    "UNKNOWN",
    "WEIGHT",
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "EngramStore",
    "EngramStoreConfig",
    "MemoryDescriptor",
    "MooncakeDistributedNoFRegister",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "_deserialize_tensor",
    "_get_pyclient_from_wrapper",
    "_serialize_tensor",
    "_tensor_metadata_size",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]
