"""Token ids from an engine: vLLM's ``/v1/.../render``, else ``/tokenize`` (vLLM, SGLang).

The engine gets the body as the client sent it, so that tools, template arguments and system prompts have
their effect. Engines are asked in turn. An engine without the page is not asked for it for RETRY_S seconds;
an engine that did not answer is not asked at all for REST_S.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec
import numpy as np

from moonpool.disagg_proxy.tokens.items import Items, has_items, tell_apart
from moonpool.disagg_proxy.tokens.source import TextPrompt

DEADLINE_S = 2.0
RETRY_S = 30.0
REST_S = 5.0
ANSWER_BYTES_MAX = 32 << 20

_RENDER = {"chat": "/v1/chat/completions/render", "completions": "/v1/completions/render"}
_ABSENT = (401, 403, 404, 405, 501)  # 401: --api-key; 403: vLLM 0.32 without --enable-scale-out

_log = logging.getLogger("moonpool.proxy")


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: Items | None = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Chat(msgspec.Struct):
    messages: msgspec.Raw
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_template: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    add_generation_prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    continue_final_message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    add_special_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Generate(msgspec.Struct):
    text: str


class _Completion(msgspec.Struct):
    prompt: str
    add_special_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_ODD = (ValueError, OverflowError, RecursionError)  # further errors of malformed JSON

_rendered = msgspec.json.Decoder(_Rendered)
_rendered_list = msgspec.json.Decoder(list[_Rendered])
_tokenized = msgspec.json.Decoder(_Tokenized)
_chat = msgspec.json.Decoder(_Chat)
_completion = msgspec.json.Decoder(_Completion)
_generate = msgspec.json.Decoder(_Generate)


class EngineSource:
    """An HTTP client with keep-alive connections, on the running loop.

    urls:   model -> root URLs of the engines that may be asked now.
    key_of: root URL -> the engine's API key; "": none.
    tls:    the context for engines at https://, as of now; tls_name: that their certificates have; None: the
            host of the URL.
    """

    def __init__(
        self,
        urls: Callable[[str], Sequence[str]],
        *,
        key_of: Callable[[str], str] = lambda _root: "",
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        tls_name: str | None = None,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls = urls
        self._key_of = key_of
        self._tls, self._tls_name = tls, tls_name
        self._deadline_s = deadline_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._absent_until: dict[str, float] = {}  # by page, and by root URL for whole engines
        self._turn = 0
        self._told = False  # logged: engines demand an API key
        self.failures = 0

    async def ids(self, prompt: TextPrompt) -> bytes | None:
        """See ``TokenSource.ids``."""
        roots = [root for root in self._urls(prompt.model) if self._may_ask(root, prompt.kind)]
        if not roots:
            return None
        self._turn += 1
        root = roots[self._turn % len(roots)]
        try:
            async with asyncio.timeout(self._deadline_s):
                ids = await self._render(root, prompt)
                return ids if ids is not None else await self._tokenize(root, prompt)
        except (OSError, aiohttp.ClientError):  # TimeoutError is an OSError
            self._absent_until[root] = self._clock() + REST_S
        except (msgspec.MsgspecError, *_ODD):
            pass
        self.failures += 1
        return None

    async def close(self) -> None:
        """Closes the HTTP session."""
        if self._session is not None:
            await self._session.close()

    def _may_ask(self, root: str, kind: str) -> bool:
        """Whether the engine answers and has one of the pages, as far as known."""
        pages = {"/tokenize", _RENDER.get(kind, "/tokenize")}
        absent = [self._absent_until.get(root + page, 0.0) for page in pages]
        return max(self._absent_until.get(root, 0.0), min(absent)) <= self._clock()

    async def _render(self, root: str, prompt: TextPrompt) -> bytes | None:
        if prompt.kind not in _RENDER:
            return None
        answer = await self._post(root, _RENDER[prompt.kind], prompt.body)
        if answer is None:
            return None
        if prompt.kind == "chat":
            return _ids_of(_rendered.decode(answer))
        rendered = _rendered_list.decode(answer)
        return _ids_of(rendered[0]) if len(rendered) == 1 else None

    async def _tokenize(self, root: str, prompt: TextPrompt) -> bytes | None:
        asked: _Chat | _Completion
        if prompt.kind == "generate":
            asked = _Completion(_generate.decode(prompt.body).text)
        else:
            asked = (_chat if prompt.kind == "chat" else _completion).decode(prompt.body)
            if isinstance(asked, _Chat) and has_items(bytes(asked.messages)):
                return None  # its answer does not tell which of the ids stand for items
        body = msgspec.json.encode(asked)
        answer = await self._post(root, "/tokenize", body)
        return None if answer is None else _u32(_tokenized.decode(answer).tokens)

    async def _post(self, root: str, page: str, body: bytes) -> bytes | None:
        """The body of an answer 200; None: the engine lacks the page or refuses the request."""
        url = root + page
        if self._absent_until.get(url, 0.0) > self._clock():
            return None
        session = self._session = self._session or aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=64), auto_decompress=False
        )
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := self._key_of(root):
            headers["Authorization"] = f"Bearer {key}"
        tls = self._tls() if url.startswith("https:") else True
        # A redirect could lead out of TLS, with the prompt and the key of the engine.
        async with session.post(
            url,
            data=body,
            headers=headers,
            ssl=tls,
            server_hostname=self._tls_name,
            allow_redirects=False,
        ) as answer:
            if answer.status in _ABSENT:
                self._absent_until[url] = self._clock() + RETRY_S
                if answer.status == 401 and not self._told:
                    self._told = True
                    _log.warning(
                        "%s wants an API key, which the proxy has not: give --engine-key-file; without it "
                        "prompts of text are routed without their prefixes, unless --tokenizer MODEL=FOLDER "
                        "says what their ids are",
                        url,
                    )
                return None
            if answer.status != 200:
                return None
            return await _read(answer.content)


async def _read(stream: aiohttp.StreamReader) -> bytes:
    content = bytearray()
    async for piece in stream.iter_any():
        content += piece
        if len(content) > ANSWER_BYTES_MAX:
            raise ValueError(f"an engine's answer is longer than {ANSWER_BYTES_MAX} bytes")
    return bytes(content)


def _ids_of(rendered: _Rendered) -> bytes:
    ids = np.array(rendered.token_ids, "<u4")
    if rendered.features is not None:
        tell_apart(ids, rendered.features)
    return ids.tobytes()


def _u32(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()
