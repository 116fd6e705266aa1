"""Answers ``POST /query`` and ``POST /query_by_hash``: how much of a prompt each engine has cached, in the
form of Mooncake's conductor.

    {"<tenant>": {"<instance>": {"longest_matched", "GPU", "DP": {"<rank>": ...}, "CPU", "DISK"}}}

All values are tokens of whole blocks from the prompt's start. GPU: on the device. CPU: on the device or in
host memory, including the pool's. DISK: in any tier, including the pool's disks. CPU and DISK are 0 if they
add nothing to the tier before. The pool counts for every engine; DP counts what each rank holds itself, so
that ranks can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np

from moonpool import _native
from moonpool.disagg_proxy.conductor.plan import Answer, refused
from moonpool.disagg_proxy.discovery.block_hash_index import BlockHashIndex, Space
from moonpool.disagg_proxy.discovery.registration import TENANT, Name, Text
from moonpool.disagg_proxy.discovery.registry import ActiveRegistration
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.tenant_salts import told_salt

QUERY_BYTES_MAX = 16 << 20  # a million tokens and more
Tiers = tuple[int, int, int]  # leading blocks on the device, there or in the host's memory, anywhere
Asked = TypeVar("Asked", bound="_AnyQuery")
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Hash = Annotated[int, msgspec.Meta(ge=0)]  # of 64 bits


class _AnyQuery(msgspec.Struct, kw_only=True):
    """What both queries say."""

    model: Text
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    lora_name: Text | None = None
    lora_id: int | None = None
    tenant_id: Name = TENANT
    instance_id: Name | None = None
    cache_salt: Text | None = None


class _Query(_AnyQuery, kw_only=True):
    """Body of /query. token_ids: parsed separately, without a Python object for each."""

    token_ids: msgspec.Raw


class _HashQuery(_AnyQuery, kw_only=True):
    """Body of /query_by_hash. seq_hashes: rolling hashes; earlier drafts of the API call them block_hash."""

    seq_hashes: list[Hash] | None = None
    block_hash: list[Hash] | None = None


class _Holder(NamedTuple):
    """One rank of an instance. place: its index in the prefix indexes. salt: of all its blocks; None: each
    block has its request's salt."""

    instance: str
    rank: int
    place: int
    salt: str | None


class CacheQueryApi:
    """Runs on any one thread. engines: those of the fleet. publishers: the active registrations."""

    def __init__(
        self,
        indexes: PrefixIndexes,
        engines: Callable[[], Iterable[Engine]],
        publishers: Callable[[], Iterable[ActiveRegistration]],
        sequences: BlockHashIndex,
    ) -> None:
        self._indexes = indexes
        self._engines = engines
        self._publishers = publishers
        self._sequences = sequences

    def by_tokens(self, body: bytes, salt: str = "") -> Answer:
        """Answers POST /query. salt: of the asker's tenant; "": it has none."""
        asked = _read(body, _Query)
        if isinstance(asked, Answer):
            return asked
        ids = _ids(body, asked.token_ids)
        if isinstance(ids, Answer):
            return ids
        asked.cache_salt = told_salt(salt, asked.cache_salt)
        return self._answer(asked, lambda index, space: index.keys(ids, space.seed))

    def by_hashes(self, body: bytes, salt: str = "") -> Answer:
        """Answers POST /query_by_hash. salt: as in by_tokens."""
        asked = _read(body, _HashQuery)
        if isinstance(asked, Answer):
            return asked
        hashes = asked.seq_hashes if asked.seq_hashes is not None else asked.block_hash
        if hashes is None:
            return refused(400, "a query has seq_hashes", "query")
        asked.cache_salt = told_salt(salt, asked.cache_salt)

        return self._answer(asked, lambda index, space: self._sequences.keys(space, hashes))

    def _answer(self, asked: _AnyQuery, keys: Callable[[_native.PrefixIndex, Space], bytes]) -> Answer:
        """keys: computes the index keys of the prompt's blocks in a space."""
        index = self._indexes.find(asked.block_size)
        matches: dict[str, _Match] = {}  # by salt
        rows: dict[str, dict[int, Tiers]] = {}
        pools: dict[str, Tiers] = {}
        for holder in self._holders(asked):
            if asked.instance_id not in (None, holder.instance):
                continue
            salt = (asked.cache_salt or "") if holder.salt is None else ""
            if salt not in matches:
                space = Space(asked.block_size, asked.lora_name or "", salt)
                matches[salt] = _Match(index, b"" if index is None else keys(index, space))
            rows.setdefault(holder.instance, {})[holder.rank] = matches[salt].of(holder.place)
            pools[holder.instance] = matches[salt].pool
        said = {name: _row(ranks, pools[name], asked.block_size) for name, ranks in rows.items()}
        return Answer(200, msgspec.json.encode({asked.tenant_id: said}))

    def _holders(self, asked: _AnyQuery) -> Iterator[_Holder]:
        registered: dict[str, ActiveRegistration] = {}
        for each in tuple(self._publishers()):  # a copy: the event loop changes it
            told = each.told
            if each.found is not None:
                registered[each.found.name] = each
            elif each.holder is not None and told.tenant_id == asked.tenant_id and _fits(each, asked):
                yield _Holder(told.instance_id, told.dp_rank, each.holder, told.additionalsalt or None)
        for engine in self._engines():
            if engine.models is not None and not {asked.model, asked.lora_name or ""} & engine.models.keys():
                continue
            known = registered.get(engine.name)
            if (TENANT if known is None else known.told.tenant_id) != asked.tenant_id:
                continue
            if known is None:
                yield _Holder(engine.name, 0, engine.place, None)
            elif _fits(known, asked):
                salt = known.told.additionalsalt or None
                yield _Holder(engine.name, known.told.dp_rank, engine.place, salt)


class _Match:
    """Matches of one prompt. index: None: no engine has blocks of this size. pool: all nodes together."""

    def __init__(self, index: _native.PrefixIndex | None, keys: bytes) -> None:
        self.pool: Tiers = 0, 0, 0
        self._tiers: list[memoryview[int]] = []
        if index is not None:
            match = index.match(keys)
            self.pool = 0, match.pool_host, match.pool_blocks
            self._tiers = [memoryview(each).cast("I") for each in (match.device, match.host, match.blocks)]

    def of(self, place: int) -> Tiers:
        """Number of leading blocks: on the device, in host memory too, in any tier."""
        if not self._tiers:
            return 0, 0, 0
        device, host, anywhere = (each[place] if place < len(each) else 0 for each in self._tiers)
        return device, host, anywhere


def _read(body: bytes, kind: type[Asked]) -> Asked | Answer:
    """Parses a query; an Answer if it is invalid."""
    if len(body) > QUERY_BYTES_MAX:
        return refused(413, f"a query has {QUERY_BYTES_MAX} bytes at most", "query")
    try:
        asked = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return refused(400, str(error), "query")
    if asked.lora_id is not None:
        return refused(400, "give lora_name in the place of lora_id, which names nothing here", "query")
    return asked


def _ids(body: bytes, told: msgspec.Raw) -> bytes | Answer:
    """The token ids as packed u32; an Answer if they are invalid."""
    ids = _native.json_token_ids(body, "token_ids")
    if ids is not None and bytes(told).count(b"[") == 1:
        return bytes(ids)
    try:
        return np.array(msgspec.json.decode(told, type=list[Id]), "<u4").tobytes()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return refused(400, f"token_ids: {error}", "query")


def _fits(publisher: ActiveRegistration, asked: _AnyQuery) -> bool:
    told = publisher.told
    if told.modelname and asked.model != told.modelname:
        return False
    if (told.lora_name or "") not in ("", asked.lora_name or ""):
        return False
    return not told.additionalsalt or told.additionalsalt == asked.cache_salt


def _row(ranks: Mapping[int, Tiers], pool: Tiers, block: int) -> dict[str, object]:
    device, host, anywhere = (max(tiers) * block for tiers in zip(pool, *ranks.values(), strict=True))
    return {
        "longest_matched": anywhere,
        "GPU": device,
        "DP": {str(rank): tiers[2] * block for rank, tiers in sorted(ranks.items())},
        "CPU": host if host > device else 0,
        "DISK": anywhere if anywhere > host else 0,
    }
