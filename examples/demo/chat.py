"""One streaming chat request over HTTP, timed as a client sees it."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass

ANSWER_TIMEOUT_S = 300.0


class RequestFailed(Exception):
    """The server answered with an error, or not at all; the text says which."""


@dataclass(frozen=True)
class Answer:
    """engine: value of X-Moonpool-Engine ("" when asked directly). ttft_s: request sent until the first token
    came.
    """

    engine: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    ttft_s: float


def ask(address: tuple[str, int], model: str, prompt: str, max_tokens: int) -> Answer:
    """Greedy decoding, so that the same prompt has one right answer. Raises RequestFailed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_TIMEOUT_S)
    try:
        begin_s = time.perf_counter()
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
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
    """Reads the server-sent events until [DONE]."""
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
            break
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
    )
