"""One driver per store: the same verbs, each by the fastest call of the store's own client package.

Offsets are into the two buffers of the caller: objects are put from ``source`` and got into ``target``.
``prepare`` turns offsets into the form that the store's batch calls take, outside the timed part. Each call
returns something true when it did what it should; what it read is compared by the caller afterwards.
"""

from __future__ import annotations

import ctypes
import importlib
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks import drop_in
from benchmarks.store.memory import Buffer
from benchmarks.store.workload import MIB


class Driver(Protocol):
    """name: the column. own_form: what ``own`` gives, in words, or "" when the store has no such thing."""

    name: str
    own_form: str

    def put(self, key: str, offset: int, size: int) -> object: ...
    def get(self, key: str, offset: int, size: int) -> object: ...
    def own(self, key: str) -> Any: ...
    def prepare(self, offsets: Sequence[int], size: int, source: bool) -> Any: ...
    def put_batch(self, keys: list[str], prepared: Any) -> object: ...
    def get_batch(self, keys: list[str], prepared: Any) -> object: ...
    def own_batch(self, keys: list[str]) -> list[Any]: ...
    def exists(self, key: str) -> bool: ...
    def exists_batch(self, keys: list[str]) -> int: ...
    def remove(self, keys: list[str]) -> None: ...


class Moonpool:
    """Our store over the socket of a node in another process."""

    name = "ours"
    own_form = "memoryview of the pool's memory, no copy"

    def __init__(self, address: str, source: Buffer, target: Buffer) -> None:
        moonpool = importlib.import_module("moonpool")
        self._store: Any = moonpool.Store(address)
        self._hit: Any = importlib.import_module("moonpool.core.store.types").Presence.HIT
        self._source, self._target = source.address, target.address

    def put(self, key: str, offset: int, size: int) -> object:
        return self._store.put(key, (self._source + offset, size)).status.name == "STORED"

    def get(self, key: str, offset: int, size: int) -> object:
        return self._store.get(key, (self._target + offset, size)) == size

    def own(self, key: str) -> Any:
        return self._store.get(key)

    def prepare(self, offsets: Sequence[int], size: int, source: bool) -> Any:
        base = self._source if source else self._target
        return [(base + offset, size) for offset in offsets]

    def put_batch(self, keys: list[str], prepared: Any) -> object:
        return self._store.put(keys, prepared)[-1].status.name == "STORED"

    def get_batch(self, keys: list[str], prepared: Any) -> object:
        return None not in self._store.get(keys, prepared)

    def own_batch(self, keys: list[str]) -> list[Any]:
        views: list[Any] = self._store.get(keys)
        return views

    def exists(self, key: str) -> bool:
        return self._store.exists(key) is self._hit

    def exists_batch(self, keys: list[str]) -> int:
        return sum(found is self._hit for found in self._store.exists(keys))

    def remove(self, keys: list[str]) -> None:
        self._store.remove(keys)


class Memcpy:
    """No store: one thread's ctypes.memmove between the caller's buffer and another one of the same size."""

    name = "memcpy"
    own_form = ""

    def __init__(self, address: str, source: Buffer, target: Buffer) -> None:
        self._shelf = Buffer(source.size)
        self._source, self._target = source.address, target.address
        self._at: dict[str, int] = {}

    def put(self, key: str, offset: int, size: int) -> object:
        ctypes.memmove(self._shelf.address + offset, self._source + offset, size)
        return True

    def get(self, key: str, offset: int, size: int) -> object:
        ctypes.memmove(self._target + offset, self._shelf.address + offset, size)
        return True

    def own(self, key: str) -> Any:
        raise NotImplementedError

    def prepare(self, offsets: Sequence[int], size: int, source: bool) -> Any:
        return offsets, size

    def put_batch(self, keys: list[str], prepared: Any) -> object:
        offsets, size = prepared
        return all(self.put("", offset, size) for offset in offsets)

    def get_batch(self, keys: list[str], prepared: Any) -> object:
        offsets, size = prepared
        return all(self.get("", offset, size) for offset in offsets)

    def own_batch(self, keys: list[str]) -> list[Any]:
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        raise NotImplementedError

    def exists_batch(self, keys: list[str]) -> int:
        raise NotImplementedError

    def remove(self, keys: list[str]) -> None:
        pass


class Mooncake:
    """mooncake.store over TCP; the segment is in another process (global_segment_size 0 here)."""

    name = "mooncake"
    own_form = "BufferHandle"

    def __init__(self, address: str, source: Buffer, target: Buffer) -> None:
        module = importlib.import_module("mooncake.store")
        self._store: Any = module.MooncakeDistributedStore()
        if code := self._setup(address, source.size + 64 * MIB):
            raise RuntimeError(f"setup of the Mooncake client failed with {code}")
        self._source, self._target = source.address, target.address
        for buffer in (source, target):
            if code := self._store.register_buffer(buffer.address, buffer.size):
                raise RuntimeError(f"register_buffer failed with {code}")

    def _setup(self, address: str, buffer_bytes: int) -> int:
        arguments = (own_host(address), "P2PHANDSHAKE", 0, buffer_bytes, "tcp", "", address)
        return int(self._store.setup(*arguments))

    def put(self, key: str, offset: int, size: int) -> object:
        return self._store.put_from(key, self._source + offset, size) == 0

    def get(self, key: str, offset: int, size: int) -> object:
        return self._store.get_into(key, self._target + offset, size) == size

    def own(self, key: str) -> Any:
        return self._store.get_buffer(key)

    def prepare(self, offsets: Sequence[int], size: int, source: bool) -> Any:
        base = self._source if source else self._target
        return [base + offset for offset in offsets], [size] * len(offsets)

    def put_batch(self, keys: list[str], prepared: Any) -> object:
        return not any(self._store.batch_put_from(keys, *prepared))

    def get_batch(self, keys: list[str], prepared: Any) -> object:
        return self._store.batch_get_into(keys, *prepared) == prepared[1]

    def own_batch(self, keys: list[str]) -> list[Any]:
        handles: list[Any] = self._store.batch_get_buffer(keys)
        return handles

    def exists(self, key: str) -> bool:
        return bool(self._store.is_exist(key) == 1)

    def exists_batch(self, keys: list[str]) -> int:
        return int(sum(self._store.batch_is_exist(keys)))

    def remove(self, keys: list[str]) -> None:
        self._store.batch_remove(keys, True)


class DropIn(Mooncake):
    """The drop-in of that package, over the same node as ours: without a master, whom a miss would ask."""

    name = "drop-in"
    own_form = "BufferHandle over the pool's memory, no copy"

    def __init__(self, address: str, source: Buffer, target: Buffer) -> None:
        drop_in.use()
        super().__init__(address, source, target)

    def _setup(self, address: str, buffer_bytes: int) -> int:
        return int(self._store.setup_dummy(buffer_bytes, buffer_bytes, address))


def own_host(address: str) -> str:
    """Our address on the way to "host:port"."""
    host, _, port = address.rpartition(":")
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class Redis:
    """redis-py with the hiredis parser."""

    name = "redis"
    own_form = "bytes"

    def __init__(self, address: str, source: Buffer, target: Buffer) -> None:
        importlib.import_module("hiredis")
        module = importlib.import_module("redis")
        if address.startswith("/"):
            self._redis: Any = module.Redis(unix_socket_path=address)
        else:
            host, _, port = address.rpartition(":")
            self._redis = module.Redis(host=host, port=int(port))
        self._redis.ping()
        self._source, self._target = source.view, target.view

    def put(self, key: str, offset: int, size: int) -> object:
        return self._redis.set(key, self._source[offset : offset + size])

    def get(self, key: str, offset: int, size: int) -> object:
        self._target[offset : offset + size] = self._redis.get(key)
        return True

    def own(self, key: str) -> Any:
        return self._redis.get(key)

    def prepare(self, offsets: Sequence[int], size: int, source: bool) -> Any:
        view = self._source if source else self._target
        return [view[offset : offset + size] for offset in offsets]

    def put_batch(self, keys: list[str], prepared: Any) -> object:
        return self._redis.mset(dict(zip(keys, prepared, strict=True)))

    def get_batch(self, keys: list[str], prepared: Any) -> object:
        for value, place in zip(self._redis.mget(keys), prepared, strict=True):
            place[:] = value
        return True

    def own_batch(self, keys: list[str]) -> list[Any]:
        values: list[Any] = self._redis.mget(keys)
        return values

    def exists(self, key: str) -> bool:
        return bool(self._redis.exists(key))

    def exists_batch(self, keys: list[str]) -> int:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return sum(pipeline.execute())

    def remove(self, keys: list[str]) -> None:
        self._redis.unlink(*keys)


class Memcached:
    """pymemcache. It takes and gives bytes objects only: a put from a buffer copies once, a get into one as
    well. It has no exists: a get of the (small) object stands for it.
    """

    name = "memcached"
    own_form = "bytes"

    def __init__(self, address: str, source: Buffer, target: Buffer) -> None:
        module = importlib.import_module("pymemcache.client.base")
        if address.startswith("/"):
            self._client: Any = module.Client(address)
        else:
            host, _, port = address.rpartition(":")
            self._client = module.Client((host, int(port)), no_delay=True)
        self._client.version()
        self._source, self._target = source.view, target.view

    def put(self, key: str, offset: int, size: int) -> object:
        return self._client.set(key, bytes(self._source[offset : offset + size]), noreply=False)

    def get(self, key: str, offset: int, size: int) -> object:
        self._target[offset : offset + size] = self._client.get(key)
        return True

    def own(self, key: str) -> Any:
        return self._client.get(key)

    def prepare(self, offsets: Sequence[int], size: int, source: bool) -> Any:
        view = self._source if source else self._target
        return [view[offset : offset + size] for offset in offsets]

    def put_batch(self, keys: list[str], prepared: Any) -> object:
        values = {key: bytes(view) for key, view in zip(keys, prepared, strict=True)}
        return not self._client.set_many(values, noreply=False)

    def get_batch(self, keys: list[str], prepared: Any) -> object:
        values = self._client.get_many(keys)
        for key, place in zip(keys, prepared, strict=True):
            place[:] = values[key]
        return True

    def own_batch(self, keys: list[str]) -> list[Any]:
        values = self._client.get_many(keys)
        return [values[key] for key in keys]

    def exists(self, key: str) -> bool:
        return self._client.get(key) is not None

    def exists_batch(self, keys: list[str]) -> int:
        return len(self._client.get_many(keys))

    def remove(self, keys: list[str]) -> None:
        self._client.delete_many(keys, noreply=False)


DRIVERS = {driver.name: driver for driver in (Moonpool, DropIn, Mooncake, Redis, Memcached, Memcpy)}
