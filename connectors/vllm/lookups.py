"""Queries to the pool and the pins they bring. Belongs to the scheduler's half and runs on its thread.

vLLM asks what can be loaded, and asks again a step later as long as the answer is not there. A step of an
engine without other work ends with a pause of 1 ms, so the scheduler waits for answers that come sooner.

A pin is counted from the moment its answer is seen until ``release``; an answer that no request waits for
any more is released as it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from moonpool import _native
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pool import Pool, Ticket
from moonpool.connectors.vllm.requests import Hit, Needs, Phase, PrefixSearch, RequestState, Want
from moonpool.core.errors import Error, Unavailable
from moonpool.core.store.keys import BLOCK_NAME_BYTES

ANSWER_TIMEOUT_S = 1.0
FORGET_TICKET_S = 5.0
WAIT_S = 0.001  # for answers of all the queries of a step together, once for each query
WAIT_OBJECTS_MAX = 4096  # of a query that is waited for; a node of this host finds so many in 1 ms
UNAWAITED_AFTER = 16  # queries that are not waited for after one whose answer did not come in time


class Lookups:
    """Asks the pool for the prefixes of requests, and owns the pins of the answers."""

    def __init__(
        self,
        pool: Callable[[], Pool | None],
        *,
        block_tokens: int,
        tally: Tally,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        """pool: the pool to ask now, if there is one."""
        self._pool = pool
        self._block_tokens = block_tokens
        self._tally = tally
        self._log = log
        self._clock = clock
        self.tickets: dict[Ticket, tuple[RequestState | None, float]] = {}
        self._lost = False
        self.wait_left_s = WAIT_S  # of this step; the scheduler's half begins each with WAIT_S
        self._unawaited = 0  # queries from now on that are not waited for
        self.pins = 0
        self.needs: Needs | None = None  # with sliding windows or states: what a prefix needs

    @property
    def under_way(self) -> int:
        """Queries without an answer."""
        return len(self.tickets)

    def ask(self, state: RequestState, tokens: int) -> None:
        """Asks for the longest stored prefix of the state's chain. Without a pool that is a miss.

        tokens: of the request, of which at least one is computed: no longer prefix can be used.
        """
        pool = self._pool()
        blocks = state.chain.blocks
        if self.needs is not None:  # what a shorter prefix needs is not part of what a longer one needs
            blocks = min(blocks, (tokens - 1) // self._block_tokens)
        if pool is None or not blocks:
            state.missed(0)
            return
        state.search = None if self.needs is None else PrefixSearch(self.needs, state.chain, blocks)
        try:
            ticket = self._submit(pool, state)
        except Error as error:
            self._unknown(state, str(error))
            return
        now_s = self._clock()
        state.asked(ticket, now_s)
        self.tickets[ticket] = (state, now_s)

    def _submit(self, pool: Pool, state: RequestState) -> Ticket:
        """Asks what the state wants to know next. Raises Error."""
        if state.search is None:
            names = state.chain.names(0, state.chain.blocks)
            return pool.submit_prefix(names, BLOCK_NAME_BYTES, state.chain.width)
        if state.search.want is Want.PRESENCE:
            return pool.submit_presence(state.search.presence_names())
        return pool.submit_prefix(state.search.names(), BLOCK_NAME_BYTES, 1)

    def is_settled(self, state: RequestState) -> bool:
        """Whether the query of this state is decided: answered, or without an answer for too long."""
        self.poll()
        if state.phase is Phase.LOOKING:
            self._await(state)
        if state.phase is not Phase.LOOKING:
            return True
        if self._clock() - state.asked_s < ANSWER_TIMEOUT_S:
            return False
        self.abandon(state)
        self._unknown(state, f"no answer within {ANSWER_TIMEOUT_S:g} s")
        return True

    def _await(self, state: RequestState) -> None:
        """Waits for the answer, once, if it may come soon."""
        pool = self._pool()
        if pool is None or state.awaited or self.wait_left_s <= 0:
            return
        state.awaited = True
        if state.chain.blocks * state.chain.width > WAIT_OBJECTS_MAX:
            return
        if self._unawaited:
            self._unawaited -= 1
            return
        began_s = self._clock()
        left_s = self.wait_left_s
        while state.phase is Phase.LOOKING and left_s > 0 and pool.wait_for_read(left_s):
            self.poll()
            left_s = self.wait_left_s - (self._clock() - began_s)
        self.wait_left_s -= self._clock() - began_s
        if state.phase is Phase.LOOKING:
            self._unawaited = UNAWAITED_AFTER

    def poll(self) -> None:
        """Takes in the answers that came."""
        pool = self._pool() if self.tickets else None
        if pool is None:
            return
        now_s = self._clock()
        for ticket, answer in pool.poll():
            state, asked_s = self.tickets.pop(ticket, (None, now_s))
            self._answered(state, answer, asked_s)
        oldest = next(iter(self.tickets.items()), None)
        if oldest is not None and now_s - oldest[1][1] > FORGET_TICKET_S:
            self._log.error("moonpool: the native worker never answered query %s", oldest[0])
            state, _ = self.tickets.pop(oldest[0])
            if state is not None and state.phase in {Phase.LOOKING, Phase.COVERED}:
                self._unknown(state, f"no answer within {FORGET_TICKET_S:g} s")

    def abandon(self, state: RequestState) -> None:
        """No answer counts for this state any more; its pin is released when it comes."""
        if state.ticket in self.tickets:
            self.tickets[state.ticket] = (None, state.asked_s)

    def disconnected(self) -> None:
        """The connection was closed: the node has dropped all pins, and no answer comes any more."""
        self.tickets.clear()
        self.pins = 0

    def release(self, pin_id: int) -> None:
        """Gives up a pin; 0 is none."""
        if not pin_id:
            return
        self.pins -= 1
        pool = self._pool()
        if pool is not None:
            try:
                pool.release(pin_id)
            except Error as error:  # the node drops the pin together with its connection
                self._log.debug("moonpool: pin %d not released: %s", pin_id, error)

    def _answered(
        self, state: RequestState | None, answer: _native.PrefixAnswer | bytes | Exception, asked_s: float
    ) -> None:
        """answer: to submit_prefix, or to submit_presence."""
        pin_id, error = 0, ""
        if isinstance(answer, Exception):
            error = str(answer)
        elif not isinstance(answer, bytes):
            pin_id, error = answer.pin_id, answer.error
        self.pins += bool(pin_id)
        if state is None or state.phase not in {Phase.LOOKING, Phase.COVERED}:
            self.release(pin_id)
            return
        if error:
            self.release(pin_id)
            self._unknown(state, error)
            return
        if self._lost:
            self._lost = False
            self._log.info("moonpool: the pool answers again")
        hit = self._hit(state, answer)
        if hit is None:  # the search goes on
            self.release(pin_id)
            self._ask_on(state, asked_s)
            return
        self._tally.add("lookups")
        self._tally.observe("lookup_seconds", self._clock() - asked_s)
        self._tally.add("hit_tokens", hit.blocks * self._block_tokens)
        if state.phase is Phase.COVERED or not hit.blocks:
            self.release(pin_id)
            state.missed(hit.blocks)
        else:
            state.answered(hit)

    def _hit(self, state: RequestState, answer: Any) -> Hit | None:
        """What the answer makes of the query: a hit, of no block if there is none; None: more is to be
        asked."""
        search = state.search
        if search is None:
            return Hit(answer.blocks, answer.pin_id, answer.holders, answer.descriptors)
        if isinstance(answer, bytes):
            search.present(answer)
        elif search.found(answer.blocks):
            descriptors = search.descriptors(answer.descriptors)
            return Hit(search.blocks, answer.pin_id, answer.holders, descriptors)
        return Hit(0, 0, b"", b"") if search.want is Want.NOTHING else None

    def _ask_on(self, state: RequestState, asked_s: float) -> None:
        pool = self._pool()
        try:
            if pool is None:
                raise Unavailable("there is no pool now")
            ticket = self._submit(pool, state)
        except Error as error:
            self._unknown(state, str(error))
            return
        state.asked_on(ticket)
        self.tickets[ticket] = (state, asked_s)

    def _unknown(self, state: RequestState, why: str) -> None:
        self._tally.add("lookups_unknown")
        state.missed(0)
        if not self._lost:
            self._lost = True
            self._log.warning(
                "moonpool: the pool does not answer (%s); until it does, everything is computed", why
            )
