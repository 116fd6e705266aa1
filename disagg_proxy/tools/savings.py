"""What reuse saved, by the metrics of proxies (endpoints/savings_metrics.py)."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from prometheus_client.parser import text_string_to_metric_families

from moonpool.core.errors import Unavailable
from moonpool.core.service.http_get import exchange

TIMEOUT_S = 10.0
PAGE_BYTES_MAX = 64 << 20
_PREFIX = "moonpool_proxy_"


@dataclass(frozen=True)
class Savings:
    """Sums since the start of the proxies.

    saved_tokens:    of prompts, not computed.
    told_tokens, cached_tokens: of prompts of which engines report cached tokens, and those.
    priced_prompts:  whose prefill could be predicted; the seconds below are of them.
    without_reuse_s, with_reuse_s: their predicted prefill.
    ttft_s, recomputation_s: means of the streams among them: TTFT, and predicted prefill of all tokens; None
                     without a stream.
    """

    saved_tokens: int
    told_tokens: int
    cached_tokens: int
    priced_prompts: int
    without_reuse_s: float
    with_reuse_s: float
    ttft_s: float | None
    recomputation_s: float | None

    @property
    def saved_s(self) -> float:
        """Predicted seconds of prefill that reuse saved; less than 0 where fetches cost more."""
        return self.without_reuse_s - self.with_reuse_s

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON, ``saved_s`` included."""
        return {**asdict(self), "saved_s": self.saved_s}


def read_savings(urls: Iterable[str], tls: ssl.SSLContext | None = None) -> Savings:
    """Of the proxies at these URLs together. tls: whom to trust where a URL is https; None: the system's
    authorities. Raises Unavailable for one that does not answer as a proxy."""
    sums: dict[str, float] = {}
    for url in urls:
        for name, value in _counters(url.rstrip("/") + "/metrics", tls).items():
            sums[name] = sums.get(name, 0.0) + value
    streams = sums.get("compared_streams_total", 0.0)
    return Savings(
        saved_tokens=int(sums["saved_prompt_tokens_total"]),
        told_tokens=int(sums.get("engine_prompt_tokens_told_total", 0.0)),
        cached_tokens=int(sums.get("engine_prompt_tokens_cached_total", 0.0)),
        priced_prompts=int(sums["priced_prompts_total"]),
        without_reuse_s=sums["prefill_without_reuse_seconds_total"],
        with_reuse_s=sums["prefill_with_reuse_seconds_total"],
        ttft_s=sums["compared_ttft_seconds_total"] / streams if streams else None,
        recomputation_s=sums["compared_recomputation_seconds_total"] / streams if streams else None,
    )


def _counters(url: str, tls: ssl.SSLContext | None) -> dict[str, float]:
    """Counters without labels, by their names without the prefix."""
    try:
        answer = exchange("GET", url, timeout_s=TIMEOUT_S, tls=tls, answer_bytes_max=PAGE_BYTES_MAX)
        found = {
            sample.name.removeprefix(_PREFIX): sample.value
            for family in text_string_to_metric_families(answer.body.decode())
            for sample in family.samples
            if not sample.labels
        }
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"GET {url} failed: {error}", operation="saved", peer=url, cause=error) from error
    if "saved_prompt_tokens_total" not in found:
        raise Unavailable(
            f"{url} has no metrics of a proxy; give the proxy's address with --url",
            operation="saved",
            peer=url,
        )
    return found
