"""What the conductor knows and predicts, as Prometheus shows it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.disagg_proxy.dispatcher import Dispatcher
from moonpool.disagg_proxy.events.subscriber import Subscriber
from moonpool.disagg_proxy.locality import Locality

Values = dict[tuple[str, ...], float]  # by the values of the labels


class ConductorCollector(Collector):
    def __init__(self, dispatcher: Dispatcher, locality: Locality, subscriber: Subscriber | None) -> None:
        self._dispatcher = dispatcher
        self._locality = locality
        self._subscriber = subscriber

    def collect(self) -> Iterator[Metric]:
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
                getattr(dispatcher.known, outcome),
            )
        yield from self._engines()
        for name, value in sorted(self._locality.stats().items()):
            yield _family(
                f"moonpool_proxy_index_{name}", "Of the prefix index; docs/events.md", (), {(): value}
            )
        if self._subscriber is not None:
            yield from self._streams(self._subscriber)

    def _engines(self) -> Iterator[Metric]:
        accounts = self._dispatcher.accounts
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
        }
        for instance in accounts.instances:
            label, watch = (instance.name,), accounts.watches[instance.place]
            rows["cache_predictions_total"][1][label] = watch.reports
            rows["cache_predictions_wrong_total"][1][label] = watch.wrong
            rows["books_requests"][1][label] = instance.books.requests
            rows["books_context_tokens"][1][label] = instance.books.context_tokens
            rows["prefill_samples_total"][1][label] = instance.prefill_model.regression.samples
        for name, (text, values) in rows.items():
            yield _family(f"moonpool_proxy_{name}", text, ("engine",), values)

    @staticmethod
    def _streams(subscriber: Subscriber) -> Iterator[Metric]:
        stats = subscriber.stats()
        for name in next(iter(stats.values()), {}):
            values: Values = {(source,): rows[name] for source, rows in stats.items()}
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
