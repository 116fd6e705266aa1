"""Several proxy processes at one address. They share the listening sockets, so the kernel gives each client
to a free process, and the death of one process loses no waiting connection.

    this process   binds, passes the sockets on, restarts dead processes, forwards SIGTERM; at a second signal
                   it ends the wait of stop_delay_s, else kills (a terminal and a service manager signal all
                   processes at a time)
    process i      a whole proxy; exchanges requests in flight with its siblings (peers/), through sockets in
                   a folder of this user (group_folder.py)

The group also takes over from a running proxy, and hands over to a new one (takeover.py).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

from moonpool.core.config import logs
from moonpool.core.errors import ConfigError
from moonpool.core.service import audit
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.backoff import Backoff
from moonpool.core.service.exit_codes import EXIT_USAGE
from moonpool.core.service.processes import die_with_parent, stay_through_hangup
from moonpool.disagg_proxy.group_folder import hold, new_folder
from moonpool.disagg_proxy.listen_sockets import take_or_bind, take_over_or_bind
from moonpool.disagg_proxy.process import HURRIED, REPLACED, line
from moonpool.disagg_proxy.process import run as run_one
from moonpool.disagg_proxy.settings import ProxySettings
from moonpool.disagg_proxy.takeover import Offer, Predecessor

_READY_S = 60.0  # longest start of a process, with the first check of its engines
_END_S = 10.0  # longest end of a process that has given up
_spawning = multiprocessing.get_context("spawn")
_log = logging.getLogger("moonpool.proxy")


def run(settings: ProxySettings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 0, or 2 for a wrong setting."""
    try:
        return asyncio.run(_Group(settings).run())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 0


class _Child:
    """One process and its restarts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: SpawnProcess | None = None
        self.served = False
        self.serves = False  # now: it handles signals
        self.backoff = Backoff(initial_s=0.5, max_s=30.0, reset_s=60.0)


class _Group:
    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._listening: list[socket.socket] = []
        self._own: list[list[socket.socket]] = []  # sockets of each process alone (process_listen)
        self._children: list[_Child] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lingered = asyncio.Event()
        if not settings.deadlines.stop_delay_s:
            self._lingered.set()
        self._signalled = False
        self._predecessor: Predecessor | None = None
        self._replaced = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        stay_through_hangup(loop, self._on_signal, self._hang_up if self._settings.rereads else None)
        try:
            self._predecessor = await take_over_or_bind(self._settings, self._listening)
            await asyncio.to_thread(self._listen_alone)
            return await self._serve()
        finally:
            if self._predecessor is not None:
                self._predecessor.close()
            for each in self._all_sockets():
                each.close()

    async def _serve(self) -> int:
        host, port = self._listening[0].getsockname()[:2]
        self._children = children = [_Child(number) for number in range(self._settings.processes)]
        offer = None
        with new_folder() as folder:
            keepers = [asyncio.ensure_future(self._keep(child, folder)) for child in children]
            stopped = asyncio.ensure_future(self._stop.wait())
            try:
                while not stopped.done() and not all(child.served for child in children):
                    await asyncio.wait({stopped, *keepers}, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                    _raise_first(keepers)
                if not stopped.done():
                    url = f"{self._settings.scheme}://{Address(host, port)}"
                    print(f"{line(self._settings, url)}, {len(children)} processes", flush=True)
                    if self._predecessor is not None:
                        await self._predecessor.release()
                        audit.record("take_over", address=str(Address(host, port)))
                    offer = Offer(self._settings.host, port, self._all_sockets(), self._on_replaced)
                    await asyncio.wait({stopped, *keepers}, return_when=asyncio.FIRST_COMPLETED)
                    _raise_first(keepers)
            finally:
                for task in (stopped, *keepers):
                    task.cancel()
                await asyncio.gather(stopped, *keepers, return_exceptions=True)
                if offer is not None:
                    await self._linger(children)
                    await offer.close()
                for each in self._all_sockets():
                    each.close()
                await self._end(children)
        return 0

    def _on_signal(self) -> None:
        # Stopping by a take-over does not count: the first signal after it is survived.
        if self._signalled:
            (self._hurry if self._lingered.is_set() else self._lingered).set()
        self._signalled = True
        self._stop.set()

    def _hang_up(self) -> None:
        """SIGHUP: each process reads its files again."""
        for each in self._children:
            if each.serves and each.process is not None and each.process.pid is not None:
                os.kill(each.process.pid, signal.SIGHUP)

    def _on_replaced(self) -> None:
        self._replaced = True
        self._lingered.set()
        self._stop.set()

    async def _linger(self, children: list[_Child]) -> None:
        """Lets the processes serve on as not ready, for stop_delay_s at most; a successor may still take
        over."""
        if self._signalled and not self._lingered.is_set():
            _signal(children, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.deadlines.stop_delay_s):
                    await self._lingered.wait()
        self._lingered.set()

    def _all_sockets(self) -> list[socket.socket]:
        return [*self._listening, *(each for own in self._own for each in own)]

    def _listen_alone(self) -> None:
        """Binds the sockets of each process alone. Raises ConfigError."""
        for number in range(self._settings.processes if self._settings.process_listen else 0):
            text = _next(self._settings.process_listen, number)
            host, port = parse_address(text, "proxy.process_listen")
            self._own.append([])
            take_or_bind(self._predecessor, host, port, self._own[-1], "--process-listen")

    async def _keep(self, child: _Child, folder: str) -> None:
        """Starts a process, and restarts it whenever it ends. Raises ConfigError if it never serves."""
        failures, number = 0, child.number + 1  # as its log and /ui number it
        while True:
            hears, tells = _spawning.Pipe(duplex=False)
            child.process = process = _spawning.Process(
                target=_serve,
                args=(
                    self._of(child.number, folder),
                    folder,
                    self._sockets_of(child.number),
                    tells,
                    os.getpid(),
                    logging.getLogger().level,
                    logs.is_json(),
                    logs.audit_file(),
                    child.number,
                ),
                name=f"moonpool-proxy-{child.number}",
            )
            process.start()  # on this thread: the process ends with the thread that started it
            tells.close()
            child.backoff.started(time.monotonic())
            served = await _says_ready(hears, _READY_S)
            hears.close()
            child.served |= served
            child.serves = served
            if not served:  # it ends soon, or hangs
                await _ends_within(process, _END_S)
                process.kill()
            await _ended(process)
            child.serves = False
            failures = 0 if served else failures + 1
            if not child.served and (process.exitcode == EXIT_USAGE or failures >= 3):
                raise ConfigError(
                    f"moonpool proxy: process {number} ended with {process.exitcode} before it served",
                    operation="listen",
                    key="proxy.processes",
                )
            again_s = child.backoff.died(time.monotonic()) - time.monotonic()
            _log.warning(
                "process %d of the proxy ended with %s; it starts again in %.1f s",
                number,
                process.exitcode,
                again_s,
            )
            await asyncio.sleep(again_s)

    async def _end(self, children: list[_Child]) -> None:
        """Drains all processes together; kills those that are late, or all at a second signal."""
        running = _signal(children, REPLACED if self._replaced else signal.SIGTERM)
        if self._settings.deadlines.stop_delay_s:
            _signal(children, HURRIED)
        ended = asyncio.ensure_future(asyncio.gather(*(_ended(process) for process in running)))
        hurried = asyncio.ensure_future(self._hurry.wait())
        waits: set[asyncio.Future[Any]] = {ended, hurried}
        await asyncio.wait(
            waits,
            timeout=self._settings.deadlines.drain_s + 5.0,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurried.cancel()
        for process in running:
            if process.is_alive():
                process.kill()
        await asyncio.gather(ended, hurried, return_exceptions=True)

    def _sockets_of(self, number: int) -> list[socket.socket]:
        return [*self._listening, *(self._own[number] if self._own else ())]

    def _of(self, number: int, folder: str) -> ProxySettings:
        """The settings of one process. Proxies of other hosts are assumed to have as many processes."""
        settings, count = self._settings, self._settings.processes
        siblings = [f"ipc://{folder}/{each}" for each in range(count)]
        peers = replace(
            settings.peers,
            listen=(siblings[number], *(_next(text, number) for text in settings.peers.listen)),
            peers=(
                *(each for each in siblings if each != siblings[number]),
                *(_next(text, each) for text in settings.peers.peers for each in range(count)),
            ),
        )
        log = settings.access_log
        registry = settings.discovery_registry_file
        if settings.registers and not registry:  # an engine registers with one process only
            registry = f"{folder}/registrations.json"
        return msgspec.structs.replace(
            settings,
            process_number=number,
            process_listen=settings.process_listen and _next(settings.process_listen, number),
            peers=peers,
            discovery_registry_file=registry,
            take_over=self._predecessor is not None,
            access_log=f"{log}.{number}" if log not in ("", "-") else log,
        )


def _serve(
    settings: ProxySettings,
    folder: str,
    sockets: list[socket.socket],
    tells: multiprocessing.connection.Connection,
    parent: int,
    log_level: int,
    log_json: bool,
    audit_file: str,
    number: int,
) -> None:
    """Main function of a process of the group."""
    die_with_parent(parent, HURRIED)  # delivered for each thread of the parent
    logs.begin(log_level, f"process {number + 1}: ", as_json=log_json, audit_file=audit_file)
    with hold(folder):
        code = run_one(settings, sockets=sockets, ready=lambda _: tells.send(True), parent=parent)
    sys.exit(code)


def _signal(children: Sequence[_Child], number: signal.Signals) -> list[SpawnProcess]:
    """Signals all that run, and returns them."""
    running = [each.process for each in children if each.process is not None and each.process.is_alive()]
    for process in running:
        if process.pid is not None:
            os.kill(process.pid, number)
    return running


def _next(text: str, number: int) -> str:
    """The address with its port increased by ``number``; port 0 and ipc paths stay."""
    if text.startswith("ipc://"):
        return text
    address = parse_address(text, "proxy.peer_listen")
    return str(address._replace(port=address.port + number if address.port else 0))


async def _says_ready(hears: multiprocessing.connection.Connection, timeout_s: float) -> bool:
    """Whether a process reported that it serves, within timeout_s seconds."""

    def wait() -> bool:
        try:
            return hears.poll(timeout_s) and bool(hears.recv())
        except EOFError:  # the process has ended and closed its end of the pipe
            return False

    return await asyncio.to_thread(wait)


async def _ends_within(process: SpawnProcess, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(_ended(process), seconds)


async def _ended(process: SpawnProcess) -> None:
    """Waits for the end of a process; leaves no reader behind when cancelled."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    descriptor = os.dup(process.sentinel)
    loop.add_reader(descriptor, over.set)
    try:
        if process.is_alive():
            await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.join()


def _raise_first(keepers: Sequence[asyncio.Future[None]]) -> None:
    for keeper in keepers:
        if keeper.done():
            keeper.result()
