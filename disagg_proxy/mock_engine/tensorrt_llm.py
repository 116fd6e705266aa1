"""What is different in an engine like TensorRT-LLM's: prefill and decode apart by ``disaggregated_params``,
the context first. What the servers keep for each other is opaque to a proxy; here it is the two-step form's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from moonpool.disagg_proxy.mock_engine.api import Asked, BadRequest, HandoverParams


def arranged(asked: Asked) -> Asked:
    """The request as this engine carries it out. Raises BadRequest."""
    params = asked.disaggregated
    if params is None:
        return asked
    if params.request_type == "context_only":
        return replace(asked, answer_tokens=1, handover=HandoverParams(do_remote_decode=True))
    try:
        handover = msgspec.json.decode(params.encoded_opaque_state, type=HandoverParams)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"no context server has said this: {error}") from error
    return replace(asked, handover=handover)


def context(asked: Asked, answer: dict[str, Any]) -> dict[str, Any]:
    """A context server's answer, with what the generation server needs."""
    handover = answer.pop("kv_transfer_params")
    (choice,) = answer["choices"]
    choice["disaggregated_params"] = {
        "request_type": "context_only",
        "encoded_opaque_state": json.dumps(handover),
    }
    return {**answer, "prompt_token_ids": asked.ids.tolist()}
