"""An engine like TensorRT-LLM's: prefill and decode apart by ``disaggregated_params``. The state that the
servers hand over is opaque to a proxy; here it is that of the two-step form, and, generation first, of the
concurrent form.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from moonpool.disagg_proxy.tools.mock_engine.api import Asked, BadRequest, DisaggregatedParams, HandoverParams

_GENERATION_FIRST = 1


def arranged(asked: Asked) -> Asked:
    """The request as this engine carries it out. Raises BadRequest."""
    params = asked.disaggregated
    if params is None:
        return asked
    if params.schedule_style == _GENERATION_FIRST:
        return _at_once(asked, params)
    if params.request_type == "context_only":
        return replace(asked, answer_tokens=1, handover=HandoverParams(do_remote_decode=True))
    try:
        handover = msgspec.json.decode(params.encoded_opaque_state, type=HandoverParams)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"no context server has said this: {error}") from error
    return replace(asked, handover=handover)


def _at_once(asked: Asked, params: DisaggregatedParams) -> Asked:
    if params.disagg_request_id is None:
        raise BadRequest("a request that is sent to both servers at once has a disagg_request_id")
    name = f"disagg-{params.disagg_request_id}"
    if params.request_type == "context_only":
        if asked.stream:
            raise BadRequest("a context server does not stream")
        keeps = HandoverParams(do_remote_decode=True, transfer_id=name)
        return replace(asked, answer_tokens=1, handover=keeps)
    parts = urlsplit(params.ctx_info_endpoint)
    if params.ctx_request_id != params.disagg_request_id or not parts.port:
        raise BadRequest("a generation server must be told which context server it meets, and under what id")
    fetches = HandoverParams(
        do_remote_prefill=True,
        transfer_id=name,
        remote_engine_id=parts.path[1:],
        remote_bootstrap_addr=f"http://{parts.netloc}",
    )
    return replace(asked, handover=fetches)


def server_info(host: str, port: int, engine_id: str) -> dict[str, Any]:
    """The address of this context server for a generation server."""
    told = {"ctx_dp_rank": 0, "ctx_info_endpoint": [f"tcp://{host}:{port}/{engine_id}"]}
    return {"disaggregated_params": told}


def context(asked: Asked, answer: dict[str, Any]) -> dict[str, Any]:
    """A context server's answer, with what the generation server needs."""
    handover = answer.pop("kv_transfer_params")
    (choice,) = answer["choices"]
    choice["disaggregated_params"] = {
        "request_type": "context_only",
        "encoded_opaque_state": json.dumps(handover),
    }
    return {**answer, "prompt_token_ids": asked.ids.tolist()}
