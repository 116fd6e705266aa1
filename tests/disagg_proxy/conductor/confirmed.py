"""Workers whose models have learnt that the first assumptions are right."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.worker import Worker


def confirm(worker: Worker) -> None:
    """Without it what the models predict is a guess, which refuses no request."""
    for number in range(100):
        tokens = 10 + 137 * number
        worker.prefill_model.observe(tokens, 0, 0, worker.prefill_model.predict(tokens))
