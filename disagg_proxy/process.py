"""A proxy as a process: signals, exit code, printed lines, limit of open files."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence

import uvloop
from msgspec.structs import replace

from moonpool.core.config.proxy_section import Limits
from moonpool.core.errors import ConfigError
from moonpool.core.service.processes import stay_through_hangup
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.server import serve
from moonpool.disagg_proxy.settings import ProxySettings
from moonpool.disagg_proxy.tokens.tokenizer_threads import are_at_work

_log = logging.getLogger("moonpool.proxy")
_FILES_RESERVED = 128  # for everything that does not grow with clients or engines
_FILES_PER_STREAM = 6  # of KV events: two connections, and wake-ups of four sockets
REPLACED = signal.SIGUSR1  # from the parent: like SIGTERM, and a successor takes over the addresses
HURRIED = signal.SIGUSR2  # from the parent, or its death: drain at once, however often it arrives
_SWITCH_INTERVAL_S = 0.0005  # longest wait of a decision for a thread that makes a page


def run(
    settings: ProxySettings,
    *,
    sockets: Sequence[socket.socket] = (),
    ready: Callable[[str], None] | None = None,
    parent: int | None = None,
) -> int:
    """Runs a proxy in this process until SIGTERM or SIGINT. Returns the exit code: 0, or 2 for a wrong
    setting. ready: called with the URL instead of printing a line.

    A second signal ends what the process waits for: stop_delay_s, or requests in flight. With a parent (the
    process that started this one) it does not: the parent does, and forwards signals that may have come to
    both.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signal(_fit_open_files(settings), sockets, ready, parent))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        pass
    if are_at_work():
        # A long text keeps a tokenizer busy: nothing can end it, and it must not come back into a Python that
        # is gone.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


async def _serve_until_signal(
    settings: ProxySettings,
    sockets: Sequence[socket.socket],
    ready: Callable[[str], None] | None,
    parent: int | None,
) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    replaced, hung_up = asyncio.Event(), asyncio.Event()
    if not settings.deadlines.stop_delay_s:
        hurry.set()
    serving = asyncio.current_task()

    def on_signal() -> None:
        if not stop.is_set():
            stop.set()
        elif os.getppid() == parent:
            pass
        elif not hurry.is_set():
            hurry.set()
        elif serving is not None:
            serving.cancel()

    def on_hurry() -> None:
        hurry.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    stay_through_hangup(loop, on_signal, hung_up.set if settings.rereads else None)
    if parent is not None:
        loop.add_signal_handler(REPLACED, replaced.set)
        loop.add_signal_handler(HURRIED, on_hurry)

    def tell(url: str) -> None:
        print(line(settings, url), flush=True)

    await serve(
        settings,
        ready=ready or tell,
        stop=stop,
        hurry=hurry,
        sockets=sockets,
        replaced=replaced,
        hung_up=hung_up,
    )


def line(settings: ProxySettings, url: str) -> str:
    """The line that a proxy prints when it serves."""
    named = [f"{engine.name} at {engine.url}" for engine in settings.engines]
    engines = ", ".join((*named, *(f"those of {name}" for name in settings.discovery)))
    return f"moonpool proxy: serving on {url} ({settings.policy} over {engines})"


def _fit_open_files(settings: ProxySettings) -> ProxySettings:
    """Raise the limit of open files as far as this process may, and bound the clients so that all of them can
    wait for an answer at one time: each needs its own connection and one to an engine, or to two engines
    where prefill and decode may be asked at once. Apart from that each engine needs one for its health check,
    and some for its events, where the policy follows them; of those that may join half of all files at the
    most."""
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    meets = settings.discovery or any(spec.bootstrap_address for spec in settings.engines)
    twice = settings.handover != "two_step" and bool(meets)
    files_each = 3 if twice else 2
    wanted = settings.limits.client_connections_max
    streams = settings.places + settings.pool_nodes if settings.discovery else len(settings.events)
    if not make_policy(settings.policy).uses_tokens:
        streams = 0
    others = _FILES_RESERVED + settings.places + streams * _FILES_PER_STREAM
    needed = wanted * files_each + others
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return settings
    reserved = min(others, max(_FILES_RESERVED, allowed // 2))
    fitting = max(1, (allowed - reserved) // files_each)
    chosen = wanted != Limits().client_connections_max  # else the operator has not asked for so many
    level = logging.WARNING if chosen else logging.INFO
    _log.log(level, "%d clients at one time, not %d, with ulimit -Hn %d", fitting, wanted, allowed)
    return replace(settings, limits=replace(settings.limits, client_connections_max=fitting))
