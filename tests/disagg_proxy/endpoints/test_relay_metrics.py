"""The names that dashboards are built on."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from moonpool.disagg_proxy.data_plane.counters import BOUNDS_S
from moonpool.disagg_proxy.metric_family import buckets
from tests.disagg_proxy.harness import bed, with_deadline

NAMES = {
    "moonpool_proxy_accepted_connections": "counter",
    "moonpool_proxy_client_connections": "gauge",
    "moonpool_proxy_client_disconnects": "counter",
    "moonpool_proxy_compared_recomputation_seconds": "counter",
    "moonpool_proxy_compared_streams": "counter",
    "moonpool_proxy_compared_ttft_seconds": "counter",
    "moonpool_proxy_engine_breaker_open": "gauge",
    "moonpool_proxy_engine_healthy": "gauge",
    "moonpool_proxy_held_body_bytes": "gauge",
    "moonpool_proxy_unread_bytes": "gauge",
    "moonpool_proxy_reserved_dropped": "counter",
    "moonpool_proxy_access_log_dropped": "counter",
    "moonpool_proxy_build_info": "gauge",
    "moonpool_proxy_process_cpu_seconds": "counter",
    "moonpool_proxy_process_max_fds": "gauge",
    "moonpool_proxy_process_open_fds": "gauge",
    "moonpool_proxy_process_resident_memory_bytes": "gauge",
    "moonpool_proxy_process_start_time_seconds": "gauge",
    "moonpool_proxy_process_virtual_memory_bytes": "gauge",
    "moonpool_proxy_observations_dropped": "counter",
    "moonpool_proxy_policy_errors": "counter",
    "moonpool_proxy_prefill_seconds": "histogram",
    "moonpool_proxy_prefill_with_reuse_seconds": "counter",
    "moonpool_proxy_prefill_without_reuse_seconds": "counter",
    "moonpool_proxy_prefills": "counter",
    "moonpool_proxy_priced_prompts": "counter",
    "moonpool_proxy_rejected": "counter",
    "moonpool_proxy_relayed_bytes": "counter",
    "moonpool_proxy_request_seconds": "histogram",
    "moonpool_proxy_requests": "counter",
    "moonpool_proxy_requests_in_flight": "gauge",
    "moonpool_proxy_retries": "counter",
    "moonpool_proxy_saved_prompt_tokens": "counter",
    "moonpool_proxy_time_to_first_byte_seconds": "histogram",
    "moonpool_proxy_upstream_connections": "gauge",
    "moonpool_proxy_upstream_errors": "counter",
}


@with_deadline
async def test_names_and_types() -> None:
    async with bed(2) as b:
        answer = await b.ask("POST", "/v1/completions", b"{}")
        page = await b.ask("GET", "/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(page.body.decode())}
        assert {name: family.type for name, family in families.items()} == NAMES
        counts = {
            sample.labels["engine"]: sample.value
            for sample in families["moonpool_proxy_request_seconds"].samples
            if sample.name.endswith("_count")
        }
        assert counts == {"engine-0": 1, "engine-1": 0}
        relayed = {s.labels["engine"]: s.value for s in families["moonpool_proxy_relayed_bytes"].samples}
        assert relayed["engine-0"] == len(answer.body)


def test_buckets_are_cumulative() -> None:
    counts = [0] * (len(BOUNDS_S) + 1)
    counts[0], counts[1], counts[-1] = 2, 1, 5
    found = dict(buckets((counts, 3.5)))
    assert (found["0.001"], found["0.0025"], found["600.0"], found["+Inf"]) == (2, 3, 3, 8)
    assert len(found) == len(BOUNDS_S) + 1


@with_deadline
async def test_a_prefill_engine_has_answered_what_it_computed_for_others() -> None:
    """Newcomer 7c: it was shown with 0 requests for ever."""
    async with bed(2, roles=["prefill", "decode"], policy="conductor", tokenizer=("none",)) as b:
        body = json.dumps({"model": "m", "prompt": list(range(2000))}).encode()
        for _ in range(3):
            assert (await b.ask("POST", "/v1/completions", body)).status == 200
        rows = json.loads((await b.ask("GET", "/engines")).body)["engines"]
        prefills = sum(b.engine(0).prefills.values())
        assert prefills > 0
        assert {row["name"]: row["requests"] for row in rows} == {"engine-0": prefills, "engine-1": 3}
        page = json.loads((await b.ask("GET", "/ui/data")).body)
        at = page["engine_columns"].index("requests")
        assert [row[at] for row in page["engine_rows"]] == [prefills, 3]
