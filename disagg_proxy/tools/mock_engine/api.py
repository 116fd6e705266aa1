"""What OpenAI clients send to a mock engine, as token ids, and what it answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

WORDS = 1_000


class BadRequest(Exception):
    """One sentence for the client."""


class HandoverParams(msgspec.Struct):
    """``kv_transfer_params`` of both PD forms; other members are ignored."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_bootstrap_addr: str | None = None


class Sampling(msgspec.Struct):
    """``sampling_params`` of SGLang's /generate."""

    max_new_tokens: int | None = None


class DisaggregatedParams(msgspec.Struct):
    """TensorRT-LLM's; other members are ignored."""

    request_type: str
    encoded_opaque_state: str = ""
    schedule_style: int = 0
    disagg_request_id: int | None = None
    ctx_request_id: int | None = None
    ctx_info_endpoint: str = ""


class _Body(msgspec.Struct):
    model: str = ""
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str = ""
    kv_transfer_params: HandoverParams | None = None
    text: str | None = None
    input_ids: list[Any] | None = None
    sampling_params: Sampling | None = None
    return_logprob: bool = False
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int | None = None
    disaggregated_params: DisaggregatedParams | None = None
    prompt_token_ids: list[Any] | None = None


_body = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Asked:
    """One parsed request. ids: u32 array of the prompt; native: of SGLang's /generate; logprobs: the answer
    must have them; room: the bootstrap room of its hand-over, ("host", port, number)."""

    chat: bool
    model: str
    ids: np.ndarray
    answer_tokens: int
    stream: bool
    usage: bool
    salt: str
    handover: HandoverParams | None
    native: bool = False
    logprobs: bool = False
    room: tuple[str, int, int] | None = None
    disaggregated: DisaggregatedParams | None = None


def read(path: bytes, body: bytes, answer_tokens: int) -> Asked:
    """answer_tokens: for a request that does not say. Raises BadRequest."""
    try:
        asked = _body.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"this body is no request: {error}") from error
    chat, native = path.startswith(b"/v1/chat/"), path == b"/generate"
    limit = asked.max_completion_tokens or asked.max_tokens or answer_tokens
    prompt = asked.prompt_token_ids or rendered(asked.messages) if chat else asked.prompt
    if native:
        sampling = asked.sampling_params or Sampling()
        limit, prompt = sampling.max_new_tokens or answer_tokens, asked.text or asked.input_ids
    if limit < 1:
        raise BadRequest(f"max_tokens is at least 1, not {limit}")
    ids = token_ids(prompt)
    if not len(ids):
        raise BadRequest("the prompt is empty")
    usage = bool((asked.stream_options or {}).get("include_usage"))
    room = asked.bootstrap_room
    return Asked(
        chat,
        asked.model,
        ids,
        limit,
        asked.stream,
        usage,
        asked.cache_salt,
        asked.kv_transfer_params,
        native,
        asked.return_logprob,
        None if room is None else (asked.bootstrap_host, asked.bootstrap_port, room),
        asked.disaggregated_params,
    )


def rendered(messages: list[dict[str, Any]] | None) -> str:
    """The mock's chat template."""
    if not messages:
        raise BadRequest("messages is empty")
    return "".join(f"<{message.get('role')}>{message.get('content')}\n" for message in messages)


def token_ids(prompt: str | list[Any] | None) -> np.ndarray:
    """The mock's tokenizer: four bytes of UTF-8 are one token; ids are taken as they are."""
    if isinstance(prompt, list):
        flat = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list | str) else prompt
        if isinstance(flat, list):
            try:
                return np.array(flat, "<u4")
            except (ValueError, TypeError, OverflowError) as error:
                raise BadRequest("prompt is one text, or a list of token ids") from error
        prompt = flat
    if not isinstance(prompt, str):
        raise BadRequest("prompt is one text, or a list of token ids")
    text = prompt.encode()
    return np.frombuffer(text + b"\0" * (-len(text) % 4), "<u4") & np.uint32(0x7FFFFFFF)


def words(asked: Asked) -> list[str]:
    """The whole answer, different for each prompt."""
    seed = hashlib.sha256(asked.salt.encode() + b"\0" + asked.ids.tobytes()).digest()
    start = int.from_bytes(seed[:4], "little")
    return [f" w{(start + place * 2_654_435_761) % WORDS}" for place in range(asked.answer_tokens)]


def whole_answer(asked: Asked, name: str, text: str, usage: dict[str, Any], params: object) -> dict[str, Any]:
    """The answer in one piece, in OpenAI's form. name: its id; params: ``kv_transfer_params`` of a two-step
    prefill, None for none."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if asked.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    answer = {"id": name, "object": _object(asked), "model": asked.model, "choices": [choice], "usage": usage}
    return answer if params is None else {**answer, "kv_transfer_params": params}


def piece(asked: Asked, name: str, text: Sequence[str], *, last: bool) -> dict[str, Any]:
    """One event of a streamed answer, in OpenAI's form; text: its tokens; last: it has the finish_reason. No
    usage: that is an event of its own."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    if asked.chat:
        choice["delta"] = {"content": "".join(text)}
    else:
        choice["text"] = "".join(text)
    return {"id": name, "object": _object(asked, ".chunk"), "model": asked.model, "choices": [choice]}


def usage_of(tokens: int, cached: int, made: int) -> dict[str, Any]:
    """OpenAI's ``usage``, in tokens. cached: of the prompt, found in this engine's prefix cache; made: of the
    answer."""
    return {
        "prompt_tokens": tokens,
        "completion_tokens": made,
        "total_tokens": tokens + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error(sentence: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """OpenAI's form of an error, without parameter and code."""
    return {"error": {"message": sentence, "type": kind, "param": None, "code": None}}


def _object(asked: Asked, suffix: str = "") -> str:
    return ("chat.completion" + suffix) if asked.chat else "text_completion"
