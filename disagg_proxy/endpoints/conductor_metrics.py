"""Prometheus metrics of the conductor: its state and its predictions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator
from moonpool.disagg_proxy.events.subscriber import Subscriber

QUANTILES = (0.1, 0.5, 0.9, 0.99)
Values = dict[tuple[str, ...], float]  # by label values


class ConductorCollector(Collector):
    """Metrics of policies that look at prompts: queues, predictions, prefix indexes, event streams."""

    def __init__(self, dispatcher: Dispatcher, locator: PrefixLocator, subscriber: Subscriber | None) -> None:
        self._dispatcher = dispatcher
        self._locator = locator
        self._subscriber = subscriber

    def collect(self) -> Iterator[Metric]:
        """Metric families, as of now."""
        dispatcher = self._dispatcher
        yield CounterMetricFamily(
            "moonpool_proxy_blind_decisions",
            "Requests whose prompt was not known in tokens, routed without its prefix",
            dispatcher.blind,
        )
        for outcome in ("hits", "misses"):
            yield CounterMetricFamily(
                f"moonpool_proxy_known_prompts_{outcome}",
                "Prompts whose tokens were, or were not, known from before",
                getattr(dispatcher.prompts.known, outcome),
            )
        yield CounterMetricFamily(
            "moonpool_proxy_impossible_times",
            "Observations whose times cannot be: a clock jumped; nothing was learnt from them",
            dispatcher.scheduler.inflight.nonsense,
        )
        hidden = dispatcher.scheduler.inflight.hidden_pool
        if hidden is not None:
            yield _family(
                "moonpool_proxy_hidden_pool",
                "1 while engines report more cached tokens than KV events explain: --pool-events is missing",
                (),
                {(): hidden.seen},
            )
        yield from self._admission()
        yield from self._engines()
        yield from self._predictions()
        for name, value in sorted(self._locator.stats().items()):
            yield _family(
                f"moonpool_proxy_index_{name}", "Of the prefix index; docs/events.md", (), {(): value}
            )
        if self._subscriber is not None:
            yield from self._streams(self._subscriber)

    def _admission(self) -> Iterator[Metric]:
        scheduler = self._dispatcher.scheduler
        admission = scheduler.admission
        if admission is None:
            return
        text = "Requests that wait in the proxy until they may be sent"
        yield _family("moonpool_proxy_queue_requests", text, (), {(): scheduler.waiting})
        margins: Values = {
            ("ttft",): admission.ttft_margin.factor,
            ("gap",): admission.gap_margin.factor,
        }
        text = "What predictions are multiplied by, learnt so that nine of ten stay below it"
        yield _family("moonpool_proxy_admission_margin", text, ("prediction",), margins)

    def _engines(self) -> Iterator[Metric]:
        inflight = self._dispatcher.scheduler.inflight
        rows: dict[str, tuple[str, Values]] = {
            "cache_predictions_total": (
                "Answers whose cached tokens were compared with what was predicted",
                {},
            ),
            "cache_predictions_wrong_total": ("Those of them that differed", {}),
            "books_requests": ("Requests in the conductor's books", {}),
            "books_context_tokens": (
                "Tokens in the KV cache of the requests that decode, as far as known",
                {},
            ),
            "prefill_samples_total": ("Prefills that the cost model has learnt from", {}),
            "prefill_odd_samples_total": ("Prefills that took absurdly long or short: not learnt from", {}),
            "fetched_token_seconds": ("Learnt: to fetch a token from the pool, latency left out", {}),
        }
        for worker in inflight.workers:
            label, watch = (worker.name,), inflight.watches[worker.place]
            rows["cache_predictions_total"][1][label] = watch.reports
            rows["cache_predictions_wrong_total"][1][label] = watch.wrong
            rows["books_requests"][1][label] = worker.load.requests
            rows["books_context_tokens"][1][label] = worker.load.context_tokens
            model = worker.prefill_model
            rows["prefill_samples_total"][1][label] = model.regression.samples
            rows["prefill_odd_samples_total"][1][label] = model.regression.odd + model.regression.refused
            rows["fetched_token_seconds"][1][label] = (model.transfer_s(1001) - model.transfer_s(1)) / 1000
        for name, (text, values) in rows.items():
            yield _family(f"moonpool_proxy_{name}", text, ("engine",), values)

    def _predictions(self) -> Iterator[Metric]:
        """TTFT: predicted and observed."""
        ratios = GaugeMetricFamily(
            "moonpool_proxy_ttft_observed_over_predicted",
            "Time to the first token, observed over predicted: quantiles of an engine's last 256 requests",
            labels=("engine", "quantile"),
        )
        counts = CounterMetricFamily(
            "moonpool_proxy_ttft_predictions",
            "Predictions of the time to the first token that were compared with what was observed",
            labels=("engine",),
        )
        for worker in self._dispatcher.scheduler.inflight.workers:
            counts.add_metric((worker.name,), worker.ttft_ratios.observed)
            if not worker.ttft_ratios.known:
                continue
            for share in QUANTILES:
                ratios.add_metric((worker.name, str(share)), worker.ttft_ratios.quantile(share))
        yield ratios
        yield counts

    @staticmethod
    def _streams(subscriber: Subscriber) -> Iterator[Metric]:
        stats = subscriber.stats()
        for name in next(iter(stats.values()), {}):
            values: Values = {
                (source,): rows[name]
                for source, rows in stats.items()
                if rows["heard"] or not name.startswith("lag_")  # a stream that is not heard has no lag
            }
            yield _family(
                f"moonpool_proxy_events_{name}", "Of KV events; docs/events.md", ("stream",), values
            )


def _family(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily
    if name.endswith("_total"):
        family = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    else:
        family = GaugeMetricFamily(name, text, labels=labels)
    for label, value in values.items():
        family.add_metric(label, value)
    return family
