"""What the reuse of a prompt's KV cache saved: tokens that were not computed, and the predicted time of their
prefill."""

from __future__ import annotations

import math
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.observer import Finished
from moonpool.disagg_proxy.conductor.worker import LEARNT, Worker

ANSWERED = 200


class Saved(NamedTuple):
    """Of one request. tokens: of its prompt that were not computed, by the engine's report, else as the
    proxy assumed.

    whole_s: predicted seconds of prefill of the whole prompt, on the engine that had it. left_s: the same
    with what was reused, the fetch from the pool included. Both NaN while the engine's model has learnt from
    fewer than LEARNT prompts.
    """

    tokens: int = 0
    whole_s: float = math.nan
    left_s: float = math.nan


def saved_by(finished: Finished) -> Saved:
    """Zero for a request without an answer, or whose prompt has no known length."""
    tokens = finished.asked.tokens or max(finished.observation.prompt_tokens, 0)
    if finished.observation.status != ANSWERED or not tokens:
        return Saved()
    own, pool = finished.reused
    if finished.cached >= 0:
        own = min(own, finished.cached)
        pool = finished.cached - own
    own = min(own, tokens)
    pool = min(pool, tokens - own)
    worker = finished.choice.computes
    if not _has_learnt(worker):
        return Saved(own + pool)
    predict = worker.prefill_model.predict
    return Saved(own + pool, predict(tokens), predict(tokens, own, pool))


def _has_learnt(worker: Worker) -> bool:
    regression = worker.prefill_model.regression
    return max(regression.own.samples, regression.kind.samples) >= LEARNT
