"""A replay from its settings to its results, in a loop of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from moonpool.core.errors import ConfigError, Unavailable
from moonpool.disagg_proxy.tools.replay.client import Client, Outcome
from moonpool.disagg_proxy.tools.replay.prompts import Prompts
from moonpool.disagg_proxy.tools.replay.results import Results
from moonpool.disagg_proxy.tools.replay.sender import Bounds, Sender
from moonpool.disagg_proxy.tools.simulator.trace import Trace

TELL_EVERY_S = 1.0
ASK_S = 10.0  # for the models
BOUNDS = Bounds()
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # the client keeps its own

_bad = partial(ConfigError, operation="replay")


@dataclass(frozen=True, slots=True)
class Plan:
    """urls: roots of an OpenAI API. model: "": the first that the first URL lists. speed, seed: see
    ``Trace.arrivals``. requests: the most that are sent; 0: all. deadline_s: of one request."""

    urls: Sequence[str]
    model: str = ""
    api_key: str = ""
    speed: float = 1.0
    seed: int = 0
    requests: int = 0
    bounds: Bounds = BOUNDS
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.urls:
            raise _bad("a replay needs a --url")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise _bad(f"an engine's URL looks like http://host:port, not {url!r}")
        if not 0 < self.speed < float("inf"):
            raise _bad(f"the speed must be positive, not {self.speed}")
        if self.requests < 0 or not 0 < self.deadline_s < float("inf"):
            raise _bad("requests and their deadline cannot be negative")


@dataclass(frozen=True, slots=True)
class Done:
    """model: of the requests. stopped: by a signal, before the end."""

    results: Results
    model: str
    stopped: bool


def replay(
    plan: Plan,
    trace: Trace,
    prompts: Prompts,
    *,
    each: Callable[[Outcome], None] = lambda outcome: None,
    tell: Callable[[int, int, Results], None] = lambda sent, in_flight, results: None,
) -> Done:
    """each: called with each request at its end; tell: called every second with (requests sent, in
    flight, results so far).

    SIGINT and SIGTERM end it early, with what was measured so far. Raises Unavailable when the
    proxy does not name a model.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(replay_here(plan, trace, prompts, each=each, tell=tell, signals=True))


async def replay_here(
    plan: Plan,
    trace: Trace,
    prompts: Prompts,
    *,
    each: Callable[[Outcome], None] = lambda outcome: None,
    tell: Callable[[int, int, Results], None] = lambda sent, in_flight, results: None,
    signals: bool = False,
    stop: asyncio.Event | None = None,
) -> Done:
    """The same on the running loop; ``stop`` set does what a signal does."""
    loop = asyncio.get_running_loop()
    stop = stop or asyncio.Event()
    results = Results()

    def done(outcome: Outcome) -> None:
        results.add(outcome)
        each(outcome)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=NO_TIMEOUT) as session:
        urls = [url.rstrip("/").removesuffix("/v1") for url in plan.urls]  # both forms are common
        model = plan.model or await first_model(session, urls[0], plan.api_key)
        began_s = loop.time()
        client = Client(
            session, model, lambda: loop.time() - began_s, api_key=plan.api_key, deadline_s=plan.deadline_s
        )
        sender = Sender(client, urls, prompts, plan.bounds, lambda: loop.time() - began_s, done)
        telling = asyncio.ensure_future(_tell(sender, results, tell))
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
        try:
            arrivals = trace.arrivals(speed=plan.speed, seed=plan.seed)
            await sender.run(islice(arrivals, plan.requests or None), stop)
        finally:
            telling.cancel()
            if signals:
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(number)
    return Done(results, model, stop.is_set())


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(session: aiohttp.ClientSession, url: str, api_key: str) -> str:
    """The first model that the OpenAI API at ``url`` lists. Raises Unavailable."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with asyncio.timeout(ASK_S), session.get(f"{url}/v1/models", headers=headers) as answer:
            text = await answer.read()
            if answer.status != 200:
                raise Unavailable(
                    f"{url}/v1/models answered {answer.status}; "
                    + ("give --api-key-file" if answer.status == 401 else "give --model"),
                    operation="replay",
                    peer=url,
                )
            models = msgspec.json.decode(text, type=_Models).data
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
        why = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
        raise Unavailable(
            f"{url} cannot be asked for its models: {why}", operation="replay", peer=url
        ) from error
    if not models:
        raise Unavailable(f"{url} serves no model now; give --model", operation="replay", peer=url)
    return models[0].id


async def _tell(sender: Sender, results: Results, tell: Callable[[int, int, Results], None]) -> None:
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        tell(sender.sent, sender.in_flight, results)


def read_api_key(path: Path) -> str:
    """The first line that is no remark. Raises ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"the API key cannot be read from {path}: {error}") from error
    for text in lines:
        if text.strip() and not text.lstrip().startswith("#"):
            return text.strip()
    raise _bad(f"{path} has no API key")
