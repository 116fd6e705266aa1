"""Where a prefill engine can be met in the concurrent form: what its bootstrap page says (``GET /query``, as
of vLLM's MooncakeConnector and of ours), and since when.

    {"<data-parallel rank>": {"engine_id": "...", ...}, ...}

Engines of several data-parallel ranks behind one address are called ID_dp0, ID_dp1, ...: vLLM's connector has
all of them on one page, ours one on each of the following ports.

Pure but for the log: ``health.py`` asks and tells the outcome.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import msgspec

from moonpool.disagg_proxy.engines.bootstrap_trust import (
    DISTRUST_S,
    LATE_MAX,
    LATE_S,
    WINDOW,
    BootstrapTrust,
    Verdict,
)

RANKS_MAX = 256
RETRY_S_MAX = 30.0  # a page that does not answer is asked for less and less often
_RANK = re.compile(r"(.+)_dp([0-9]{1,4})")

_log = logging.getLogger("moonpool.proxy")


@dataclass(frozen=True, slots=True)
class Rank:
    """One prefill engine behind an address. url: of the page that knows it; number: which of the address's
    ranks, as it wants to be told, None when there are no ranks. cached: whether it gives other engines blocks
    of its own cache, and takes theirs."""

    engine_id: str
    url: str
    number: int | None = None
    cached: bool = False


class _Member(msgspec.Struct):
    engine_id: str
    cached: bool = False


_page = msgspec.json.Decoder(dict[str, _Member])


def read_page(body: bytes, url: str) -> tuple[Rank, ...]:
    """The ranks of one page, in their order; () when it is no such page. Where it has ranks of several
    engines: those of the first."""
    try:
        read = {int(key): member for key, member in _page.decode(body).items()}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ()
    members = [read[key] for key in sorted(read)][:RANKS_MAX]
    ids = [member.engine_id for member in members]
    if not all(0 < len(engine_id) <= 256 for engine_id in ids):
        return ()
    first = _RANK.fullmatch(ids[0]) if ids else None
    if first is not None:
        ids = [engine_id for engine_id in ids if engine_id.startswith(f"{first[1]}_dp")]
    if len(ids) == 1 and first is None:
        return (Rank(ids[0], url, cached=members[0].cached),)
    return tuple(Rank(engine_id, url, number) for number, engine_id in enumerate(ids))


def is_next(last: Rank, rank: Rank) -> bool:
    """Whether ``rank``, from the page of the following port, belongs to the same engine."""
    before, after = _RANK.fullmatch(last.engine_id), _RANK.fullmatch(rank.engine_id)
    return bool(before and after and before[1] == after[1] and int(after[2]) == int(before[2]) + 1)


class Bootstrap:
    """The bootstrap page of one engine. ``take`` and ``met`` may be called on any thread, the rest on the
    event loop.

    address:  of the page.
    pages:    addresses of all engines' pages, a live view.
    expected: whether the settings demand the page, so that its absence is logged.
    up:       whether the page is known and trusted.
    restarts: how often the engine came back with other ids.
    stale:    requests that were sent with ids that a restart may have voided.
    says:     ids on the page when it was last read, trusted or not.
    """

    def __init__(
        self,
        engine: str,
        address: tuple[str, int],
        *,
        expected: bool,
        retry_s: float,
        pages: Set[tuple[str, int]] = frozenset(),
    ) -> None:
        self.address = address
        self.pages = pages
        self.says: frozenset[str] = frozenset()
        self.restarts = 0
        self.stale = 0
        self._engine = engine
        self._expected = expected
        self._retry_first_s = self._retry_s = retry_s
        self._ask_at_s = 0.0
        self._told = False  # its absence was logged
        self._lock = threading.Lock()
        self._ranks: tuple[Rank, ...] = ()
        self._ids: frozenset[str] = frozenset()  # the last known ids
        self._turn = 0
        self._unconfirmed = 0  # requests since the page was last read
        self._watch = BootstrapTrust()
        self._distrusted: frozenset[str] = frozenset()
        self._trust_at_s = 0.0

    @property
    def up(self) -> bool:
        """Whether the page is known and in use."""
        return bool(self._ranks)

    def is_due(self, now_s: float) -> bool:
        """Whether the page should be read now."""
        return self.up or now_s >= self._ask_at_s

    def take(self) -> Rank | None:
        """The rank for the next request; None: the page is not known."""
        with self._lock:
            if not self._ranks:
                return None
            self._turn += 1
            self._unconfirmed += 1
            return self._ranks[self._turn % len(self._ranks)]

    @property
    def cache(self) -> Rank | None:
        """The engine, if it gives other engines blocks of its own cache, and takes theirs. Of several ranks
        it is not known which one has a block."""
        ranks = self._ranks
        return ranks[0] if len(ranks) == 1 and ranks[0].cached else None

    def answered(self, ranks: tuple[Rank, ...], now_s: float, pages: Iterable[Bootstrap] = ()) -> None:
        """Stores the content of the page, which is never empty. pages: those of all engines. If two pages
        have the same content, it is unknown to which engine it belongs, so neither is trusted."""
        ids = self.says = frozenset(rank.engine_id for rank in ranks)
        twins = [page for page in pages if page is not self and page.says & ids]
        for page in twins:
            page._share(self)
        if twins:
            self._share(twins[0])
            return self._ask_later(now_s)
        if ids == self._distrusted and now_s < self._trust_at_s:
            return
        with self._lock:
            if self._ids - ids and ids - self._ids:  # a subset means that a rank was missed once
                self.restarts += 1
                self.stale += self._unconfirmed
            self._unconfirmed = 0
            was_up, self._ranks, self._ids = self.up, ranks, ids
            if not was_up:
                self._watch.believe()
        self._retry_s, self._ask_at_s = self._retry_first_s, 0.0
        if not was_up:
            self._told = False
            _log.info("engine %s hands over concurrently: %d rank(s)", self._engine, len(ranks))

    def met(self, decode: int, wait_s: float, *, concurrent: bool, now_s: float) -> None:
        """Reports a hand-over. decode: place of the decode engine. wait_s: seconds from the end of the
        prefill."""
        with self._lock:
            if concurrent and not self._ranks:
                return
            verdict = self._watch.met(decode, wait_s, concurrent=concurrent, now_s=now_s)
            if verdict is Verdict.NONE:
                return
            if verdict is Verdict.DOUBT:
                self._distrusted, self._trust_at_s = self._ids, now_s + DISTRUST_S
                self._ranks = ()
            else:
                self._trust_at_s = now_s
        if verdict is Verdict.CLEAR:
            _log.info(
                "engine %s: two steps are as late: decode is overloaded; it was not its bootstrap page",
                self._engine,
            )
            return
        _log.warning(
            "engine %s: %d of %d answers came more than %g s after their prefill: a decode engine is "
            "overloaded, or it cannot reach the bootstrap page at %s:%d, or that is another engine's "
            "(--prefill URL#bootstrap=PORT says where its own is); prefill and decode take two steps for "
            "%g s, or until those are found to be as late, as under overload they are",
            self._engine,
            LATE_MAX,
            WINDOW,
            LATE_S,
            *self.address,
            DISTRUST_S,
        )

    def failed(self, why: str, now_s: float) -> None:
        """The page could not be read, though the engine is healthy."""
        if self.up or self._expected:
            self._tell(why)
        self.says = frozenset()
        self._drop()
        self._ask_later(now_s)

    def engine_left(self) -> None:
        """The engine left the rotation; its page is read again when it comes back."""
        self.says = frozenset()
        self._drop()
        self._retry_s, self._ask_at_s = self._retry_first_s, 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if self._ranks and frozenset(rank.engine_id for rank in self._ranks) != self._ids:
            raise AssertionError("the ids of the ranks are not those that are known")
        if not self._ranks and self._unconfirmed and not self._ids:
            raise AssertionError("requests were sent by a page that was never there")

    def _share(self, other: Bootstrap) -> None:
        self._tell(f"what answers there is the page of engine {other._engine}, too")
        self._drop()

    def _ask_later(self, now_s: float) -> None:
        self._ask_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)

    def _tell(self, why: str) -> None:
        if self._told:
            return
        self._told = True
        _log.warning(
            "engine %s has no bootstrap page at %s:%d (%s): prefill and decode take two steps; "
            "--prefill URL#bootstrap=PORT says where it is, 0 that there is none",
            self._engine,
            *self.address,
            why,
        )

    def _drop(self) -> None:
        with self._lock:
            self._ranks = ()


def parameters(rank: Rank, transfer: str) -> tuple[bytes, bytes]:
    """kv_transfer_params for the prefill and for the decode engine."""
    prefill: Mapping[str, object] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer,
    }
    decode: Mapping[str, object] = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": rank.engine_id,
        "remote_bootstrap_addr": rank.url,
        "transfer_id": transfer,
    }
    return msgspec.json.encode(prefill), msgspec.json.encode(decode)
