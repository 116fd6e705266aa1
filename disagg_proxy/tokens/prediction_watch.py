"""Compares predicted cache hits with the engines' reports, so that blind routing does not stay unnoticed.

If the hashed ids differ from the engine's (another template, another tokenizer version), nothing fails:
requests are routed as if there were no caches. Engines report the cached tokens of each prompt. Pure: no
clock.
"""

from __future__ import annotations

from collections import deque

WINDOW = 64  # number of last reports that count
WRONG_SHARE = 0.5  # share of wrong predictions from which on a warning is due


class PredictionWatch:
    """The reports of one engine. tolerance_tokens: ignored difference, of a block or two."""

    def __init__(self, tolerance_tokens: int) -> None:
        self._tolerance = tolerance_tokens
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self.reports = 0
        self.wrong = 0
        self.wrong_lengths = 0
        self.more = 0  # reports of more cached tokens than predicted
        self.warned = False

    def report(self, predicted_tokens: int, tokens: int, predicted_cached: int, cached: int) -> str | None:
        """Adds one report. predicted_tokens, predicted_cached: the proxy's counts. tokens, cached: the
        engine's.

        Returns a sentence to log, once, when predictions keep differing.
        """
        length_differs = predicted_tokens != tokens
        wrong = length_differs or abs(predicted_cached - cached) > max(self._tolerance, 0.1 * tokens)
        self.reports += 1
        self.wrong += wrong
        self.wrong_lengths += length_differs
        self.more += wrong and cached > predicted_cached
        self._window.append(wrong)
        share = sum(self._window) / WINDOW
        if self.warned or share < WRONG_SHARE:
            return None
        self.warned = True
        if self.wrong_lengths * 2 > self.wrong:
            return (
                f"prompts have other lengths there than here (the last: {tokens} tokens, not "
                f"{predicted_tokens}), so cache locator cannot be seen: give the proxy the tokenizer and "
                f"chat template of the engine, or let it ask the engine (proxy.tokenizer)"
            )
        if self.more * 2 > self.wrong:
            return (
                f"more tokens are cached than was predicted (the last: {cached}, not {predicted_cached} of "
                f"{tokens}), so requests may go to the wrong engine: the proxy needs the KV events "
                f"of the engine (--events), and of the pool's nodes, if there is one (--pool, --pool-events)"
            )
        return (
            f"cached tokens are not what was predicted (the last: {cached}, not {predicted_cached} of "
            f"{tokens}), so requests may go to the wrong engine: check its KV events and its block size"
        )
