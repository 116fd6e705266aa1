"""One streaming chat request over HTTP, timed as a client sees it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ANSWER_TIMEOUT_S = 300.0

Message = dict[str, str]


class RequestFailed(Exception):
    """The server answered with an error, or not at all; the text says which."""


@dataclass(frozen=True)
class Answer:
    """engine: value of X-Moonpool-Engine ("" when asked directly). ttft_s: request sent until the first token
    came. decision: what X-Moonpool-Decision said.
    """

    engine: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    decision: Mapping[str, object] = field(default_factory=dict)


def ask(
    address: tuple[str, int], model: str, messages: Sequence[Message], max_tokens: int, *, salt: str = ""
) -> Answer:
    """Greedy decoding, so that the same prompt has one right answer. salt: nothing that was computed under
    another one is reused, from no cache. Raises RequestFailed.
    """
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **({"cache_salt": salt} if salt else {}),
    }
    headers = {"Content-Type": "application/json", "X-Moonpool-Decision": "1"}
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_TIMEOUT_S)
    try:
        begin_s = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")[:500]
            raise RequestFailed(f"{address[0]}:{address[1]} answered {response.status}: {text}")
        return _read(response, begin_s)
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"{address[0]}:{address[1]}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, begin_s: float) -> Answer:
    """Reads the server-sent events to the end of the answer: who leaves at [DONE] may leave too early for the
    proxy, which then counts a client that went away."""
    text: list[str] = []
    token_ids: list[int] = []
    usage = {}
    ttft_s = 0.0
    done = False
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"the engine broke off: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            token_ids += choice.get("token_ids") or []
            if piece := choice["delta"].get("content"):
                text.append(piece)
            if not ttft_s and (choice.get("token_ids") or piece):
                ttft_s = time.perf_counter() - begin_s
    if not done:
        raise RequestFailed("the stream ended before [DONE]")
    return Answer(
        engine=response.getheader("X-Moonpool-Engine") or "",
        text="".join(text),
        token_ids=tuple(token_ids),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        ttft_s=ttft_s,
        decision=json.loads(response.getheader("X-Moonpool-Decision") or "{}"),
    )
