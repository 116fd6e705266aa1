"""What is in the spans of a request."""

from __future__ import annotations

from itertools import count

import pytest

from moonpool.disagg_proxy.data_plane.observations import Observation, Outcome
from moonpool.disagg_proxy.tracing.spans import Span, TracedDecision, spans_of
from tests.disagg_proxy.tracing.engines import ENGINES, TWO_STEPS

NOTED = TracedDecision("POST", "/v1/completions", "m", "r-1", {"own_tokens": 64, "wait_s": 0.5})


def spans(observation: Observation, noted: TracedDecision | None = NOTED) -> list[Span]:
    ids = count(1)
    return spans_of(observation, noted, ENGINES, "conductor", lambda: next(ids))


def test_a_request_in_two_steps() -> None:
    request, prefill, decode = spans(TWO_STEPS)
    assert [span.name for span in (request, prefill, decode)] == ["POST /v1/completions", "prefill", "decode"]
    assert request.server
    assert not prefill.server
    assert {span.trace_id for span in (request, prefill, decode)} == {int.from_bytes(b"t" * 16, "big")}
    assert (request.span_id, request.parent_id) == (
        int.from_bytes(b"s" * 8, "big"),
        int.from_bytes(b"p" * 8, "big"),
    )
    assert (prefill.parent_id, decode.parent_id) == (request.span_id, request.span_id)
    assert (prefill.span_id, decode.span_id) == (1, 2)
    assert (request.start_s, request.end_s) == (10.0, 13.0)
    assert (prefill.start_s, prefill.end_s) == (10.1, 11.0)
    assert (decode.start_s, decode.first_byte_s, decode.end_s) == (11.1, 11.5, 13.0)
    assert not any(span.failure for span in (request, prefill, decode))
    assert request.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 900,
        "gen_ai.usage.output_tokens": 20,
        "moonpool.request_id": "r-1",
        "moonpool.policy": "conductor",
        "moonpool.engine": "d0",
        "moonpool.prefill_engine": "p0",
        "moonpool.outcome": "answered",
        "moonpool.attempts": 1,
        "moonpool.stream": True,
        "moonpool.cached_tokens": 896,
        "moonpool.decision.own_tokens": 64,
        "moonpool.decision.wait_s": 0.5,
    }
    assert prefill.attributes == {
        "moonpool.engine": "p0",
        "moonpool.handover": "two_step",
        "moonpool.cached_tokens": 640,
    }
    assert decode.attributes["moonpool.engine"] == "d0"


def test_a_request_at_one_engine_that_told_no_tokens() -> None:
    single = TWO_STEPS._replace(
        prefill=-1, sent_prefill_s=0.0, prefill_done_s=0.0, prompt_tokens=-1, completion_tokens=-1
    )
    request, only = spans(single, None)
    assert (request.name, only.name) == ("request", "prefill and decode")
    assert "gen_ai.usage.input_tokens" not in request.attributes
    assert "moonpool.prefill_engine" not in request.attributes
    assert "gen_ai.request.model" not in request.attributes


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"outcome": Outcome.BROKEN_OFF}, "broken_off"),
        ({"outcome": Outcome.FAILED, "status": 502}, "failed"),
        ({"status": 503}, "status 503"),
        ({"status": 404}, ""),
        ({"outcome": Outcome.LEFT}, ""),
    ],
)
def test_what_counts_as_an_error(changes: dict[str, int], failure: str) -> None:
    request, *_ = spans(TWO_STEPS._replace(**changes))
    assert request.failure == failure


def test_a_prefill_that_never_answered() -> None:
    gone = TWO_STEPS._replace(
        prefill_done_s=0.0, sent_decode_s=0.0, first_byte_s=0.0, last_byte_s=12.0, outcome=Outcome.LEFT
    )
    request, prefill = spans(gone)
    assert prefill.failure == "came to nothing"
    assert prefill.end_s == request.end_s == 12.0
