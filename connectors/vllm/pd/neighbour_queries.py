"""Asks to other engines for blocks of their own prefix caches (neighbour_asks.py), each on a thread of its
own: the scheduler's thread only polls. An engine that cannot be asked, or that lets a request wait as long as
any may, is not asked again for some seconds, so that it costs one request of many the wait. One that is late
for a short prompt, which waits a moment only, may be in time for a long one.

An offer that comes when its request waits for it no more is handed on by ``take_late``: the neighbour is told
that it need not keep the blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer, Unusable
from moonpool.connectors.vllm.pd.neighbour_asks import PATH, Ask, Neighbour, encode_ask, read_answer
from moonpool.core.service.http_get import exchange

QUERIES_MAX = 16
REST_S = 10.0
LATE_S = 1.0  # an answer that comes so much later is still read, and refused


@dataclass(slots=True, eq=False)
class Query:
    """One ask under way.

    first: the place in the prompt of the first block that is asked for.
    began_s: seconds of the clock.
    wait_s: seconds that the request waits for the answer at most.
    offer: what came of it; None: nothing.
    is_over: whether the neighbour has answered, or cannot.
    why: why it did not answer, or "".
    is_wanted: whether a request waits for it.
    """

    neighbour: Neighbour
    first: int
    began_s: float
    wait_s: float
    offer: Offer | None = None
    is_over: bool = False
    why: str = ""
    is_wanted: bool = True


class NeighbourQueries:
    """All methods run on the scheduler's thread."""

    def __init__(
        self,
        *,
        engine_id: str,
        fingerprint: bytes,
        algorithm: str,
        token: bytes,
        wait_s_max: float,
        tally: Tally,
        clock: Callable[[], float],
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """engine_id: of this engine, which is not asked.
        wait_s_max: how long a request of any length waits at most, seconds.
        start: runs what asks, for tests; None: on a new thread.
        """
        self._engine_id = engine_id
        self._fingerprint = fingerprint
        self._algorithm = algorithm
        self._token = token
        self._wait_s_max = wait_s_max
        self._tally = tally
        self._clock = clock
        self._start = start or _on_thread
        self._queries: dict[str, Query] = {}
        self._under_way: set[Query] = set()
        self._ended: deque[tuple[Query, Offer | None, str]] = deque()
        self._rests: dict[str, float] = {}
        self._late: list[Offer] = []

    @property
    def under_way(self) -> int:
        """Asks without an answer, and offers that are not refused yet."""
        return len(self._under_way) + len(self._late)

    def is_asked(self, request_id: str) -> bool:
        """Whether an ask was made for the request."""
        return request_id in self._queries

    def begin(
        self, request_id: str, neighbour: Neighbour, first: int, hashes: Sequence[bytes], wait_s: float
    ) -> bool:
        """Asks for the blocks with these hashes, the first of which is block ``first`` of the prompt. The
        request waits for ``wait_s`` seconds at most. Returns whether it does."""
        now_s = self._clock()
        if neighbour.remote_engine_id == self._engine_id or len(self._under_way) >= QUERIES_MAX:
            return False
        if now_s < self._rests.get(neighbour.remote_bootstrap_addr, now_s):
            return False
        query = Query(neighbour, first, now_s, wait_s)
        ask = Ask(neighbour.remote_engine_id, self._fingerprint, self._algorithm, wait_s, list(hashes))
        try:
            self._start(lambda: self._run(query, ask))
        except RuntimeError:  # this process can have no more threads
            return False
        self._queries[request_id] = query
        self._under_way.add(query)
        self._tally.add("neighbour_asks")
        return True

    def poll(self, request_id: str) -> Query | None:
        """The ask of a request, once it is over; None: the request waits on."""
        self._take_ended()
        query = self._queries[request_id]
        if not query.is_over and self._clock() - query.began_s < query.wait_s:
            return None
        del self._queries[request_id]
        query.is_wanted = False
        if not query.is_over or query.why:
            self._tally.add("neighbour_unanswered")
        if not query.is_over and query.wait_s >= self._wait_s_max:
            self._rest(query.neighbour)
        return query

    def drop(self, request_id: str) -> None:
        """The request waits for no answer any more."""
        query = self._queries.pop(request_id, None)
        if query is not None:
            query.is_wanted = False
            if query.offer is not None:
                self._late.append(query.offer)

    def take_late(self) -> list[Offer]:
        """Offers that no request waits for."""
        self._take_ended()
        late, self._late = self._late, []
        return late

    def _take_ended(self) -> None:
        while self._ended:
            query, offer, why = self._ended.popleft()
            self._under_way.discard(query)
            query.is_over, query.why = True, why
            if why:
                self._rest(query.neighbour)
            if query.is_wanted:
                query.offer = offer
            elif offer is not None:
                self._late.append(offer)

    def _rest(self, neighbour: Neighbour) -> None:
        now_s = self._clock()
        self._rests = {url: until_s for url, until_s in self._rests.items() if until_s > now_s}
        self._rests[neighbour.remote_bootstrap_addr] = now_s + REST_S

    # On the query's thread

    def _run(self, query: Query, ask: Ask) -> None:
        offer, why = None, ""
        try:
            body = encode_ask(ask, self._token)
            url = query.neighbour.remote_bootstrap_addr.rstrip("/") + PATH
            answer = exchange("POST", url, body=body, timeout_s=query.wait_s + LATE_S)
            if answer.status == 200:
                offer = read_answer(answer.body, ask, body, self._token)
            else:
                why = f"it answered {answer.status}"
        except Unusable as unusable:
            why = str(unusable)
        except Exception as error:  # a thread's boundary: the request is computed
            why = f"{type(error).__name__}: {error}"
        self._ended.append((query, offer, why))


def _on_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="moonpool-neighbour", daemon=True).start()
