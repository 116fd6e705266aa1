"""An engine like SGLang's: its endpoints, /generate, and prefill and decode that use a bootstrap room.

A prefill engine computes the prompt for one token and answers when its blocks were fetched; a decode engine
computes no prompt, and answers 500 when it gets no blocks. A room is for one request: a second request with
the same room is refused and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moonpool.disagg_proxy.tools.mock_engine.api import Asked, BadRequest, HandoverParams
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings


class RoomUsed(BadRequest):
    """Another request has or had this room."""


def arranged(asked: Asked, mode: str, rooms: set[int]) -> Asked:
    """The request as this engine carries it out: which takes what from which. rooms: all that were named so
    far. Raises BadRequest."""
    if mode == "null":
        return asked
    if asked.room is None:
        raise BadRequest("Disaggregated request received without bootstrap room id.")
    host, port, number = asked.room
    if number in rooms:
        raise RoomUsed(f"the room {number} was named before")
    rooms.add(number)
    name = f"room-{number}"
    if mode == "prefill":
        keeps = HandoverParams(do_remote_decode=True, transfer_id=name)
        return replace(asked, answer_tokens=1, handover=keeps)
    fetches = HandoverParams(
        do_remote_prefill=True,
        transfer_id=name,
        remote_engine_id="",
        remote_bootstrap_addr=f"http://{host}:{port}",
    )
    return replace(asked, handover=fetches)


def server_info(settings: MockSettings, port: int) -> dict[str, Any]:
    """Its bootstrap server is at its own port."""
    return {
        "disaggregation_mode": settings.sglang,
        "disaggregation_bootstrap_port": port,
        "page_size": settings.block_tokens,
        "served_model_name": settings.model,
    }


def answer(
    asked: Asked, name: str, words: Sequence[str], cached: int, *, last: bool, prompt: bool
) -> dict[str, Any]:
    """Of /generate: the answer, or an event, which has all that came before. prompt: whether this engine has
    computed the prompt, and knows its logprobs."""
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": {"type": "length", "length": len(words)} if last else None,
        "prompt_tokens": len(asked.ids),
        "completion_tokens": len(words),
        "cached_tokens": cached,
    }
    if asked.logprobs:
        ids = asked.ids.tolist() if prompt else []
        meta["input_token_logprobs"] = [[-(token % 8) / 8, token, None] for token in ids]
        meta["output_token_logprobs"] = [[-0.5, place, None] for place in range(len(words))]
    return {"text": "".join(words), "meta_info": meta}
