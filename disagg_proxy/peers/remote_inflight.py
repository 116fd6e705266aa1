"""Enters the requests that other proxies have in flight into this proxy's accounts. Pure: ``now_s`` is an
argument.

Their requests get negative numbers, since a proxy's own start at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.peers.wire import Begun, BlocksExpected, Change, Gone, Prefilled, Sent

REQUESTS_MAX = 100_000  # of all other proxies together; further ones are ignored
TOKENS_MAX = 1 << 40
PREDICTED_S_MAX = 3600.0


@dataclass(slots=True)
class _Theirs:
    name: int
    computes: Worker
    decode: Worker
    sent_s: float
    tokens: int
    pending_handover: bool  # decode runs on another worker than prefill
    computed: bool = False
    decoding: bool = False


class RemoteInflight:
    """The requests of the other proxies. Not thread safe.

    find:   (name, site) -> the worker; None: unknown here.
    placed: called with (worker, tokens for each block, keys) of blocks that an engine will hold.
    """

    def __init__(
        self,
        find: Callable[[str, str], Worker | None],
        placed: Callable[[Worker, int, bytes], None] = lambda worker, block_tokens, keys: None,
    ) -> None:
        self.unknown = 0  # requests for unknown engines, and implausible ones
        self._find = find
        self._placed = placed
        self._of: dict[str, dict[int, _Theirs]] = {}  # by sender and its number for the request
        self._count = 0
        self._last = 0

    def __len__(self) -> int:
        return self._count

    def apply(self, sender: str, changes: Iterable[Change], now_s: float, *, lag_s: float = 0.0) -> None:
        """Applies changes in order. lag_s: how long ago they happened."""
        then_s = now_s - lag_s
        theirs = self._of.setdefault(sender, {})
        for change in changes:
            if isinstance(change, Sent):
                self._leave(theirs, change.request, then_s)  # the previous attempt
                self._enter(theirs, change, then_s)
                known = theirs.get(change.request)
                if known is not None:
                    known.computes.remote_arrivals.reported(change.predicted_s, lag_s, now_s)
            elif isinstance(change, BlocksExpected):
                worker = self._find(change.engine, change.at)
                if worker is None:
                    self.unknown += 1
                else:
                    self._placed(worker, change.block_tokens, change.keys)
            elif change.request in theirs:
                self._report(theirs, change, then_s)

    def _report(self, theirs: dict[int, _Theirs], change: Prefilled | Begun | Gone, now_s: float) -> None:
        known = theirs[change.request]
        if isinstance(change, Gone):
            self._leave(theirs, change.request, now_s)
            return
        known.computes.load.heard(now_s)
        if isinstance(change, Prefilled) or change.computed:
            self._computed(known, now_s)
        if isinstance(change, Begun):
            self._decodes(known, now_s)

    def replace(self, sender: str, state: Iterable[Change], now_s: float, *, lag_s: float = 0.0) -> None:
        """Replaces all requests of a sender. Known requests keep their position in the queue. lag_s: how long
        ago this was its state."""
        now_s -= lag_s
        theirs = self._of.setdefault(sender, {})
        entries = {entry.request: entry for entry in state if isinstance(entry, Sent)}
        for request in [each for each in theirs if each not in entries]:
            self._leave(theirs, request, now_s)
        for request, entry in entries.items():
            known = theirs.get(request)
            if known is not None and (known.computes.known_as, known.decode.known_as) != (
                entry.computes,
                entry.decode,
            ):
                self._leave(theirs, request, now_s)
                known = None
            if known is None:
                self._enter(theirs, entry, now_s)
                known = theirs.get(request)
            if known is None:  # of an unknown engine
                continue
            if entry.computed:
                self._computed(known, now_s)
            if entry.decoding:
                self._decodes(known, now_s)

    def gone(self, sender: str, now_s: float) -> int:
        """Removes all requests of a sender that is gone; returns their number."""
        theirs = self._of.pop(sender, {})
        count = len(theirs)
        for request in list(theirs):
            self._leave(theirs, request, now_s)
        return count

    def expire(self, before_s: float, streams_before_s: float, now_s: float) -> None:
        """Removes requests sent before ``before_s``, streams before ``streams_before_s``: their proxy has
        dropped them, too."""
        for theirs in self._of.values():
            for request in [
                each
                for each, known in theirs.items()
                if known.sent_s < (streams_before_s if known.decoding else before_s)
            ]:
                self._leave(theirs, request, now_s)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if self._count != sum(map(len, self._of.values())):
            raise AssertionError("the requests of other proxies do not add up")

    def _enter(self, theirs: dict[int, _Theirs], entry: Sent, now_s: float) -> None:
        computes = self._find(entry.computes, entry.computes_at)
        decode = self._find(entry.decode, entry.decode_at)
        if computes is None or decode is None or not _is_plausible(entry) or self._count >= REQUESTS_MAX:
            self.unknown += 1
            return
        self._last -= 1
        sent_s = now_s - entry.age_s
        apart = computes is not decode
        known = _Theirs(self._last, computes, decode, sent_s, entry.tokens, pending_handover=apart)
        theirs[entry.request] = known
        self._count += 1
        if apart:
            decode.pending_handover += 1
            decode.pending_handover_tokens += entry.tokens
        computes.arrival_rate.add(entry.predicted_s, now_s)
        if not entry.computed:
            computes.load.prefill_began(
                known.name,
                entry.tokens,
                entry.own,
                entry.pool,
                entry.predicted_s,
                sent_s,
                silent=entry.silent,
            )
        if entry.silent:
            self._decodes(known, now_s)

    @staticmethod
    def _computed(known: _Theirs, now_s: float) -> None:
        if not known.computed:
            known.computed = True
            known.computes.load.prefill_ended(known.name, now_s)

    @staticmethod
    def _decodes(known: _Theirs, now_s: float) -> None:
        if not known.decoding:
            known.decoding = True
            _arrived(known)
            known.decode.load.decode_began(known.name, known.tokens, now_s)

    def _leave(self, theirs: dict[int, _Theirs], request: int, now_s: float) -> None:
        known = theirs.pop(request, None)
        if known is None:
            return
        self._count -= 1
        _arrived(known)
        known.computes.load.prefill_ended(known.name, now_s, done=False)
        known.decode.load.decode_ended(known.name, 0, now_s)


def _arrived(known: _Theirs) -> None:
    """Ends the pending hand-over to the decode worker."""
    if known.pending_handover:
        known.pending_handover = False
        known.decode.pending_handover -= 1
        known.decode.pending_handover_tokens -= known.tokens


def _is_plausible(entry: Sent) -> bool:
    """Whether the values are in range: a wrong frame must not add a queue of a thousand years."""
    return (
        0 <= entry.tokens <= TOKENS_MAX
        and 0 <= entry.own <= entry.tokens
        and 0 <= entry.own + entry.pool <= entry.tokens
        and entry.pool >= 0
        and 0 <= entry.predicted_s <= PREDICTED_S_MAX
        and 0 <= entry.age_s < math.inf
    )
