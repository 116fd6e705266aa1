"""What a request will cost: prefill seconds, hand-over seconds and seconds between tokens, learnt online.

    prefill         =  a + b u + c (n^2 - r^2) + v own  +  transfer    r = own + pool tokens reused, u = n - r
    transfer        =  l + f pool + s ahead                      of a request that need not wait
                       q pool                                    of one that waits, and is fetched meanwhile
    hand-over(n)    =  g + h n
    gap(batch, ctx) =  d + e batch + k ctx                       ctx: tokens in the KV cache of the batch

The form of the prefill term is the cost model of the Mooncake paper (FAST '25, section 2.2 of its cost model:
a linear and a quadratic part of the tokens that are computed, and a linear one of those that are reused,
which are loaded into the GPU's memory: v, of fetched ones within f and q). l and f are this instance's
latency and bandwidth towards the pool; q is what cannot be hidden behind the prompts before it; ``ahead``:
seconds of other fetches that the sender has before it (``Sender``), s how much of them is felt. Priors are of
a mid-sized model on one GPU and wide, so that a few tens of requests replace them. Tokens and seconds
everywhere; features are scaled to thousands and millions so that coefficients are of one order. Pure: no
clock.
"""

from __future__ import annotations

from moonpool._native import Regression

_K = 1e-3
_M = 1e-6


class PrefillModel:
    """Seconds that an engine needs before a request's first token, without waiting for its turn."""

    def __init__(self) -> None:
        self.regression = Regression(
            (0.02, 0.1, 0.001, 0.001, 0.005, 0.002, 0.001, 1.0),
            (0.1, 0.3, 0.01, 0.02, 0.1, 0.3, 0.3, 1.0),
            floor=0.005,
        )

    def predict(
        self, tokens: int, own: int = 0, pool: int = 0, ahead_s: float = 0.0, *, queued: bool = False
    ) -> float:
        """tokens: of the prompt; own: leading ones in the engine's own cache; pool: those behind them that it
        fetches; ahead_s: of the sender's other fetches; queued: others are computed before."""
        # As the features say, without making them: it is asked of every engine for every request.
        a, b, c, load, latency, token, hidden, share = self.regression.coefficients
        reused = own + pool if own + pool < tokens else tokens
        seconds = a + b * _K * (tokens - reused) + c * _M * (tokens * tokens - reused * reused)
        seconds += load * _K * (own if own < tokens else tokens)
        fetched = pool if pool < tokens else tokens
        if not fetched:
            return seconds
        if queued:
            return seconds + hidden * _K * fetched
        return seconds + latency + token * _K * fetched + share * ahead_s

    def transfer_s(self, pool: int) -> float:
        """Of so many tokens with nothing before them and nothing to hide behind."""
        _, _, _, _, latency, token, hidden, _ = self.regression.coefficients
        return latency + max(token, hidden) * _K * pool if pool else 0.0

    def observe(
        self,
        tokens: int,
        own: int,
        pool: int,
        seconds: float,
        ahead_s: float = 0.0,
        *,
        queued: bool = False,
    ) -> float | None:
        return self.regression.observe(_prefill_features(tokens, own, pool, ahead_s, queued), seconds)


class HandoverModel:
    """Seconds from the end of prefill to the decode engine's first token."""

    def __init__(self) -> None:
        self.regression = Regression((0.01, 0.01), (0.05, 0.05), floor=0.005)

    def predict(self, tokens: int) -> float:
        g, h = self.regression.coefficients
        return g + h * _K * tokens

    def observe(self, tokens: int, seconds: float) -> float | None:
        return self.regression.observe((1.0, tokens * _K), seconds)


class DecodeModel:
    """Seconds between two tokens of a request that decodes in a batch."""

    def __init__(self) -> None:
        self.regression = Regression((0.01, 0.0003, 0.00002), (0.05, 0.002, 0.0005), floor=0.002)

    def predict(self, batch: float, context_tokens: float) -> float:
        """batch: requests that decode together, this one included; context_tokens: of all of them."""
        d, e, k = self.regression.coefficients
        return d + e * batch + k * _K * context_tokens

    def observe(self, batch: float, context_tokens: float, seconds: float) -> float | None:
        return self.regression.observe((1.0, batch, context_tokens * _K), seconds)


def _prefill_features(tokens: int, own: int, pool: int, ahead_s: float, queued: bool) -> tuple[float, ...]:
    reused = min(own + pool, tokens)
    computed = tokens - reused
    fetched = min(pool, tokens) * _K
    if not fetched:
        fetches: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    elif queued:
        fetches = (0.0, 0.0, fetched, 0.0)
    else:
        fetches = (1.0, fetched, 0.0, ahead_s)
    squares = (tokens * tokens - reused * reused) * _M
    return (1.0, computed * _K, squares, min(own, tokens) * _K, *fetches)
