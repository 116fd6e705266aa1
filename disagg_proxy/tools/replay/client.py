"""One request of a replay: sent as a stream, read to its end, with the time of each piece."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp
import msgspec

EVENT_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = 64 << 10  # of an answer that is no stream


class Ended(Enum):
    """REFUSED: 429 or 503, of the proxy or an engine. CUT: by the end of the replay itself."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    CUT = "cut"


@dataclass(slots=True)
class Outcome:
    """Seconds; at_s, sent_s: from the beginning of the replay, when it was due and when it was sent. why: the
    reason of a refusal or failure, a label. prompt_tokens, cached_tokens, answer_tokens: the engine's own
    count, -1 where it reports none; cached_tokens is of the engine that computed the prompt. prefill_cached:
    what a proxy reports of that engine where another answered, tokens or "unknown". gaps_s: between the
    pieces of the answer; an engine may put several tokens into one."""

    number: int
    at_s: float
    sent_s: float
    input_tokens: int
    reusable: int
    ended: Ended = Ended.CUT
    why: str = ""
    ttft_s: float = -1.0
    end_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = -1
    cached_tokens: int = -1
    answer_tokens: int = -1
    engine: str = ""
    prefill_cached: str = ""

    @property
    def mean_gap_s(self) -> float:
        """Mean seconds between two tokens; 0 with a single one."""
        gaps = self.answer_tokens - 1 if self.answer_tokens > 1 else len(self.gaps_s)
        return sum(self.gaps_s) / gaps if gaps > 0 else 0.0

    @property
    def tail_gap_s(self) -> float:
        """The mean of the longest tenth of the gaps, as objectives of the Mooncake paper count them."""
        if not self.gaps_s:
            return 0.0
        longest = sorted(self.gaps_s)[-max(len(self.gaps_s) // 10, 1) :]
        return sum(longest) / len(longest)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = -1
    completion_tokens: int = -1
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


class _Error(msgspec.Struct):
    error: Any = None


_event = msgspec.json.Decoder(_Event)
_error = msgspec.json.Decoder(_Error)


class BadStream(Exception):
    """The answer is no valid stream of events; the text is a label."""


class Events:
    """Splits a stream into events as its bytes arrive: the data of each."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises BadStream for an event without an end."""
        *whole, self._held = (self._held + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._held) > EVENT_BYTES_MAX:
            raise BadStream("endless_event")
        for event in whole:
            lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            yield b"\n".join(lines)


class Client:
    """clock: seconds, of which ``began_s`` is the replay's begin. api_key: "" for none."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        clock: Callable[[], float],
        *,
        api_key: str = "",
        deadline_s: float = 600.0,
    ) -> None:
        self._session = session
        self._model = model
        self._clock = clock
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._deadline_s = deadline_s

    async def ask(self, url: str, outcome: Outcome, ids: list[int], answer_tokens: int) -> None:
        """Fills the outcome in; raises nothing but CancelledError."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": ids,
                "max_tokens": answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                self._session.post(f"{url}/v1/completions", data=body, headers=self._headers) as answer,
            ):
                outcome.engine = answer.headers.get("X-Moonpool-Engine", "")
                outcome.prefill_cached = answer.headers.get("X-Moonpool-Prefill-Cached", "")
                if answer.status != 200:
                    text = await answer.content.read(ANSWER_BYTES_MAX)
                    outcome.why = _reason(answer.status, text)
                    outcome.ended = Ended.REFUSED if answer.status in (429, 503) else Ended.FAILED
                else:
                    await self._read(answer, outcome)
                    outcome.ended = Ended.ANSWERED
        except BadStream as error:
            outcome.ended, outcome.why = Ended.FAILED, str(error)
        except TimeoutError:
            outcome.ended, outcome.why = Ended.FAILED, "deadline"
        except aiohttp.ClientConnectorError:
            outcome.ended, outcome.why = Ended.FAILED, "connect"
        except (aiohttp.ClientError, OSError):
            outcome.ended, outcome.why = Ended.FAILED, "lost"
        finally:
            outcome.end_s = self._clock()

    async def _read(self, answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
        """Reads the stream to its end. Raises BadStream for one that breaks off or reports an error."""
        events, last_s, done = Events(), 0.0, False
        async for piece in answer.content.iter_any():
            now_s = self._clock()
            for data in events.feed(piece):
                if data == b"[DONE]":
                    done = True  # and then the end of the body: a client that closes before has left
                if not data or done:
                    continue
                try:
                    event = _event.decode(data)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise BadStream("bad_event") from error
                if event.error is not None:
                    raise BadStream("error_event")
                if event.choices:
                    if outcome.ttft_s < 0:
                        outcome.ttft_s = now_s - outcome.sent_s
                    else:
                        outcome.gaps_s.append(now_s - last_s)
                    last_s = now_s
                if event.usage is not None:
                    _count(outcome, event.usage)
        if not done:
            raise BadStream("broken_off")
        if outcome.ttft_s < 0:
            raise BadStream("no_token")


def _count(outcome: Outcome, usage: _Usage) -> None:
    outcome.prompt_tokens = usage.prompt_tokens
    outcome.answer_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    if outcome.prefill_cached:  # the answering engine counts what it was handed over
        if outcome.prefill_cached.isdecimal():
            outcome.cached_tokens = int(outcome.prefill_cached)
    elif details is not None and details.cached_tokens is not None:
        outcome.cached_tokens = details.cached_tokens


def _reason(status: int, text: bytes) -> str:
    """The code of an error of the OpenAI API's shape, as this proxy gives one, else the status."""
    try:
        code = _error.decode(text).error["code"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, KeyError):
        code = None
    return code if isinstance(code, str) and 0 < len(code) <= 64 else str(status)
