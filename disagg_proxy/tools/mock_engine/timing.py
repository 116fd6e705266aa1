"""How long a mock engine takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step = step_s + gap_s_per_request x decodes + the prefill of its chunk, where a prefill
    of tokens [done, done + n) costs n x prefill_s_per_token + quadratic x ((done + n)^2 - done^2). All 0: at
    once.
    """

    step_s: float = 0.0
    prefill_s_per_token: float = 0.0
    prefill_s_per_token2: float = 0.0
    gap_s_per_request: float = 0.0
    handover_s_per_token: float = 0.0

    @property
    def is_instant(self) -> bool:
        """Whether everything takes no time: a step then makes a whole answer."""
        return not (
            self.step_s or self.prefill_s_per_token or self.prefill_s_per_token2 or self.gap_s_per_request
        )

    def chunk_s(self, done: int, tokens: int) -> float:
        """Seconds of prefill of ``tokens`` tokens behind ``done`` that are in the cache, without step_s."""
        end = done + tokens
        return tokens * self.prefill_s_per_token + (end * end - done * done) * self.prefill_s_per_token2
