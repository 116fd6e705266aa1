"""The requests that decode together in a simulated instance, without an event for each token.

A step gives every request one token and takes step_s + step_request_s b + step_token_s c seconds for b
requests with c tokens in the KV cache, and c grows by b with each step. Between two events (a request joins
or leaves) b is constant, so the time of x steps is the quadratic

    T(x) = (step_s + step_request_s b + step_token_s c) x + step_token_s b x^2 / 2

which is solved in either direction. Steps are counted from the start of the instance, so a request ends at a
step that is known when it joins.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

from moonpool.disagg_proxy.tools.simulator.machine import Machine

SAME = 0.005  # gaps that differ by less are one
LONGEST_SHARE = 0.1  # a request's gap is the mean of its longest tenth, as in the Mooncake paper


class _Stretch(NamedTuple):
    """Steps from here on took so long each; ``once``: the first of them took this much longer."""

    from_step: float
    gap_s: float
    once_s: float


class _Joined(NamedTuple):
    end_step: float
    name: int  # tells requests apart that end at the same step
    from_step: float
    context: int
    before_s: float  # seconds of the next step's stall that had passed when it joined


class Left(NamedTuple):
    """gap_s: the mean of the longest LONGEST_SHARE of the gaps between its tokens."""

    name: int
    gap_s: float


class Decoding:
    """machine: may be replaced after ``advance``. Not thread safe. Times in seconds. A ``now_s`` before that
    of an earlier call, or within a stall, makes no tokens. A join costs a heap's push, an end the stretches
    within that request's life."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._steps = 0.0
        self._at_s = 0.0
        self._context = 0.0
        self._order: list[_Joined] = []
        self._stretches: deque[_Stretch] = deque()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def context_tokens(self) -> float:
        """Tokens in the KV cache as of the last ``advance``; not whole, because a step may be half over."""
        return self._context

    def current_gap_s(self, now_s: float) -> float:
        """0 without requests."""
        self.advance(now_s)
        return self._gap_s() if self._order else 0.0

    def join(self, name: int, context: int, tokens: int, now_s: float) -> None:
        """context: its tokens in the KV cache; tokens: that it makes after its first, at least 1."""
        self.advance(now_s)
        last = self._stretches[-1] if self._stretches else None
        before_s = last.once_s if last is not None and last.from_step == self._steps else 0.0
        heapq.heappush(self._order, _Joined(self._steps + tokens, name, self._steps, context, before_s))
        self._context += context
        self._note(0.0)

    def next_s(self) -> float:
        """When the first request ends; infinity without requests."""
        if not self._order:
            return math.inf
        left = max(self._order[0].end_step - self._steps, 0.0)
        slope = self.machine.step_token_s * len(self._order)
        return self._at_s + self._gap_s() * left + slope * left * left / 2

    def pop(self, now_s: float) -> Left:
        """Removes the request that ends first, at ``next_s``."""
        self.advance(now_s)
        short = self._order[0].end_step - self._steps
        if short > 0:  # by rounding
            self._steps += short
            self._context += short * len(self._order)
        joined = heapq.heappop(self._order)
        # The tokens of whole steps, of which its last one may have needed less.
        self._context -= joined.context + (self._steps - joined.from_step)
        left = Left(joined.name, self._gap_of(joined))
        self._note(0.0)
        return left

    def advance(self, now_s: float) -> None:
        """Makes the tokens of the time that has passed."""
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        if not self._order:
            return
        gap_s, slope = self._gap_s(), self.machine.step_token_s * len(self._order)
        # The root of T(x) = passed_s that keeps its digits when slope is nearly 0.
        steps = 2 * passed_s / (gap_s + math.sqrt(gap_s * gap_s + 2 * slope * passed_s))
        self._steps += steps
        self._context += steps * len(self._order)

    def stall(self, seconds: float, now_s: float, *, step: bool) -> float:
        """For ``seconds`` the instance computes something else; step: together with one step, after which all
        requests get its token. Returns the time of its end.
        """
        self.advance(now_s)
        if not self._order:
            self._at_s = now_s + seconds
            return self._at_s
        end_s = now_s + seconds + (self._gap_s() if step else 0.0)
        self._at_s = end_s
        self._note(seconds)
        if step:
            self._steps += 1
            self._context += len(self._order)
            self._note(0.0)
        return end_s

    def _gap_s(self) -> float:
        return self.machine.step_of_s(len(self._order), self._context)

    def _gap_of(self, joined: _Joined) -> float:
        parts: list[tuple[float, float]] = []  # (gap, how many)
        begin, until = joined.from_step, joined.end_step
        for from_step, gap_s, once_s in reversed(self._stretches):
            if from_step < until:
                count = until - (from_step if from_step > begin else begin)
                if once_s and from_step <= begin:  # the part of the stall before it joined is not its own
                    once_s = once_s - joined.before_s if from_step == begin else 0.0
                if once_s > 0:
                    once = min(count, 1.0)
                    parts.append((gap_s + once_s, once))
                    count -= once
                parts.append((gap_s, count))
                until = from_step
            if from_step <= begin:
                break
        parts.sort(reverse=True)
        wanted = left = max((joined.end_step - begin) * LONGEST_SHARE, 1.0)
        total_s = 0.0
        for gap_s, count in parts:
            taken = min(count, left)
            total_s += gap_s * taken
            left -= taken
            if left <= 0:
                break
        return total_s / max(wanted - left, 1e-9)

    def _note(self, once_s: float) -> None:
        """A stretch begins: the gap has changed, or the next step takes longer."""
        stretches = self._stretches
        if not self._order:
            stretches.clear()
            return
        if stretches and stretches[-1].from_step == self._steps:
            once_s += stretches.pop().once_s
        gap_s = self._gap_s()
        if stretches and not once_s and abs(gap_s - stretches[-1].gap_s) < SAME * gap_s:
            return
        stretches.append(_Stretch(self._steps, gap_s, once_s))
        if len(stretches) > 64 and len(stretches) > 8 * len(self._order):
            oldest = min(joined.from_step for joined in self._order)
            while len(stretches) > 1 and stretches[1].from_step <= oldest:
                stretches.popleft()
