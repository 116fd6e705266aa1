"""Sentences for the page: why a request went to its engine, and why its prefix missed. They are made from the
policy's reasons (``Choice.why``) and the engine's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.disagg_proxy.conductor.observer import Finished
from moonpool.disagg_proxy.conductor.worker import Worker

TOLERANCE_TOKENS = 160  # an engine's count differs by its last block and a few tokens
KEPT_S = 0.01  # a shorter wait is no queue
SHORT_TOKENS = 64  # shorter prompts are not cached
_REASONS: Mapping[str, str] = {
    "only": "it was the only one that could",
    "least_time": "its first token was predicted soonest",
    "spares_others": "elsewhere it would have come a little sooner, at more cost to later requests",
    "match": "of those predicted to be as fast it held most of the prompt",
    "turn": "of those that were equal it was chosen longest ago",
    "prefill_busy": "the engines for prefill were busy, and to compute it here cost less than to wait",
    "drawn": "it was drawn among the cheapest, as other proxies choose among them at the same time",
    "session": "its conversation was here, and no engine was clearly better",
}


def why_here(finished: Finished) -> str:
    """Why the request went to its engine, in one sentence."""
    why, asked = finished.choice.why, finished.asked
    reason = why.get("reason")
    again = finished.observation.attempts > 1  # then it was at another engine before
    parts = [f"kept here for {seconds(finished.kept_s)}"] if finished.kept_s >= KEPT_S and not again else []
    if isinstance(reason, str) and reason:
        parts.append(_REASONS.get(reason, reason.replace("_", " ")))
    elif why:
        parts.append("its first token was predicted soonest" if "predicted_ttft_s" in why else "by its load")
    predicted = why.get("predicted_ttft_s")
    if isinstance(predicted, float | int):
        costs = [
            f"{label} {seconds(float(value))}"
            for name, label in (
                ("wait_s", "wait"),
                ("transfer_s", "fetch"),
                ("prefill_s", "compute"),
                ("handover_s", "hand-over"),
            )
            if isinstance(value := why.get(name), float | int) and value > 0
        ]
        parts.append(f"{seconds(float(predicted))} predicted" + (f" ({' + '.join(costs)})" if costs else ""))
    own, pool = finished.reused
    if asked.tokens and own + pool:
        held = [f"{own:,} tokens of its own"] if own else []
        held += [f"{pool:,} from the pool"] if pool else []
        parts.append(f"reuses {' and '.join(held)} of {asked.tokens:,}")
    return "; ".join(parts) or "the policy did not say"


def why_miss(finished: Finished, workers: Sequence[Worker]) -> str:
    """Why the prefix missed, in one sentence; "": it was found as far as possible. workers: present
    ones."""
    asked = finished.asked
    if not asked.tokens:
        return "its tokens were not known: no tokenizer answered, or it is no generation"
    own, pool = finished.reused
    predicted, cached = own + pool, finished.cached
    if cached >= 0 and predicted - cached > max(TOLERANCE_TOKENS, predicted // 10):
        return (
            f"{predicted:,} tokens were taken to be there, the engine found {cached:,}: evicted meanwhile, "
            f"or its template or tokenizer is another"
        )
    if asked.tokens < SHORT_TOKENS and not predicted:
        return "shorter than what is kept"
    if asked.tokens - predicted <= max(SHORT_TOKENS, asked.tokens // 20):
        return ""
    left = asked.from_pool(finished.choice.computes)
    if left and not pool:
        return f"the pool held {left:,} tokens more, and to fetch them was predicted to be slower"
    best, holder = _best_elsewhere(finished, workers)
    if best > predicted + SHORT_TOKENS:
        return f"{holder} held {best:,} tokens, and going there was predicted to be slower"
    if not predicted:
        return "no engine held its beginning: new, or evicted everywhere"
    return f"behind {predicted:,} tokens it is new, or was evicted everywhere"


def seconds(value: float) -> str:
    """A duration for people: milliseconds below 0.1 s."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 9.95 else f"{value:.0f} s"


def _best_elsewhere(finished: Finished, workers: Sequence[Worker]) -> tuple[int, str]:
    """(cached tokens, name) of the best other worker that is present."""
    held = finished.asked.own
    best = max(held, default=0)
    if not best or best == finished.asked.own_at(finished.choice.computes):
        return 0, ""
    place = next(place for place, tokens in enumerate(held) if tokens == best)
    name = next((each.name for each in workers if each.place == place), "an instance that has left")
    return best, name
