"""Reads Prometheus counters of the engines, the nodes and the proxy: who computed what, as each of them
counted it itself.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

TIMEOUT_S = 5.0
SETTLED_AFTER_S = 10.0  # counters travel from the engine's worker to its front-end with the next step
STILL_AFTER_S = 10.0
POLL_S = 0.05


def scrape(address: tuple[str, int]) -> dict[str, float]:
    """GET /metrics -> name, with its labels where it has some, -> value."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"{address[0]}:{address[1]}/metrics answered {response.status}")
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def total(samples: dict[str, float], name: str, *labels: str) -> int:
    """The sum over all series of this metric that carry these labels; 0 when there is none."""
    return int(
        sum(
            value
            for series, value in samples.items()
            if series.split("{")[0] == name and all(label in series for label in labels)
        )
    )


@dataclass(frozen=True)
class Counts:
    """Prompt tokens of one engine, since it started.

    computed: by the engine. own_cache: found in its own prefix cache. pool: loaded from the pool, and
    handed_over: taken over from a prefill engine, both without an error; external: both, as vLLM counts them.
    """

    prompt: int = 0
    own_cache: int = 0
    pool: int = 0
    handed_over: int = 0
    external: int = 0
    pool_bytes: int = 0
    handed_over_bytes: int = 0
    errors: int = 0

    @property
    def computed(self) -> int:
        return self.prompt - self.own_cache - self.pool - self.handed_over

    @property
    def is_whole(self) -> bool:
        """Whether the connector's figures say what vLLM's do."""
        return self.external == self.pool + self.handed_over

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def engine_counts(address: tuple[str, int]) -> Counts:
    """prompt and own_cache are vLLM's own figures; what came from elsewhere is what our connector saw arrive
    whole.
    """
    samples = scrape(address)
    by_source, ours = "vllm:prompt_tokens_by_source_total", "moonpool_connector_"
    return Counts(
        prompt=total(samples, "vllm:prompt_tokens_total"),
        own_cache=total(samples, by_source, 'source="local_cache_hit"'),
        external=total(samples, by_source, 'source="external_kv_transfer"'),
        pool=total(samples, ours + "loaded_tokens_total"),
        handed_over=total(samples, ours + "handed_over_tokens_total"),
        pool_bytes=total(samples, ours + "loaded_bytes_total"),
        handed_over_bytes=total(samples, ours + "handed_over_bytes_total"),
        errors=sum(
            total(samples, ours + name)
            for name in ("load_errors_total", "handover_errors_total", "handover_refused_total")
        ),
    )


def settled(read: Callable[[], Counts], prompt_tokens: int, before: Counts) -> Counts:
    """What this engine counted for one request of that many prompt tokens.

    vLLM says how many tokens it did not compute before the connector's own figures arrive, so both are
    awaited: the prompt is fully accounted for, both agree, and so do two readings in a row.
    """
    deadline_s = time.monotonic() + SETTLED_AFTER_S
    last = read() - before
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        now = read() - before
        if now.prompt >= prompt_tokens and now.is_whole and now == last:
            return now
        last = now
    return last


def proxy_handovers(address: tuple[str, int]) -> int:
    """Requests that the proxy saw handed over, from prefill to decode."""
    return total(scrape(address), "moonpool_proxy_prefills_total", 'outcome="handed_over"')


def proxy_predictions(address: tuple[str, int]) -> tuple[int, int]:
    """(answers whose cached tokens the proxy held against what it had predicted, those that differed)"""
    samples = scrape(address)
    name = "moonpool_proxy_cache_predictions"
    return total(samples, name + "_total"), total(samples, name + "_wrong_total")


def node_served_bytes(address: tuple[str, int]) -> int:
    return total(scrape(address), "moonpool_node_served_bytes_total")


def node_sent_bytes(address: tuple[str, int]) -> int:
    """Those of them that left over TCP, for readers on other hosts."""
    return total(scrape(address), "moonpool_node_tcp_sent_bytes_total")


def node_stored_bytes(address: tuple[str, int]) -> int:
    return total(scrape(address), "moonpool_node_stored_bytes_total")


def wait_until_equal(read: Callable[[], int], expected: int) -> int:
    """The value, as soon as it is the expected one; the last value otherwise."""
    deadline_s = time.monotonic() + SETTLED_AFTER_S
    while (value := read()) != expected and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return value


def wait_until_still(read: Callable[[], int], at_least: int, still_s: float = 1.0) -> int:
    """The value once it has reached ``at_least`` and not changed for a moment; the last value otherwise."""
    deadline_s = time.monotonic() + STILL_AFTER_S
    value, since_s = read(), time.monotonic()
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        now = read()
        if now != value:
            value, since_s = now, time.monotonic()
        elif now >= at_least and time.monotonic() - since_s >= still_s:
            break
    return value
