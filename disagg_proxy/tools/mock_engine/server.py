"""Puts a mock engine together and serves it."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import uuid
from collections.abc import Hashable, Sequence
from urllib.parse import urlsplit

import uvloop

from moonpool import _native
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.mock_engine import api, handover, sglang, tensorrt_llm
from moonpool.disagg_proxy.tools.mock_engine.api import Asked, BadRequest
from moonpool.disagg_proxy.tools.mock_engine.batch import Batch, Job, State
from moonpool.disagg_proxy.tools.mock_engine.blocks import Blocks
from moonpool.disagg_proxy.tools.mock_engine.events import EngineEvents
from moonpool.disagg_proxy.tools.mock_engine.http import Connection, Running
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings

_log = logging.getLogger("moonpool.mock_engine")


class MockEngine:
    """One engine on the running loop: ``open``, then ``close``."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.engine_id = str(uuid.uuid4())
        self._loop = asyncio.get_running_loop()
        self._events = EngineEvents(settings.events, settings.replay) if settings.events else None
        self.blocks = Blocks(settings.blocks, self._changed)
        self.batch = Batch(
            self.blocks,
            settings.timing,
            block_tokens=settings.block_tokens,
            budget=settings.step_tokens,
            requests_max=settings.requests_max,
        )
        self.leases = handover.Leases(self.blocks, settings.lease_s)
        self.connections: set[Connection] = set()
        self.answers: dict[Job, Answer] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.counts = dict.fromkeys(("requests", "finished", "aborted", "prompt_tokens", "cached_tokens"), 0)
        self.counts |= dict.fromkeys(("fetched_tokens", "made_tokens", "failed_fetches", "rooms_reused"), 0)
        self.rooms: set[int] = set()
        self.faults: dict[str, object] = {}
        self._stepping = False
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """Listens. Returns its URL. Raises ConfigError when the address cannot be bound."""
        settings = self.settings
        try:
            self._server = await self._loop.create_server(
                lambda: Connection(self.handle, self.connections), settings.host, settings.port, backlog=1024
            )
        except OSError as error:
            raise ConfigError(
                f"mock-engine: cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose "
                f"another --port",
                operation="start",
                key="port",
            ) from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        return f"http://{settings.host}:{self.port}"

    @property
    def endpoints(self) -> list[str]:
        """Of its KV events and their replay, with the real ports."""
        return [] if self._events is None else self._events.endpoints

    async def close(self) -> None:
        """Cuts all clients, cancels all tasks, and publishes the events that wait (up to a second, on another
        thread). Works after an ``open`` that failed, too."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.cut()
        for task in list(self.tasks):
            task.cancel()
        self.leases.close()
        if self._events is not None:
            events, self._events = self._events, None
            await asyncio.to_thread(events.close)

    # Requests

    def handle(self, connection: Connection, method: bytes, path: bytes, body: bytes) -> Running | None:
        """The ``Handler`` of all connections, on the event loop. A fault that POST /mock/faults ordered comes
        first, except on /mock/... and /health."""
        if self.faults and not path.startswith((b"/mock/", b"/health")) and self._fails(connection):
            return None
        if method == b"POST" and path in (b"/v1/chat/completions", b"/v1/completions", b"/generate"):
            return self._generate(connection, path, body)
        if method == b"POST":
            return self._post(connection, path, body)
        self._page(connection, path)
        return None

    def _generate(self, connection: Connection, path: bytes, body: bytes) -> Running | None:
        try:
            asked = api.read(path, body, self.settings.answer_tokens)
            if self.settings.sglang:
                asked = sglang.arranged(asked, self.settings.sglang, self.rooms)
            asked = tensorrt_llm.arranged(asked)
        except BadRequest as error:
            self.counts["rooms_reused"] += isinstance(error, sglang.RoomUsed)
            connection.answer(400, api.error(str(error)))
            return None
        if asked.model not in ("", self.settings.model):
            connection.answer(404, api.error(f"The model `{asked.model}` does not exist."))
            return None
        # As in vLLM: clients may use one X-Request-Id several times.
        name = f"{connection.request_id.decode('latin-1') or 'mock'}-{uuid.uuid4().hex}"
        answer = Answer(self, connection, asked, name)
        if not self.batch.fits(answer.job):
            tokens = self.settings.blocks * self.settings.block_tokens
            connection.answer(
                400,
                api.error(
                    f"this model's maximum context length is {tokens} tokens; the prompt has "
                    f"{len(asked.ids)} and the answer may have {asked.answer_tokens}"
                ),
            )
            return None
        self.counts["requests"] += 1
        self.answers[answer.job] = answer
        answer.begin()
        self.batch.submit(answer.job)
        self.wake()
        return answer

    def _post(self, connection: Connection, path: bytes, body: bytes) -> Running | None:
        try:
            if path == b"/tokenize":
                asked = json.loads(body)
                chat = "messages" in asked
                prompt = api.rendered(asked["messages"]) if chat else asked.get("prompt")
                ids = api.token_ids(prompt).tolist()
                connection.answer(200, {"count": len(ids), "max_model_len": 1 << 20, "tokens": ids})
            elif path in (b"/v1/chat/completions/render", b"/v1/completions/render"):
                ids = api.read(path, body, 1).ids.tolist()
                content: object = {"token_ids": ids}
                connection.answer(200, content if path.startswith(b"/v1/chat/") else [content])
            elif path == b"/v1/embeddings":
                connection.answer(200, {"object": "list", "data": [{"index": 0, "embedding": [0.0]}]})
            elif path == b"/mock/handover":
                wanted = json.loads(body)
                if self.settings.sglang or wanted["engine_id"] == self.engine_id:
                    return Fetched(self, connection, str(wanted["id"]))
                connection.answer(200, {"tokens": 0})
            elif path == b"/mock/faults":
                self.faults = dict(json.loads(body))
                connection.answer(200, self.faults)
            elif path == b"/reset_prefix_cache":
                self.blocks.clear_cache()
                connection.answer(200, {})
            else:
                connection.answer(404, api.error(f"there is no {path.decode('latin-1')}"))
        except (BadRequest, ValueError, KeyError, TypeError, AttributeError) as error:
            connection.answer(400, api.error(f"this body is no request: {error}"))
        return None

    def _page(self, connection: Connection, path: bytes) -> None:
        if path == b"/health":
            connection.answer(503 if self.faults.get("sick") else 200, b"")
        elif path == b"/v1/models":
            model = {"id": self.settings.model, "object": "model", "owned_by": "moonpool"}
            connection.answer(200, {"object": "list", "data": [model]})
        elif path in (b"/server_info", b"/get_server_info") and self.settings.sglang:
            connection.answer(200, sglang.server_info(self.settings, self.port))
        elif path == b"/server_info":
            told = tensorrt_llm.server_info(self.settings.host, self.port, self.engine_id)
            connection.answer(200, told)
        elif path == b"/query" and not self.settings.sglang:  # the bootstrap page of the concurrent form
            where = f"http://{self.settings.host}:{self.port}"
            connection.answer(200, {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": where}}}})
        elif path == b"/mock/accounts":
            connection.answer(200, self.accounts())
        elif path == b"/metrics":
            connection.answer(200, self._metrics().encode(), b"text/plain; version=0.0.4")
        else:
            connection.answer(404, api.error(f"there is no {path.decode('latin-1')}"))

    def accounts(self) -> dict[str, int]:
        """Everything that must be 0 again without requests: waiting, running, blocks_held, leases."""
        self.batch.check_integrity()
        return {
            "waiting": len(self.batch.waiting),
            "running": len(self.batch.running),
            "blocks_held": self.blocks.held,
            "blocks_cached": self.blocks.cached,
            "leases": len(self.leases),
            "leases_fetched": self.leases.fetched,
            "leases_expired": self.leases.expired,
            "connections": len(self.connections),
            **self.counts,
        }

    def _metrics(self) -> str:
        label = f'{{model_name="{self.settings.model}"}}'
        values = {
            "vllm:num_requests_running": len(self.batch.running),
            "vllm:num_requests_waiting": len(self.batch.waiting),
            "vllm:kv_cache_usage_perc": self.blocks.held / self.blocks.count,
            "vllm:prompt_tokens_total": self.counts["prompt_tokens"],
            "vllm:generation_tokens_total": self.counts["made_tokens"],
            "vllm:prefix_cache_queries_total": self.counts["prompt_tokens"],
            "vllm:prefix_cache_hits_total": self.counts["cached_tokens"],
        }
        return "".join(f"{name}{label} {value}\n" for name, value in values.items())

    def _fails(self, connection: Connection) -> bool:
        """Faults that POST /mock/faults set: status, hang, cut; each takes effect when a request arrives."""
        if status := self.faults.get("status"):
            connection.answer(int(str(status)), api.error("a fault that was asked for", "server_error"))
        elif self.faults.get("cut"):
            connection.cut()
        return bool(self.faults.get("status") or self.faults.get("cut") or self.faults.get("hang"))

    # Steps

    def wake(self) -> None:
        """Wakes the step loop, if it is idle."""
        for job in self.batch.admit():
            self._fetch(job)
        if self._stepping:
            return
        seconds = self.batch.begin_step()
        if seconds is None:
            return
        self._stepping = True
        if seconds:
            self._loop.call_later(seconds, self._step_ended)
        else:
            self._loop.call_soon(self._step_ended)

    def _step_ended(self) -> None:
        self._stepping = False
        for job, count in self.batch.end_step():
            self.answers[job].made(count)
        self.wake()

    def _fetch(self, job: Job) -> None:
        task = self._loop.create_task(self._fetch_blocks(job, self.answers[job].asked))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _fetch_blocks(self, job: Job, asked: Asked) -> None:
        params = asked.handover
        assert params is not None
        if params.transfer_id is not None:
            parts = urlsplit(params.remote_bootstrap_addr or "")
            host, port, name = parts.hostname, parts.port, params.transfer_id
        else:
            host, port, name = params.remote_host, params.remote_port, params.remote_request_id or ""
        tokens = 0
        if host and port:
            tokens = await handover.fetch(
                host, port, name, params.remote_engine_id or "", timeout_s=self.settings.lease_s
            )
        if not tokens and self.settings.sglang:
            if answer := self.answers.get(job):
                answer.fail("KVTransferError: nothing came from the prefill engine")
            return
        if tokens:
            missing = max(0, tokens - job.cached)
            await asyncio.sleep(missing * self.settings.timing.handover_s_per_token)
        else:
            self.counts["failed_fetches"] += 1
        self.batch.fetched(job, tokens)
        self.wake()

    # Events

    def _changed(self, holder: Hashable, stored: Sequence[int], removed: Sequence[bytes]) -> None:
        if self._events is None:
            return
        if removed:
            self._events.removed(removed)
        if isinstance(holder, Job):
            asked = self.answers[holder].asked
            self._events.stored(holder.digests, stored, asked.ids, self.settings.block_tokens, asked.salt)

    def digests(self, asked: Asked) -> list[bytes]:
        """Of the full blocks of a prompt."""
        flat = _native.block_digests(asked.ids, self.settings.block_tokens, asked.salt.encode())
        return [flat[at : at + 32] for at in range(0, len(flat), 32)]


class Answer:
    """One request and its client."""

    def __init__(self, engine: MockEngine, connection: Connection, asked: Asked, name: str) -> None:
        handed = asked.handover
        self._engine = engine
        self._connection = connection
        self._name = name
        self._words = api.words(asked)
        self._fetches = handed is not None and handed.do_remote_prefill
        self._keeps = handed is not None and handed.do_remote_decode
        self._transfer = (handed.transfer_id or "") if handed is not None and self._keeps else ""
        self._began = False  # the head of a stream has been sent
        self._kept = False  # the answer waits until its blocks were fetched
        self.asked = asked
        self.job = Job(
            name, len(asked.ids), engine.digests(asked), asked.answer_tokens, fetches=self._fetches
        )

    def abort(self) -> None:
        """The client has left."""
        engine = self._engine
        if self._kept:
            engine.counts["aborted"] += 1
            engine.leases.drop(self._transfer)
            engine.wake()
        if self.job.state is State.OVER:
            return
        engine.batch.abort(self.job)
        if self._transfer:
            engine.leases.refuse(self._transfer)
        engine.answers.pop(self.job, None)
        engine.counts["aborted"] += 1
        engine.wake()

    def begin(self) -> None:
        """As vLLM does, the head of a stream goes out before anything is computed; SGLang's OpenAI API waits
        for the first token."""
        if self.asked.stream and (self.asked.native or not self._engine.settings.sglang):
            self._began = True
            self._connection.begin()

    def fail(self, sentence: str) -> None:
        """In the middle of it."""
        self._engine.batch.abort(self.job)
        self._engine.answers.pop(self.job, None)
        self._failed(sentence)
        self._engine.wake()

    def _failed(self, sentence: str) -> None:
        self._engine.counts["failed_fetches"] += 1
        error = api.error(sentence, "internal_error")
        if not self._began:
            return self._connection.answer(500, error)
        error["error"]["code"] = 500
        self._connection.event(error)
        self._connection.event(b"[DONE]")
        self._connection.end()

    def made(self, count: int) -> None:
        """So many more tokens were made."""
        job, asked = self.job, self.asked
        done = job.made >= job.answer_tokens
        waits = self._keeps and self._engine.settings.sglang
        if asked.stream and not waits:
            for place in range(job.made - count, job.made):
                self._event(place, last=place == job.answer_tokens - 1)
        if done:
            self._finish()

    def _event(self, place: int, *, last: bool) -> None:
        if not self._began:
            self._began = True
            self._connection.begin()
        if self.asked.native:
            self._connection.event(self._native(place + 1, last=last))
        else:
            words = self._words[place : place + 1]
            self._connection.event(api.piece(self.asked, self._name, words, last=last))

    def _native(self, made: int, *, last: bool) -> dict[str, object]:
        words = self._words[:made]
        return sglang.answer(
            self.asked, self._name, words, self.job.cached, last=last, prompt=not self._fetches
        )

    def _finish(self) -> None:
        job, engine = self.job, self._engine
        params = None
        name = self._transfer or self._name
        if self._keeps and name not in engine.leases:
            engine.batch.finish(job, heir=("lease", name))
            engine.answers.pop(job, None)
            if engine.settings.sglang:
                self._kept = True
                return engine.leases.open(name, job.tokens, self._taken)
            engine.leases.open(name, job.tokens)
            params = self._params(name)
        else:
            engine.batch.finish(job)
        engine.answers.pop(job, None)
        self._answer(params)

    def _taken(self, taken: bool) -> None:
        self._kept = False
        if not taken:
            return self._failed("KVTransferError: no engine fetched the blocks")
        if self.asked.stream:
            self._event(0, last=True)
        self._answer(None)

    def _answer(self, params: dict[str, object] | None) -> None:
        job, asked, engine = self.job, self.asked, self._engine
        counts = engine.counts
        counts["finished"] += 1
        counts["prompt_tokens"] += job.tokens
        counts["cached_tokens"] += job.cached
        counts["fetched_tokens"] += job.fetched
        counts["made_tokens"] += job.made
        usage = api.usage_of(job.tokens, job.cached + job.fetched, job.made)
        if asked.stream:
            if asked.usage:
                self._connection.event({"id": self._name, "choices": [], "usage": usage})
            self._connection.event(b"[DONE]")
            self._connection.end()
        elif asked.native:
            self._connection.answer(200, self._native(job.made, last=True))
        else:
            text = "".join(self._words)
            content = api.whole_answer(asked, self._name, text, usage, params)
            if asked.disaggregated is not None and params is not None:
                content = tensorrt_llm.context(asked, content)
            self._connection.answer(200, content)

    def _params(self, name: str) -> dict[str, object] | None:
        if self._transfer:
            return None  # the concurrent form: the proxy knows all of it
        settings = self._engine.settings
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine.engine_id,
            "remote_request_id": name,
            "remote_host": settings.host,
            "remote_port": self._engine.port,
            "remote_num_tokens": self.job.tokens,
            "tp_size": 1,
        }


class Fetched:
    """A decode engine that waits for a prompt's blocks."""

    def __init__(self, engine: MockEngine, connection: Connection, name: str) -> None:
        self._connection = connection
        self._task = asyncio.get_running_loop().create_task(self._run(engine, name))
        engine.tasks.add(self._task)
        self._task.add_done_callback(engine.tasks.discard)

    def abort(self) -> None:
        """The decode engine has left: its prompt's blocks stay leased until they expire."""
        self._task.cancel()

    async def _run(self, engine: MockEngine, name: str) -> None:
        tokens = await engine.leases.wait(name)
        engine.wake()
        if not self._connection.is_gone:
            self._connection.answer(200, {"tokens": tokens})


def run(settings: MockSettings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status."""
    try:
        status: int = uvloop.run(_serve(settings))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return status


async def _serve(settings: MockSettings) -> int:
    engine = MockEngine(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        print(f"mock engine {settings.model} on {await engine.open()}", flush=True)
        await stop.wait()
    finally:
        await engine.close()
    return 0
