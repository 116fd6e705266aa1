"""The spans of one request, from its last record and its stored decision. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moonpool.disagg_proxy.data_plane.observations import HandoverForm, Observation, Outcome

Value = str | int | float | bool
_FAILED = (Outcome.FAILED, Outcome.BROKEN_OFF)


@dataclass(frozen=True, slots=True)
class TracedDecision:
    """The decision of a request. why: the policy's reasons."""

    method: str
    path: str
    model: str
    request_id: str
    why: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """ids: as W3C Trace Context has them, parent_id 0 for none. Times: seconds of the data plane's clock.
    server: of a request that came here; else of one that went from here to an engine. failure: why it counts
    as an error, "" when it does not. first_byte_s: 0.0 when there was none.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    attributes: Mapping[str, Value]
    server: bool = False
    failure: str = ""
    first_byte_s: float = 0.0


def spans_of(
    observation: Observation,
    noted: TracedDecision | None,
    engines: Sequence[str],
    policy: str,
    new_id: Callable[[], int] = lambda: random.getrandbits(64) or 1,
) -> list[Span]:
    """The request's own span first: engines were told its id, so that theirs are below it. Then that of the
    prefill, and that of the engine that answered. engines: names by place."""
    trace_id, own_id = int.from_bytes(observation.trace_id, "big"), int.from_bytes(observation.span_id, "big")
    outcome = Outcome(observation.outcome)
    # Where it ended there may be no last byte.
    begun_s = max(observation.arrived_s, observation.sent_prefill_s, observation.sent_decode_s)
    end_s = max(begun_s, observation.prefill_done_s, observation.first_byte_s, observation.last_byte_s)
    failure = outcome.name.lower() if outcome in _FAILED else ""
    if not failure and observation.status >= 500:
        failure = f"status {observation.status}"
    request = Span(
        f"{noted.method} {noted.path}" if noted is not None else "request",
        trace_id,
        own_id,
        int.from_bytes(observation.parent_id, "big"),
        observation.arrived_s,
        end_s,
        _request_attributes(observation, noted, engines, policy),
        server=True,
        failure=failure,
    )

    def at_engine(
        name: str, place: int, start_s: float, until_s: float, why: str, more: Mapping[str, Value]
    ) -> Span:
        """What one engine did for the request."""
        attributes = _known({"moonpool.engine": engines[place], **more})
        return Span(name, trace_id, new_id(), own_id, start_s, until_s, attributes, failure=why)

    found = [request]
    if observation.sent_prefill_s and observation.prefill >= 0:
        more: dict[str, Value] = {
            "moonpool.handover": HandoverForm(observation.handed_over).name.lower(),
            "moonpool.cached_tokens": observation.prefill_cached_tokens,
        }
        why = "" if observation.prefill_done_s else "came to nothing"
        until_s = observation.prefill_done_s or end_s
        found.append(
            at_engine("prefill", observation.prefill, observation.sent_prefill_s, until_s, why, more)
        )
    if observation.sent_decode_s and observation.decode >= 0:
        more = {
            "moonpool.cached_tokens": observation.cached_tokens,
            "gen_ai.usage.output_tokens": observation.completion_tokens,
        }
        name = "decode" if len(found) > 1 else "prefill and decode"
        span = at_engine(name, observation.decode, observation.sent_decode_s, end_s, failure, more)
        found.append(replace(span, first_byte_s=observation.first_byte_s))
    return found


def _request_attributes(
    observation: Observation, noted: TracedDecision | None, engines: Sequence[str], policy: str
) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "http.response.status_code": observation.status,
        "gen_ai.usage.input_tokens": observation.prompt_tokens,
        "gen_ai.usage.output_tokens": observation.completion_tokens,
        "moonpool.policy": policy,
        "moonpool.outcome": Outcome(observation.outcome).name.lower(),
        "moonpool.attempts": observation.attempts,
        "moonpool.stream": bool(observation.stream),
        "moonpool.cached_tokens": observation.cached_tokens,
    }
    if observation.decode >= 0:
        attributes["moonpool.engine"] = engines[observation.decode]
    if observation.prefill >= 0:
        attributes["moonpool.prefill_engine"] = engines[observation.prefill]
    if noted is not None:
        attributes["http.request.method"] = noted.method
        attributes["url.path"] = noted.path
        attributes["gen_ai.request.model"] = noted.model
        attributes["moonpool.request_id"] = noted.request_id
        attributes |= {
            f"moonpool.decision.{name}": value if isinstance(value, Value) else str(value)
            for name, value in noted.why.items()
            if value is not None
        }
    return _known(attributes)


def _known(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """The attributes without unknown values: counts below 0, empty texts."""
    return {name: value for name, value in attributes.items() if value != "" and value != -1}
