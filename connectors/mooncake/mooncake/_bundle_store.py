"""Bundles: a metadata text and named buffers, stored as objects of a store under one new name.

    PREFIX/PARTITION/ID/meta                   the metadata
    PREFIX/PARTITION/ID/buffer/NAME            one buffer, or
    PREFIX/PARTITION/ID/buffer/NAME/chunk/I    its parts, when it is larger than a chunk
    PREFIX/PARTITION/ID/manifest               JSON: keys and sizes of all of these

ID is new for each bundle, so no put meets an object that is there. The manifest is written last and removed
last: a bundle whose manifest can be read is complete. A put that fails removes what it wrote. A buffer of 0
bytes has no object.

The store needs put, get, is_exist and remove. Of one that has more (MooncakeDistributedStore) the methods for
batches are called: one for all buffers of a read, whose bytes are copied once, out of the pool's memory. No
threads but those of a "parallel" put, which end with it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from moonpool.core.errors import Error

from ._codes import Code

DEFAULT_BUNDLE_CHUNK_BYTES = 64 << 20
AUTO_PARALLEL_MIN_BYTES = 64 << 20
AUTO_PARALLEL_MIN_CHUNKS = 8
VIEWED_BYTES_MAX = 256 << 20  # bytes of the pool's memory that a read pins at once
INTO_BYTES_MIN = 1 << 20  # whole objects of this size are read to their place; to check it costs up to 1 ms
VERSION = 1
LAYOUT = "bundle"
_INVALID = "invalid bundle manifest"


class BundleStore(Protocol):
    """What a store needs at least."""

    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Stores one object. Returns a code."""

    def get(self, key: str) -> bytes:
        """The bytes; b"" is a miss."""

    def is_exist(self, key: str) -> int:
        """1 there, 0 not, below 0 unknown."""

    def remove(self, key: str, force: bool = False) -> int:
        """Removes one object. Returns a code."""


@dataclass
class RemoteBundleRef:
    """Names a stored bundle. An empty manifest is read from the store when it is needed."""

    manifest_key: str
    manifest: dict[str, Any]


@dataclass(frozen=True)
class BundleTransferPolicy:
    """How the objects of a bundle are written.

    max_inflight_put: threads of a parallel put.
    put_mode: "auto" is parallel with more than one thread and 8 objects or 64 MiB, else one batch.
    copy_mode: checked only; a put copies once, into the pool, in each mode.
    """

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"


DEFAULT_POLICY = BundleTransferPolicy()


def checked_policy(policy: BundleTransferPolicy | None, max_inflight_put: int | None) -> BundleTransferPolicy:
    """``policy`` with the given number of threads. Raises ValueError for a value that is not supported."""
    chosen = policy or DEFAULT_POLICY
    if max_inflight_put is not None:
        chosen = BundleTransferPolicy(max_inflight_put, chosen.put_mode, chosen.copy_mode)
    if chosen.max_inflight_put < 1:
        raise ValueError("max_inflight_put must be positive")
    if chosen.put_mode not in ("auto", "batch", "parallel"):
        raise ValueError(f"unsupported put_mode: {chosen.put_mode}")
    if chosen.copy_mode not in ("auto", "zero_copy", "copy"):
        raise ValueError(f"unsupported copy_mode: {chosen.copy_mode}")
    return chosen


def checked_chunk_bytes(chunk_bytes: int) -> int:
    """``chunk_bytes``. Raises TypeError for what is no int, ValueError below 1."""
    if not isinstance(chunk_bytes, int):
        raise TypeError(f"chunk_bytes is a number of bytes, not a {type(chunk_bytes).__name__}")
    if chunk_bytes < 1:
        raise ValueError("chunk_bytes must be positive")
    return chunk_bytes


class Source(NamedTuple):
    """The bytes of one buffer.

    parts: memory, one piece behind the other; a buffer of several parts is one object.
    entry: what the manifest has of it beside keys and sizes.
    keep: owns the memory.
    """

    parts: Sequence[memoryview]
    entry: Mapping[str, Any] = {}
    keep: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class Piece(NamedTuple):
    """Bytes start to stop of an object of ``size`` bytes go to ``target``, which has that length."""

    key: str
    size: int
    start: int
    stop: int
    target: np.ndarray[Any, Any]

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the whole object."""
        return self.start == 0 and self.stop == self.size


Rows = Sequence[tuple[str, Sequence[memoryview]]]


class Bundles:
    """Writes, reads and removes bundles in ``store``."""

    def __init__(self, store: BundleStore, key_prefix: str, chunk_bytes: int) -> None:
        self.store: Any = store
        self.prefix = key_prefix.strip("/")
        self.chunk_bytes = checked_chunk_bytes(chunk_bytes)
        if not self.prefix:
            raise ValueError("key_prefix must be a non-empty key prefix")
        self.has_views = hasattr(store, "batch_get_buffer")

    # ---- writing

    def put(
        self,
        meta: Source,
        buffers: Mapping[str, Source],
        partition: str,
        *,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy,
        config: Any,
        inherited: Mapping[str, Any] | None = None,
    ) -> RemoteBundleRef:
        """inherited: the manifest of an older bundle, whose buffers belong to the new one from now on.

        RuntimeError when the store refuses; then nothing of it stays.
        """
        chunk = self.chunk_bytes if chunk_bytes is None else checked_chunk_bytes(chunk_bytes)
        check_segment(partition, "partition")
        for name in buffers:
            check_segment(name, "buffer name")
        check_groups(config)
        ident = f"{partition}/{uuid.uuid4().hex}"
        root = f"{self.prefix}/{ident}"
        rows: list[tuple[str, Sequence[memoryview]]] = []
        manifest: dict[str, Any] = {"version": VERSION, "layout": LAYOUT, "object_id": ident}
        manifest["meta"] = entry_of(f"{root}/meta", meta, chunk, rows)
        manifest["buffers"] = dict(inherited["buffers"]) if inherited else {}
        for name, source in buffers.items():
            manifest["buffers"][name] = entry_of(f"{root}/buffer/{name}", source, chunk, rows)
        if inherited:
            manifest["cleanup_keys"] = inherited["cleanup_keys"]
        ref = RemoteBundleRef(f"{root}/manifest", manifest)
        text = memoryview(json_bytes(manifest, "bundle manifest"))
        try:
            self._write(rows, policy, config)
            self._write([(ref.manifest_key, [text])], DEFAULT_POLICY, config)
        except BaseException:
            self._remove_codes([ref.manifest_key, *(key for key, _ in rows)])
            raise
        return ref

    def _write(self, rows: Rows, policy: BundleTransferPolicy, config: Any) -> None:
        given = {} if config is None else {"config": config}
        if is_parallel(rows, policy):
            with ThreadPoolExecutor(policy.max_inflight_put, thread_name_prefix="mooncake-put") as threads:
                for done in [threads.submit(self._write_one, key, parts, given) for key, parts in rows]:
                    done.result()
            return
        together = [row for row in rows if len(row[1]) == 1] if hasattr(self.store, "put_batch") else []
        if len(together) > 1:
            keys, values = [key for key, _ in together], [parts[0] for _, parts in together]
            check_code(self.store.put_batch(keys, values, **given), keys[0])
        else:
            together = []
        for key, parts in rows:
            if not together or len(parts) > 1:
                self._write_one(key, parts, given)

    def _write_one(self, key: str, parts: Sequence[memoryview], given: Mapping[str, Any]) -> None:
        if len(parts) == 1:
            code = self.store.put(key, parts[0], **given)
        elif hasattr(self.store, "put_parts"):
            code = self.store.put_parts(key, *parts, **given)
        else:
            code = self.store.put(key, b"".join(parts), **given)
        check_code(code, key)

    # ---- reading

    def resolve(self, ref: RemoteBundleRef | Mapping[str, Any]) -> RemoteBundleRef:
        """With its manifest, from the store where ``ref`` has none. ValueError for one that is none."""
        found = as_ref(ref)
        if not found.manifest:
            data = self._get(found.manifest_key)
            if not data:
                raise RuntimeError(f"get failed for {found.manifest_key}: there is no such object")
            try:
                found = RemoteBundleRef(found.manifest_key, json.loads(data))
            except ValueError as error:
                raise ValueError(_INVALID) from error
        check_manifest(found.manifest)
        return found

    def read_all(self, entries: Sequence[Mapping[str, Any]]) -> list[np.ndarray[Any, Any]]:
        """The bytes of each buffer, in memory of their own."""
        targets = [np.empty(int(entry["bytes"]), np.uint8) for entry in entries]
        self.read(
            piece
            for entry, target in zip(entries, targets, strict=True)
            for piece in pieces_of(entry, 0, target)
        )
        return targets

    def read(self, pieces: Iterable[Piece]) -> None:
        """RuntimeError when an object is not there, cannot be had, or has another size than its manifest
        says; some targets may have been written then.
        """
        rest: list[Piece] = []
        into: list[Piece] = []
        for piece in pieces:
            large = piece.is_whole and piece.size >= INTO_BYTES_MIN and hasattr(self.store, "batch_get_into")
            (into if large else rest).append(piece)
        if into:
            keys, sizes = [piece.key for piece in into], [piece.size for piece in into]
            codes = self.store.batch_get_into(keys, [piece.target.ctypes.data for piece in into], sizes)
            for key, size, code in zip(keys, sizes, codes, strict=True):
                if code != size:
                    raise RuntimeError(f"get failed for {key}: expected {size} bytes, got {code}")
        for some in bounded(rest):
            self._copy(some)

    def _copy(self, pieces: Sequence[Piece]) -> None:
        keys = list(dict.fromkeys(piece.key for piece in pieces))
        views = dict(zip(keys, self._views(keys), strict=True))
        for piece in pieces:
            held = views[piece.key]
            size = 0 if held is None else memoryview(held).nbytes
            if size != piece.size:
                raise RuntimeError(f"get failed for {piece.key}: expected {piece.size} bytes, got {size}")
            piece.target[:] = np.frombuffer(held, np.uint8)[piece.start : piece.stop]

    def _views(self, keys: list[str]) -> Sequence[Any]:
        if not self.has_views:
            return [self._get(key) for key in keys]
        try:
            found: Sequence[Any] = self.store.batch_get_buffer(keys)
        except Error as error:
            raise RuntimeError(f"get failed for {keys[0]} and {len(keys) - 1:,} more: {error}") from error
        return found

    def _get(self, key: str) -> bytes:
        try:
            data: bytes = self.store.get(key)
        except Error as error:
            raise RuntimeError(f"get failed for {key}: {error}") from error
        return data

    # ---- removing

    def remove(self, ref: RemoteBundleRef | Mapping[str, Any], *, keep: Iterable[str] = ()) -> None:
        """All objects of the bundle but those of the keys in ``keep``; what is gone already is no error.

        RuntimeError with the keys that could not be removed; then the manifest stays, for another try.
        """
        found, kept = as_ref(ref), set(keep)
        if not found.manifest and self.store.is_exist(found.manifest_key) == 0:
            return
        found = self.resolve(found)
        for keys in (keys_of_bundle(found), [found.manifest_key]):
            gone = [key for key in keys if key not in kept]
            codes = self._remove_codes(gone)
            left = [row for row in zip(gone, codes, strict=True) if row[1] not in (0, Code.OBJECT_NOT_FOUND)]
            if left:
                raise RuntimeError(f"failed to remove {len(left)} Mooncake keys: {left[:16]}")

    def _remove_codes(self, keys: list[str]) -> list[int]:
        if not keys:
            return []
        if hasattr(self.store, "batch_remove"):
            return list(self.store.batch_remove(keys, True))
        return [self.store.remove(key, True) for key in keys]


def is_parallel(rows: Rows, policy: BundleTransferPolicy) -> bool:
    """Whether a put of these rows uses several threads."""
    if policy.put_mode != "auto":
        return policy.put_mode == "parallel"
    nbytes = sum(part.nbytes for _, parts in rows for part in parts)
    large = len(rows) >= AUTO_PARALLEL_MIN_CHUNKS or nbytes >= AUTO_PARALLEL_MIN_BYTES
    return policy.max_inflight_put > 1 and large


def check_code(code: Any, key: str) -> None:
    """Raises RuntimeError for a code other than 0."""
    if code != 0:
        raise RuntimeError(f"put failed for {key}: {code}")


def check_groups(config: Any) -> None:
    """Raises ValueError for a config with several groups."""
    groups = getattr(config, "group_ids", None)
    if groups is not None and len(groups) != 1:
        raise ValueError("config.group_ids has one group, which all objects of a bundle are in")


def check_segment(value: Any, name: str) -> None:
    """Of a key: it has a text between slashes."""
    if not isinstance(value, str) or not value or "/" in value:
        raise ValueError(f"invalid bundle {name}: {value!r:.200}")


def entry_of(
    key: str, source: Source, chunk_bytes: int, rows: list[tuple[str, Sequence[memoryview]]]
) -> dict[str, Any]:
    """Of the manifest; what is to be written is added to ``rows``."""
    total = source.nbytes
    if len(source.parts) > 1 or total <= chunk_bytes:
        parts = [(key, source.parts)] if total else []
    else:
        view = source.parts[0]
        starts = range(0, total, chunk_bytes)
        parts = [(f"{key}/chunk/{i}", [view[at : at + chunk_bytes]]) for i, at in enumerate(starts)]
    rows += parts
    chunks = [{"key": name, "bytes": sum(part.nbytes for part in some)} for name, some in parts]
    return {"key": key, "bytes": total, "chunks": chunks, **source.entry}


def pieces_of(entry: Mapping[str, Any], start: int, target: np.ndarray[Any, Any]) -> Iterator[Piece]:
    """What fills ``target``, bytes in one piece, with the buffer's bytes from ``start`` on."""
    stop, begin = start + target.nbytes, 0
    for chunk in entry["chunks"]:
        size = chunk["bytes"]
        low, high = max(start, begin), min(stop, begin + size)
        if low < high:
            yield Piece(chunk["key"], size, low - begin, high - begin, target[low - start : high - start])
        begin += size
    if stop > begin:
        raise ValueError(_INVALID)


def bounded(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """In runs whose objects have VIEWED_BYTES_MAX together, or that are one object."""
    run: list[Piece] = []
    held = 0
    for _, same in groupby(pieces, key=lambda piece: piece.key):
        some = list(same)
        if run and held + some[0].size > VIEWED_BYTES_MAX:
            yield run
            run, held = [], 0
        run += some
        held += some[0].size
    if run:
        yield run


def as_ref(ref: Any) -> RemoteBundleRef:
    """The reference, from itself or from a mapping. Raises TypeError for anything else."""
    if isinstance(ref, RemoteBundleRef):
        return ref
    if not isinstance(ref, Mapping):
        raise TypeError(f"a bundle ref is a RemoteBundleRef or a mapping, not a {type(ref).__name__}")
    key = ref.get("manifest_key")
    if not isinstance(key, str) or not key:
        raise ValueError("bundle ref must include manifest_key")
    return RemoteBundleRef(key, dict(ref.get("manifest") or {}))


def keys_of_bundle(ref: RemoteBundleRef) -> list[str]:
    """The keys of all objects of a bundle but its manifest."""
    manifest = ref.manifest
    entries = [manifest["meta"], *manifest["buffers"].values()]
    keys = [chunk["key"] for entry in entries for chunk in entry["chunks"]]
    return list(dict.fromkeys([*keys, *manifest.get("cleanup_keys", ())]))


def check_manifest(manifest: Any) -> None:
    """ValueError for one that no put of ours wrote."""
    try:
        good = manifest["version"] == VERSION and manifest["layout"] == LAYOUT
        for entry in (manifest["meta"], *manifest["buffers"].values()):
            sizes = [chunk["bytes"] for chunk in entry["chunks"] if isinstance(chunk["key"], str)]
            good &= all(type(size) is int and size > 0 for size in sizes)
            good &= len(sizes) == len(entry["chunks"]) and sum(sizes) == entry["bytes"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(_INVALID) from error
    if not good:
        raise ValueError(_INVALID)


def json_bytes(value: Mapping[str, Any], label: str) -> bytes:
    """The JSON text of ``value``. Raises TypeError that names ``label`` when it has none."""
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{label} must be JSON-serializable") from error
