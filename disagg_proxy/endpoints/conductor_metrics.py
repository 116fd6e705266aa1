"""Prometheus metrics of the conductor: its state and its predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.conductor.calibration import Ratios
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator
from moonpool.disagg_proxy.events.subscriber import Subscriber
from moonpool.disagg_proxy.metric_family import Values, family, family_of_each
from moonpool.disagg_proxy.ui.snapshot import SnapshotBuilder

QUANTILES = (0.1, 0.5, 0.9, 0.99)


class ConductorCollector(Collector):
    """Metrics of policies that look at prompts: queues, predictions, prompts, indexes, event streams."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        locator: PrefixLocator,
        subscriber: Subscriber | None,
        data: SnapshotBuilder,
    ) -> None:
        self._dispatcher = dispatcher
        self._locator = locator
        self._subscriber = subscriber
        self._data = data

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        dispatcher = self._dispatcher
        text = "Requests whose prompt was not known in tokens, routed without its prefix"
        yield family("blind_decisions_total", text, dispatcher.blind)
        text = "Prompts whose tokens were, or were not, known from before"
        yield family("known_prompts_hits_total", text, dispatcher.prompts.known.hits)
        yield family("known_prompts_misses_total", text, dispatcher.prompts.known.misses)
        inflight = dispatcher.scheduler.inflight
        text = "Observations whose times cannot be: a clock jumped; nothing was learnt from them"
        yield family("impossible_times_total", text, inflight.nonsense)
        text = "1 while engines report more cached tokens than KV events explain: a pool is not heard of"
        yield family("hidden_pool", text, inflight.hidden_pool.seen)
        yield from self._admission()
        yield from self._engines()
        yield from self._predictions()
        for name, value in sorted(self._locator.stats().items()):
            yield family(f"index_{name}", "Of the prefix index; docs/events.md", value)
        if self._subscriber is not None:
            yield from self._streams(self._subscriber)
        yield from self._prompts()

    def _admission(self) -> Iterator[Metric]:
        scheduler = self._dispatcher.scheduler
        admission = scheduler.admission
        if admission is None:
            return
        text = "Requests that wait in the proxy until they may be sent"
        yield family("queue_requests", text, scheduler.waiting)
        margins: Values = {("ttft",): admission.ttft_margin.factor, ("gap",): admission.gap_margin.factor}
        text = "What predictions are multiplied by, learnt so that nine of ten stay below it"
        yield family("admission_margin", text, margins, "prediction")

    def _engines(self) -> Iterator[Metric]:
        inflight = self._dispatcher.scheduler.inflight
        workers = {each.name: each for each in inflight.workers}

        def of_each(name: str, text: str, value: Callable[[Worker], float]) -> Metric:
            return family_of_each(name, text, workers, value, "engine")

        text = "Answers whose cached tokens were compared with what was predicted"
        yield of_each("cache_predictions_total", text, lambda each: inflight.watches[each.place].reports)
        text = "Those of them that differed"
        yield of_each("cache_predictions_wrong_total", text, lambda each: inflight.watches[each.place].wrong)
        yield of_each("books_requests", "Requests in the conductor's books", lambda each: each.load.requests)
        text = "Tokens in the KV cache of the requests that decode, as far as known"
        yield of_each("books_context_tokens", text, lambda each: each.load.context_tokens)
        text = "Prefills that the engine's own cost model has learnt from"
        yield of_each("prefill_samples_total", text, lambda each: each.prefill_model.regression.own.samples)
        text = "Prefills that took absurdly long or short: not learnt from"
        yield of_each("prefill_odd_samples_total", text, _odd_samples)
        text = "Prefills that the cost model of the engine's kind has learnt from, all its engines together"
        yield of_each("prefill_kind_samples", text, lambda each: each.prefill_model.regression.kind.samples)
        text = "How much the engine's own model counts in predictions of prefill, 0 to 1; else its kind's"
        yield of_each("prefill_own_share", text, lambda each: each.prefill_model.regression.share)
        text = "Seconds of prefill for each gap between tokens, as expected of the next answer there"
        stalls = self._dispatcher.with_tracker(
            lambda tracker, now_s: {each.name: each.load.stall_s(now_s) for each in tracker.workers}
        )
        yield family_of_each("stall_seconds", text, stalls, lambda stall_s: stall_s, "engine")
        text = "Learnt: to fetch a token from the pool, latency left out"
        yield of_each("fetched_token_seconds", text, _fetched_token_s)

    def _predictions(self) -> Iterator[Metric]:
        """TTFT: predicted and observed."""
        known = {each.name: each.ttft_ratios for each in self._dispatcher.scheduler.inflight.workers}
        text = "Time to the first token, observed over predicted: quantiles of an engine's last 256 requests"
        yield family_of_each("ttft_observed_over_predicted", text, known, _quantiles, "engine", "quantile")
        text = "Predictions of the time to the first token that were compared with what was observed"
        yield family_of_each("ttft_predictions_total", text, known, lambda each: each.observed, "engine")

    def _prompts(self) -> Iterator[Metric]:
        """Tokens of prompts by where they came from, and the load of engines, as on the page."""
        loads, total = self._data.loads(), self._data.total()
        sources: Values = {
            ("own",): total.own,
            ("pool",): total.pool,
            ("computed",): total.tokens - total.own - total.pool,
        }
        text = "Tokens of prompts that have ended, by where they were taken to lie: own, pool, computed"
        yield family("prompt_tokens_total", text, sources, "source")
        text = "The same by tenant: the first 64 that came, and all others"
        tenants: Values = {
            (tenant, source): getattr(sums, source)
            for tenant, sums in self._data.history.tenants.sums.items()
            for source in sums.__struct_fields__
        }
        yield family("tenant_prompt_tokens_total", text, tenants, "tenant", "source")
        text = "Tokens of prompts of which the engine said how many it had"
        yield family("engine_prompt_tokens_told_total", text, total.told)
        yield family("engine_prompt_tokens_cached_total", "Those of them that it had", total.cached)
        text = "Predicted work of the prefills in line"
        yield family_of_each("books_wait_seconds", text, loads, lambda row: row.wait_s, "engine")
        text = "Requests that are taken to decode"
        yield family_of_each("books_decodes", text, loads, lambda row: row.decoding, "engine")

    @staticmethod
    def _streams(subscriber: Subscriber) -> Iterator[Metric]:
        stats = subscriber.stats()
        for name in next(iter(stats.values()), {}):
            values: Values = {
                (source,): rows[name]
                for source, rows in stats.items()
                if rows["heard"] or not name.startswith("lag_")  # a stream that is not heard has no lag
            }
            yield family(f"events_{name}", "Of KV events; docs/events.md", values, "stream")


def _odd_samples(worker: Worker) -> int:
    regression = worker.prefill_model.regression.own
    return regression.odd + regression.refused


def _fetched_token_s(worker: Worker) -> float:
    model = worker.prefill_model
    return (model.transfer_s(1001) - model.transfer_s(1)) / 1000


def _quantiles(ratios: Ratios) -> Values:
    return {(str(share),): ratios.quantile(share) for share in QUANTILES} if ratios.known else {}
