"""A Prometheus metric of the proxy from its name, its help text and its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from moonpool.disagg_proxy.data_plane.counters import BOUNDS_S, Histogram

PREFIX = "moonpool_proxy_"

T = TypeVar("T")
Values = Mapping[tuple[str, ...], float]  # by the values of the labels


def family(name: str, text: str, value: float | Values, *labels: str) -> Metric:
    """A counter if the name ends in _total, else a gauge. name: without PREFIX. value: one number, or with
    labels several."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    if not isinstance(value, Mapping):
        return kind(PREFIX + name, text, value)
    made = kind(PREFIX + name, text, labels=labels)
    for label, each in value.items():
        made.add_metric(label, each)
    return made


def family_of_each(
    name: str,
    text: str,
    things: Mapping[str, T],
    value: Callable[[T], float | Values],
    label: str,
    *more: str,
) -> Metric:
    """The values of several things. things: by their values of ``label``; more: labels of each thing's own
    values."""
    values: dict[tuple[str, ...], float] = {}
    for which, thing in things.items():
        found = value(thing)
        if isinstance(found, Mapping):
            values |= {(which, *rest): each for rest, each in found.items()}
        else:
            values[which,] = found
    return family(name, text, values, label, *more)


def histograms(name: str, text: str, values: Mapping[str, Histogram], label: str) -> Metric:
    """A histogram for each value of the label. name: without PREFIX."""
    made = HistogramMetricFamily(PREFIX + name, text, labels=(label,))
    for which, histogram in values.items():
        made.add_metric((which,), buckets=buckets(histogram), sum_value=histogram[1])
    return made


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative (upper bound, count) pairs up to +Inf."""
    total, rows = 0, []
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), histogram[0], strict=True):
        total += count
        rows.append((bound, float(total)))
    return rows
