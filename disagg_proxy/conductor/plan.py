"""The values of a decision about a request, which the data plane (``_native.Relay``) carries out.

``decide`` returns the place of one engine, a ``Plan``, an ``Answer``, or None: the decision comes later by
``relay.resume``. The data plane reads the tuples by position.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]


class Plan(NamedTuple):
    """engine: the place of the engine that answers.

    prefill:         the place of the engine that computes the prompt before, or None: engine does both.
    prefill_params:  None: prefill is asked first, and the kv_transfer_params of its answer go to engine.
                     Otherwise both are asked at once, with these kv_transfer_params (JSON)
    engine_params:   and these. None: prefill is asked first, with prefill_params as its disaggregated_params,
                     and those of its answer go to engine (TensorRT-LLM).
    members:         both are asked at once with one body: the client's, with these members (name, JSON). With
                     prefill_params: engine alone gets these, prefill those as its disaggregated_params.
    headers:         for a client that sent X-Moonpool-Decision.
    tracked:         the scheduler accounts for the request: its observation says so, and how far it is.
    prefill_headers: for prefill, in the place of what the client sent under these names; three at most.
    """

    engine: int
    prefill: int | None = None
    prefill_params: bytes | None = None
    engine_params: bytes | None = None
    headers: Headers = ()
    tracked: bool = False
    prefill_headers: Headers = ()
    members: Headers = ()


class Answer(NamedTuple):
    """The proxy's own answer. reason: a label of moonpool_proxy_rejected_total, "" when it is no refusal."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = ()
    reason: str = ""


def error_body(status: int, sentence: str, reason: str) -> bytes:
    """As clients of the OpenAI API expect it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else kind
    error = {"message": sentence, "type": kind, "param": None, "code": reason}
    return msgspec.json.encode({"error": error})


def refused(status: int, sentence: str, reason: str) -> Answer:
    """An answer of the proxy that says why no engine answers."""
    return Answer(status, error_body(status, sentence, reason), reason=reason)


FAILED = refused(500, "the proxy's log says what went wrong", "page")
Decision = int | Plan | Answer | None
