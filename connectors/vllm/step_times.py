"""How long an engine's steps take that compute prompt tokens. vLLM may plan the next step before the last one
has ended; steps still end in their order, so a step takes from its plan, or from the end of the one before
it, to its own end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moonpool.connectors.vllm.engine_types import SchedulerOutput

STEPS_MAX = 64  # planned and not ended; more of them means that vLLM does not report ends
_NO_PROMPT = (0, 0.0)  # when a step that computes no prompt was planned is not asked


class StepTimes:
    """The steps under way; all methods run on the scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._planned: deque[tuple[int, float]] = deque(maxlen=STEPS_MAX)  # (prompt tokens, when planned)
        self._ended_s = 0.0

    def begins(self, output: SchedulerOutput) -> None:
        """A step was planned."""
        # Of prompts are the tokens beyond one of each request and its speculated ones.
        tokens = output.total_num_scheduled_tokens - len(output.num_scheduled_tokens)
        if speculated := output.scheduled_spec_decode_tokens:
            tokens -= sum(map(len, speculated.values()))
        self._planned.append((tokens, self._clock()) if tokens else _NO_PROMPT)

    def ends(self) -> tuple[int, float]:
        """The oldest step has ended. Returns (prompt tokens that it computed, its seconds where there are
        any)."""
        if not self._planned:
            return 0, 0.0
        tokens, planned_s = self._planned.popleft()
        if not (tokens or self._planned):
            return 0, 0.0  # no later step was planned before this end
        now_s = self._clock()
        seconds = now_s - max(planned_s, self._ended_s)
        self._ended_s = now_s
        return tokens, seconds
