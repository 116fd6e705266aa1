"""Queries to the pool and the pins they bring. Belongs to the scheduler's half and runs on its thread.

vLLM asks what can be loaded, and asks again a step later as long as the answer is not there. A step of an
engine without other work ends with a pause of 1 ms, so the scheduler waits for answers that come sooner.

A pin is counted from the moment its answer is seen until ``release``; an answer that no request waits for
any more is released as it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from moonpool import _native
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pool import Pool, Ticket
from moonpool.connectors.vllm.requests import Hit, Phase, RequestState
from moonpool.core.errors import Error
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
        self._wait_left_s = WAIT_S
        self._unawaited = 0  # queries from now on that are not waited for
        self.pins = 0

    @property
    def under_way(self) -> int:
        """Queries without an answer."""
        return len(self.tickets)

    def ask(self, state: RequestState) -> None:
        """Asks for the longest stored prefix of the state's chain. Without a pool that is a miss."""
        pool = self._pool()
        if pool is None or not state.chain.blocks:
            state.missed(0)
            return
        names = state.chain.names(0, state.chain.blocks)
        try:
            ticket = pool.submit_prefix(names, BLOCK_NAME_BYTES, state.chain.width)
        except Error as error:
            self._unknown(state, str(error))
            return
        now_s = self._clock()
        state.asked(ticket, now_s)
        self.tickets[ticket] = (state, now_s)

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

    def step_planned(self) -> None:
        """The next queries are those of another step."""
        self._wait_left_s = WAIT_S

    def _await(self, state: RequestState) -> None:
        """Waits for the answer, once, if it may come soon."""
        pool = self._pool()
        if pool is None or state.awaited or self._wait_left_s <= 0:
            return
        state.awaited = True
        if state.chain.blocks * state.chain.width > WAIT_OBJECTS_MAX:
            return
        if self._unawaited:
            self._unawaited -= 1
            return
        began_s = self._clock()
        left_s = self._wait_left_s
        while state.phase is Phase.LOOKING and left_s > 0 and pool.wait_for_read(left_s):
            self.poll()
            left_s = self._wait_left_s - (self._clock() - began_s)
        self._wait_left_s -= self._clock() - began_s
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
            self._answered(state, answer, now_s - asked_s)
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

    def _answered(self, state: RequestState | None, answer: _native.PrefixAnswer, seconds: float) -> None:
        self.pins += bool(answer.pin_id)
        if state is None or state.phase not in {Phase.LOOKING, Phase.COVERED}:
            self.release(answer.pin_id)
            return
        if answer.error:
            self.release(answer.pin_id)
            self._unknown(state, answer.error)
            return
        if self._lost:
            self._lost = False
            self._log.info("moonpool: the pool answers again")
        self._tally.add("lookups")
        self._tally.observe("lookup_seconds", seconds)
        self._tally.add("hit_tokens", answer.blocks * self._block_tokens)
        if state.phase is Phase.COVERED:
            self.release(answer.pin_id)
            state.missed(answer.blocks)
        elif answer.blocks:
            state.answered(Hit(answer.blocks, answer.pin_id, answer.holders, answer.descriptors))
        else:
            self.release(answer.pin_id)
            state.missed(0)

    def _unknown(self, state: RequestState, why: str) -> None:
        self._tally.add("lookups_unknown")
        state.missed(0)
        if not self._lost:
            self._lost = True
            self._log.warning(
                "moonpool: the pool does not answer (%s); until it does, everything is computed", why
            )
