"""``Store``: put, get, exists, longest_prefix and remove over the pool, from any process of this host.

    with moonpool.Store() as store:
        store.put("answer", b"42")
        view = store.get("answer")          # a read-only memoryview of the pool's own memory: no copy

One key or a list of keys, one result or a list of results. A miss is None, never an error. Calls block; they
release the GIL, may come from any thread, and never wait longer than ``timeout_s`` without progress.
``AsyncStore`` has the same verbs for asyncio. Bytes move between the caller's memory and the node's arena,
which both map: the node itself is only asked for memory to write into, to commit, and to pin.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from moonpool.core.config import paths
from moonpool.core.config.arena_size import parse_arena_size
from moonpool.core.errors import InvalidArgument, Timeout, Unavailable
from moonpool.core.store.buffers import as_parts
from moonpool.core.store.key_patterns import literal_prefix, matcher
from moonpool.core.store.types import (
    Entry,
    Key,
    Keys,
    Object,
    ObjectStat,
    Pin,
    Prefix,
    Presence,
    PutResult,
    Unsure,
    prefix_of,
    presences,
    put_results,
    removals,
    stat_of,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from moonpool import _native
    from moonpool.core.service.data_tls import PoolTls

NAME_BYTES_MAX = 255
REPLICAS_MAX = 16
ROWS_MAX = 1 << 32  # of a list that is filtered by the pattern afterwards
REMOVE_BATCH = 10_000
NO_ANSWER = (Unavailable, Timeout)  # the node is absent or silent: UNKNOWN, which callers treat as a miss


def as_bytes(key: Key) -> bytes:
    """str is UTF-8."""
    return key.encode() if isinstance(key, str) else key


def is_one(keys: Key | Keys) -> TypeIs[Key]:
    """Whether a call is about one key rather than a list of them."""
    return isinstance(keys, (bytes, str))


def generations_of(keys: Key | Keys, node: str | None, given: int | Sequence[int] | None) -> list[int]:
    """One for each key, or none at all. Raises InvalidArgument for another number, or without a node."""
    if given is None:
        return []
    found = [given] if isinstance(given, int) else list(given)
    if node is None or isinstance(given, int) != is_one(keys):
        raise InvalidArgument("remove: a generation is that of one key at one node", operation="remove")
    if not is_one(keys) and len(found) != len(keys):
        raise InvalidArgument(f"{len(found)} generations came with {len(keys)} keys", operation="remove")
    return found


def open_client(
    node: str | None,
    tenant: str,
    namespace: str,
    fingerprint: bytes,
    embedded: int | str | None,
    token: bytes | None,
    tls: PoolTls | _native.TlsClient | None,
    timeout_s: float,
) -> tuple[_native.Client, _native.Server | None]:
    """A connected native client, and the node that it embeds if any. Raises Unavailable or AuthError."""
    from moonpool import _native
    from moonpool.core.service.data_tls import PoolTls, pool_tls_of

    check_timeout(timeout_s, "connect")
    check_names(tenant=tenant, namespace=namespace)
    server = None
    if embedded is not None:
        from moonpool.core.config.native_settings import node_settings  # only an embedded node needs it

        if node is not None:
            raise InvalidArgument("give either node or embedded, not both", operation="connect")
        size = parse_arena_size(embedded) if isinstance(embedded, str) else embedded
        token = token or b"embedded"
        server = _native.Server("", [(tenant, size)], token, node_settings(), size_option="embedded=")
        server.start()
    socket_path = str(paths.default_node_socket()) if node is None else node
    if token is None:
        token = paths.client_token(socket_path)
    if isinstance(tls, _native.TlsClient):
        tls = PoolTls(control=tls)
    if tls is None:
        tls = PoolTls() if server is not None else pool_tls_of(socket_path)
    client = _native.Client(
        socket_path, token, tenant, namespace, fingerprint, timeout_s, server, tls.control, tls.data
    )
    try:
        client.connect()
    except Exception:
        if server is not None:
            server.stop()
        raise
    return client, server


def check_timeout(timeout_s: float, operation: str) -> None:
    """A wait of no time at all can only fail."""
    if not timeout_s > 0:  # NaN is not either
        raise InvalidArgument(f"timeout_s must be above 0, not {timeout_s}", operation=operation)


def check_names(**names: str) -> None:
    """Tenants and namespaces stand between zero bytes in keys and in the handshake, so that they contain
    none."""
    for what, name in names.items():
        if not 1 <= len(name.encode()) <= NAME_BYTES_MAX or "\0" in name:
            raise InvalidArgument(
                f"a {what} has 1 to {NAME_BYTES_MAX} bytes and no zero byte; got {name[:80]!r}",
                operation="connect",
                key=what,
            )


class PutOptions(TypedDict, total=False):
    """Keywords of ``put``; ``Store.put`` describes them."""

    replace: bool
    unique: bool
    ack: bool
    replicas: int
    node: str | Sequence[str] | None
    soft_pin_s: float | None
    timeout_s: float | None


def put_arguments(
    keys: Key | Keys,
    buffers: Any,
    parents: Any,
    groups: Any,
    *,
    replace: bool = False,
    unique: bool = False,
    ack: bool = True,
    replicas: int = 1,
    node: str | Sequence[str] | None = None,
    soft_pin_s: float | None = None,
    timeout_s: float | None = None,
) -> tuple[Any, ...]:
    """The arguments of the native put, each list with one item for each key. Raises InvalidArgument."""
    if not 1 <= replicas <= REPLICAS_MAX:
        raise InvalidArgument(f"replicas={replicas} must be 1 to {REPLICAS_MAX}", operation="put")
    if unique and replace:
        raise InvalidArgument("put: unique and replace exclude each other", operation="put")
    if unique and not ack:
        raise InvalidArgument("put: unique needs the acknowledgement (ack=True)", operation="put")
    if timeout_s is not None:
        check_timeout(timeout_s, "put")
    if soft_pin_s is not None and not soft_pin_s >= 0.001:  # NaN is not either
        raise InvalidArgument(f"soft_pin_s must be at least 0.001, not {soft_pin_s}", operation="put")
    if is_one(keys):
        keys, buffers = [keys], [buffers]
        parents = None if parents is None else [parents]
        groups = None if groups is None else [groups]
    elif isinstance(groups, (str, bytes)):  # a str would be taken as a list of letters
        raise InvalidArgument("put: with several keys, groups has one for each of them", operation="put")
    wait_s = -1.0 if timeout_s is None else timeout_s  # below 0: the store's own timeout
    soft_s = soft_pin_s or 0.0
    return (keys, as_parts(buffers), parents, replace, ack, wait_s, replicas, node, groups, soft_s, unique)


def listed(client: _native.Client, prefix: Key, pattern: Key | None, limit: int) -> list[Entry]:
    """The objects of the pool whose key starts with ``prefix``, or matches ``pattern`` as a whole."""
    if pattern is None:
        return [Entry(*row) for row in client.list(as_bytes(prefix), limit)]
    if prefix:
        raise InvalidArgument("give either prefix or pattern, not both", operation="list")
    wanted = as_bytes(pattern)
    match = matcher(wanted).fullmatch
    rows = client.list(literal_prefix(wanted), ROWS_MAX)
    return [Entry(*row) for row in rows if match(row[0])][:limit]


class Store:
    """The pool, in one space, over one node.

    node:       the node's Unix socket, or tcp://host:port for a node of another host; None: the default
    socket of this user on this host.
    tenant, namespace, fingerprint: the space that keys live in; stores with different spaces never see each
    other.
    embedded:   bytes ("256MiB" or an int) of a node inside this process instead: nothing else to start, gone
    with it.
    token:      the cluster token, or a key of the tenant; None: the configured one of these, else the token
    beside the socket.
    tls:        how the pool's master and nodes of other hosts are dialled (core.service.data_tls.pool_tls);
    A TlsClient alone: the master. None: as the environment says, and of what it does not as the node wrote
    beside its socket, else in plain.
    timeout_s:  the longest wait without progress.

    Raises Unavailable when there is no node, AuthError when the token or the tenant is wrong.

    After the node was lost, calls raise Unavailable at once (``exists`` says UNKNOWN, ``longest_prefix`` 0
    blocks and why) until it is back; each call may try to reconnect, at most every 0.25 to 2 s. Views that
    were given out stay readable. In a child of fork() every call raises Forked; after close() every call
    raises Closed.
    """

    def __init__(
        self,
        node: str | None = None,
        *,
        tenant: str = "default",
        namespace: str = "default",
        fingerprint: bytes = b"",
        embedded: int | str | None = None,
        token: bytes | None = None,
        tls: PoolTls | _native.TlsClient | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        self._client, self._server = open_client(
            node, tenant, namespace, fingerprint, embedded, token, tls, timeout_s
        )
        self._holder = "embedded" if embedded is not None else node or "local"

    def close(self) -> None:
        """Ends the connection and its pins. Views stay readable; every other call raises Closed."""
        self._client.close()
        if self._server is not None:
            self._server.stop()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the node was there at the last call."""
        return self._client.connected

    @overload
    def put(
        self,
        keys: Key,
        buffers: Object,
        *,
        parents: Key | None = None,
        groups: Key | None = None,
        **options: Unpack[PutOptions],
    ) -> PutResult: ...

    @overload
    def put(
        self,
        keys: Keys,
        buffers: Sequence[Object],
        *,
        parents: Sequence[Key | None] | None = None,
        groups: Sequence[Key | None] | None = None,
        **options: Unpack[PutOptions],
    ) -> list[PutResult]: ...

    def put(
        self,
        keys: Key | Keys,
        buffers: Any,
        *,
        parents: Any = None,
        groups: Any = None,
        **options: Unpack[PutOptions],
    ) -> Any:
        """Stores each buffer under its key.

        parents:  for each key the key that comes before it in a chain, or None: eviction then goes leaf
        first.
        replace:  a new generation in place of an old one; pinned readers keep theirs. Otherwise old bytes
        stay: EXISTS. Without ``unique`` that is the word of one node: two hosts may each store a key.
        unique:   of a key at most one value is stored in the whole pool. The master is asked: EXISTS also
        where another node has the key, or another caller is about to put it; of several that put it at the
        same time one has STORED. It costs two questions to the master, for keys that this host's node does
        not have. Not with ``replace``. Raises Unavailable, and nothing is stored, when the master is away.
        ack:      False: do not wait for the commit (and report STORED for what was sent).
        replicas: in how many nodes the bytes shall lie, of other hosts first and then of the same; each
        result says in how many they do, and why they are fewer.
        node:     where the bytes should rather lie, a node's address ("host:port") or name, or several in
        order: the first that takes an object gets it, and copies go to the next ones. Nodes that are unknown,
        away or full are passed over. Without it the own node comes first, and another when that is full.
        groups:   for each key the group that it belongs to, or None. A node evicts all objects of a group
        that it has, or none while one of them is pinned or has children outside and there is anything else
        to evict; 1,024 of them at most.
        soft_pin_s: evicted only after all that is not soft-pinned. It ends when no caller used the object for
        one to two times that many seconds (49 days at most), and begins anew with its next use.
        timeout_s: the longest wait without progress, for this call.

        Acknowledged means: every get that starts afterwards, anywhere on this host, sees it. REFUSED has a
        reason: over a quarter of the arena, or the arena is full of pinned objects. Raises InvalidArgument
        for a bad key or buffer (nothing is stored), Unavailable or Timeout when the node is lost (any part
        may have been stored).
        """
        # `buffers` keeps the caller's objects alive: a part may be no more than a tensor's address.
        arguments = put_arguments(keys, buffers, parents, groups, **options)
        results = put_results(*self._client.put(*arguments), replicas=options.get("replicas", 1))
        return results[0] if is_one(keys) else results

    @overload
    def get(
        self, keys: Key, into: None = None, *, pin: Pin | None = None, verify: bool = False
    ) -> memoryview | None: ...

    @overload
    def get(
        self, keys: Keys, into: None = None, *, pin: Pin | None = None, verify: bool = False
    ) -> list[memoryview | None]: ...

    @overload
    def get(self, keys: Key, into: Object, *, pin: Pin | None = None, verify: bool = False) -> int | None: ...

    @overload
    def get(
        self, keys: Keys, into: Sequence[Object], *, pin: Pin | None = None, verify: bool = False
    ) -> list[int | None]: ...

    def get(self, keys: Key | Keys, into: Any = None, *, pin: Pin | None = None, verify: bool = False) -> Any:
        """Reads objects: views of the pool's memory, or copies ``into`` the caller's buffers. None is a miss.

        A view is a read-only memoryview that pins its object until the last reference to it is gone. With
        ``into`` the result is the object's size in bytes; a buffer may be larger, a smaller one raises
        InvalidArgument before anything is written to it. On a miss the buffer's content is undefined.
        pin:    read what was pinned before (by exists or longest_prefix), though it may be removed or
        replaced by now.
        verify: check the bytes against their checksum; raises CorruptObject. Without it memory is trusted.
        """
        if is_one(keys):
            return self._get_many([keys], None if into is None else [into], pin, verify)[0]
        return self._get_many(keys, into, pin, verify)

    def _get_many(self, keys: Keys, into: Any, pin: Pin | None, verify: bool) -> list[Any]:
        if pin is not None:
            if into is None:
                return self._client.pinned_views(pin._native, keys, verify)
            return self._client.pinned_into(pin._native, keys, as_parts(into), verify)
        if into is None:
            return self._client.get_views(keys, verify)
        return self._client.get_into(keys, as_parts(into), verify)

    @overload
    def exists(self, keys: Key, *, pin: Literal[False] = False) -> Presence: ...

    @overload
    def exists(self, keys: Keys, *, pin: Literal[False] = False) -> list[Presence]: ...

    @overload
    def exists(self, keys: Keys, *, pin: Literal[True]) -> tuple[list[Presence], Pin | None]: ...

    def exists(self, keys: Key | Keys, *, pin: bool = False) -> Any:
        """HIT, MISS, or UNKNOWN when the node does not answer.

        Without a pin a HIT is a statement about now. With one it is a promise: the second value of the pair
        is the pin on all that were hit (None: nothing was).
        """
        names = [keys] if is_one(keys) else keys
        try:
            if pin:
                flags, native = self._client.pin(names)
                return presences(flags), None if native is None else Pin(native)
            found = presences(self._client.exists(names))
        except NO_ANSWER:
            found = [Presence.UNKNOWN] * len(names)
            if pin:
                return found, None
        return found[0] if is_one(keys) else found

    def exist_flags(self, keys: Keys) -> bytes:
        """What ``exists`` says, a byte a key, for callers with thousands: 0 a MISS, 1 a HIT, 2 UNKNOWN."""
        try:
            return self._client.exists(keys)
        except NO_ANSWER:
            return b"\2" * len(keys)

    def longest_prefix(self, keys: Keys, *, width: int = 1, pin: bool = True) -> Prefix:
        """How many leading blocks of a chain are here, pinned; ``width`` consecutive keys make one block.

        A block counts only when all its objects are here. One question to the node, whatever the length.
        """
        if is_one(keys):
            raise InvalidArgument("longest_prefix takes a list of keys", operation="longest_prefix")
        try:
            answer = self._client.longest_prefix(keys, width, pin)
        except NO_ANSWER as error:
            return Prefix(0, why=str(error))
        return prefix_of(*answer, holder=self._holder)

    def release(self, pin: Pin) -> None:
        """Gives a pin back; the same as ``pin.release()``."""
        pin.release()

    @overload
    def remove(
        self, keys: Key, *, node: str | None = None, generation: int | None = None
    ) -> bool | Unsure: ...

    @overload
    def remove(
        self, keys: Keys, *, node: str | None = None, generation: Sequence[int] | None = None
    ) -> builtins.list[bool | Unsure]: ...

    def remove(
        self, keys: Key | Keys, *, node: str | None = None, generation: int | Sequence[int] | None = None
    ) -> bool | Unsure | builtins.list[bool | Unsure]:
        """Makes objects invisible at once; a caller that has them pinned reads on. True: it was there.

        An Unsure names the nodes that may still have it: a holder that did not answer, or all when the master
        is away. Until such a node is back it may give its own host the old bytes.

        node: only that node's copy, in memory and on its SSD; True: it had one. By its address
        ("host:port") or by its name, where one node of the pool has it. Raises InvalidArgument for no or
        several such nodes, Unavailable when it is away.
        generation: with a node, for each key: only while the copy is that one, as ``stat`` said. False: by
        now it has another one, or none; one that moved between memory and SSD counts as another. A node of
        an older release cannot do this: Unavailable.
        """
        wanted = generations_of(keys, node, generation)
        if is_one(keys):
            return removals(*self._client.remove([keys], node, wanted))[0]
        return removals(*self._client.remove(keys, node, wanted))

    def list(
        self, prefix: Key = b"", *, pattern: Key | None = None, limit: int = 1000
    ) -> builtins.list[Entry]:
        """Objects of this space on all nodes of the pool, in no order, at most ``limit``, each key once.

        prefix: those whose key starts with it. pattern: instead, those whose key matches it as a whole
        (``*``, ``?``, ``[abc]``).
        """
        return listed(self._client, prefix, pattern, limit)

    def remove_all(self, prefix: Key = b"", *, pattern: Key | None = None) -> int:
        """Removes every object that ``list`` would find now, on all nodes; how many there were."""
        removed = 0
        while entries := self.list(prefix, pattern=pattern, limit=REMOVE_BATCH):
            flags = self.remove([entry.key for entry in entries])
            removed += sum(map(bool, flags))
            if not any(flags):  # others remove objects meanwhile, or a node cannot be reached
                break
        return removed

    @overload
    def stat(self) -> dict[str, int]: ...

    @overload
    def stat(self, keys: Key, *, everywhere: bool = True) -> ObjectStat | None: ...

    @overload
    def stat(self, keys: Keys, *, everywhere: bool = True) -> builtins.list[ObjectStat | None]: ...

    def stat(self, keys: Key | Keys | None = None, *, everywhere: bool = True) -> Any:
        """Without keys the node's counters (``*_total``) and gauges, by name.

        With keys what each object is and where its copies lie, as far as the directory knows; None is a miss.
        It reads no bytes and counts as no use: what is only looked at is evicted as if it were not.
        Raises Unavailable when a node or the master would have to answer before a miss is certain.
        everywhere: False: of what the own node has, no copies elsewhere are asked for: that is faster.
        """
        if keys is None:
            return self._client.stat()
        if is_one(keys):
            return stat_of(self._client.describe([keys], everywhere)[0])
        return [stat_of(answer) for answer in self._client.describe(keys, everywhere)]
