"""Several processes of a proxy at one address, started by the command."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

import moonpool
from moonpool.core.service.processes import descendants, living_processes
from moonpool.disagg_proxy.peers.wire import decode_head
from tests.ports import held_run

from .client_rows import ROWS, shown
from .harness import Client, Exchange, MockEngine, until, with_deadline
from .tls_files import Files

CHAT = "/v1/chat/completions"
_several = functools.partial(with_deadline, deadline_s=120.0)  # several interpreters start in each


@dataclass
class Group:
    process: asyncio.subprocess.Process
    port: int
    own_port: int

    async def ask(self, body: bytes = b'{"model":"m","messages":[]}') -> str:
        """Which process has answered: a request's id begins with its own digits."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        answer = await client.ask("POST", CHAT, body)
        client.leave()
        assert answer.status == 200, answer.body
        return answer.headers["x-request-id"].partition("-")[0]

    async def page(self, number: int, path: str) -> str:
        """A page of one process."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.own_port + number))
        answer = await client.ask("GET", path)
        client.leave()
        return answer.body.decode()

    def pids(self) -> list[int]:
        """Of the processes that serve."""
        found = []
        for entry in descendants(self.process.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if b"spawn_main" in Path(f"/proc/{entry.pid}/cmdline").read_bytes():
                    found.append(entry.pid)
        return found


@contextlib.asynccontextmanager
async def group(
    engine: MockEngine, processes: int, *more: str, own_port: int = 0, log: Path | None = None
) -> AsyncIterator[Group]:
    """own_port: of the first process; 0: a free one. log: gets what they say."""
    assert moonpool.__file__ is not None
    with contextlib.ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("wb"))
        own_port = own_port or stack.enter_context(held_run(processes))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moonpool", "proxy", "--processes", str(processes)),
            *("--policy", "conductor", "--engine", engine.spec.url, "--tokenizer", "none"),
            *("--process-listen", f"127.0.0.1:{own_port}", *more),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": str(Path(moonpool.__file__).parent.parent)},
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            found = re.match(
                r"moonpool proxy: serving on https?://127\.0\.0\.1:(\d+) .*, (\d+) processes$", line
            )
            assert found, line
            assert int(found[2]) == processes
            yield Group(process, int(found[1]), own_port)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@_several
async def test_all_serve_inside_tls(tmp_path: Path) -> None:
    files = Files(tmp_path / "proxy")
    engine = MockEngine("a")
    engine.tls = files.server()
    await engine.start()
    options = ("--tls-cert", files.cert, "--tls-key", files.key, "--engine-tls-ca", files.ca)
    async with group(engine, 2, "--listen", "127.0.0.1:0", *options) as several:
        for port in (several.port, several.own_port, several.own_port + 1):
            reached = await asyncio.open_connection("127.0.0.1", port, ssl=files.client())
            client = Client(*reached)
            assert (await client.ask("POST", CHAT, b'{"model":"m","messages":[]}')).engine == "engine-0"
            client.leave()
        several.process.terminate()
        assert await several.process.wait() == 0
    await engine.stop()


@_several
async def test_a_certificate_that_cannot_be_used_ends_all(tmp_path: Path) -> None:
    """In one sentence, with exit code 2."""
    files = Files(tmp_path / "proxy")
    files.break_cert()
    assert moonpool.__file__ is not None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moonpool", "proxy", "--processes", "2", "--listen", "127.0.0.1:0"),
        *("--engine", "http://127.0.0.1:1", "--tls-cert", files.cert, "--tls-key", files.key),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(moonpool.__file__).parent.parent)},
    )
    _, said = await process.communicate()
    assert process.returncode == 2, said
    assert b"proxy.tls_cert = " in said
    assert b"Traceback" not in said


@_several
async def test_all_serve_know_of_each_other_and_end_together() -> None:
    engine = MockEngine("a")
    goon = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if b"long" not in exchange.body:
            return await exchange.answer(b"{}")
        await exchange.begin_stream()
        await exchange.event("first")
        await goon.wait()
        await exchange.end_stream()

    engine.behave = answer
    await engine.start()
    async with group(engine, 3, "--listen", "127.0.0.1:0") as several:
        served: Counter[str] = Counter()
        while len(served) < 3:
            served.update(await asyncio.gather(*(several.ask() for _ in range(20))))
        # A request in flight at one of them is in the books of the others.
        client = Client(*await asyncio.open_connection("127.0.0.1", several.port))
        await client.request(
            "POST", CHAT, b'{"model":"m","messages":[],"prompt":[1,2],"stream":true,"user":"long"}'
        )
        await client.head()
        for number in range(3):
            while True:
                page = await several.page(number, "/metrics")
                held = re.search(r'^moonpool_proxy_books_requests\{engine="engine-0"\} (\S+)$', page, re.M)
                assert held, page
                connected = re.findall(r"^moonpool_proxy_peer_connected\{.*\} (\S+)$", page, re.M)
                if (float(held[1]), connected) == (1.0, ["1.0", "1.0"]):  # a busy one is silent for a while
                    break
            listen = f"127.0.0.1:{several.own_port + number}"
            while True:  # a page is kept for a second
                data = json.loads(await several.page(number, "/ui/data"))
                said, mine = data["group"], data["engine_rows"][0][data["engine_columns"].index("in_flight")]
                assert (said["number"], said["processes"], said["listen"]) == (number, 3, listen)
                if (said["others"], said["their_requests"] + mine) == (2, 1):
                    break
        pids = several.pids()
        assert len(pids) == 3
        for number in range(3):  # each page is of its own process alone
            page = await several.page(number, "/metrics")
            for name in ("build_info{", "process_resident_memory_bytes ", "process_open_fds "):
                assert page.count(f"\nmoonpool_proxy_{name}") == 1
        several.process.send_signal(signal.SIGTERM)
        await until(lambda: not _takes(several.port))
        assert several.process.returncode is None  # an answer is still running
        goon.set()
        assert (await client.ended()).endswith(b"0\r\n\r\n")
        assert await several.process.wait() == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    await engine.stop()


@_several
@pytest.mark.parametrize("level", ["info", "error"])
async def test_each_says_what_one_process_would(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the time, which of them it is, and as much as log.level says."""
    monkeypatch.setenv("MOONPOOL_LOG_LEVEL", level)
    engine = MockEngine("a")
    await engine.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0", log=tmp_path / "log") as several:
        several.process.send_signal(signal.SIGTERM)
        assert await several.process.wait() == 0
    said = (tmp_path / "log").read_text()
    healthy = re.findall(r"^20[-\d]+ [:,\d]+ INFO moonpool.proxy: process (\d): .* is healthy$", said, re.M)
    assert sorted(healthy) == (["1", "2"] if level == "info" else []), said
    await engine.stop()


@_several
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_all_processes_at_once_cuts_no_answer(number: signal.Signals) -> None:
    """As of a terminal and of a service manager. The first process passes it on, so each of the others hears
    of it twice. When all hear of it again, it is over."""
    engine = MockEngine("a")
    goon = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await (exchange.gone if b"never" in exchange.body else goon).wait()
        await exchange.end_stream()

    engine.behave = answer
    await engine.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0") as several:
        pids = several.pids()
        clients = []
        for user in ("short", "never"):
            client = Client(*await asyncio.open_connection("127.0.0.1", several.port))
            body = {"model": "m", "messages": [], "stream": True, "user": user}
            await client.request("POST", CHAT, json.dumps(body).encode())
            await client.head()
            clients.append(client)
        os.killpg(several.process.pid, number)
        await until(lambda: not _takes(several.port))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it had no client, and has ended
                os.kill(pid, signal.SIGTERM)
        goon.set()
        assert (await clients[0].ended()).endswith(b"0\r\n\r\n")
        assert several.process.returncode is None
        os.killpg(several.process.pid, number)
        await clients[1].ended()
        assert await several.process.wait() == 0
    await engine.stop()


@_several
async def test_all_serve_on_as_not_ready_until_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A take-over in between is a single process's test; signals come to all processes, and once more."""
    monkeypatch.setenv("MOONPOOL_PROXY_STOP_DELAY_S", "1h")
    engine = MockEngine("a")
    await engine.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0") as several:
        os.killpg(several.process.pid, signal.SIGTERM)
        for number in range(2):
            while "this proxy is stopping" not in await several.page(number, "/health"):
                await asyncio.sleep(0.01)
        for _ in range(20):
            await several.ask()
        assert len(several.pids()) == 2
        os.killpg(several.process.pid, signal.SIGTERM)
        assert await several.process.wait() == 0
    await engine.stop()


@_several
async def test_one_that_is_killed_refuses_nobody_and_comes_back(tmp_path: Path) -> None:
    engine = MockEngine("a")
    engine.behave = lambda exchange: exchange.answer(b"{}")
    await engine.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0", log=tmp_path / "log") as several:
        first = set(several.pids())
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        for _ in range(200):
            await several.ask()  # by the other; a connection that nobody took yet is not lost
        await until(lambda: len(several.pids()) == 2 and victim not in several.pids())
        served: set[str] = set()
        while len(served) < 2:
            served.update(await asyncio.gather(*(several.ask() for _ in range(20))))
        # Whoever ends the first process ends all.
        several.process.kill()
        await several.process.wait()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first - {victim}))
    said = (tmp_path / "log").read_text()
    (ended,) = re.findall(r"process (\d) of the proxy ended with -9", said)
    healthy = re.findall(r"process (\d): engine .* is healthy$", said, re.M)
    assert healthy.count(ended) == 2, said  # the same process by the same number
    await engine.stop()


@_several
async def test_who_has_lost_the_first_process_heeds_each_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drains when that is killed; nobody would kill it at a further signal. The last one cleans up."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MOONPOOL_PROXY_DRAIN_S", "10min")
    engine = MockEngine("a")
    goon = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await goon.wait()
        await exchange.event("orphan")
        await exchange.gone.wait()

    engine.behave = answer
    await engine.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0") as several:
        pids = several.pids()
        client = Client(*await asyncio.open_connection("127.0.0.1", several.port))
        await client.request("POST", CHAT, b'{"model":"m","messages":[],"stream":true}')
        await client.head()
        several.process.kill()
        await several.process.wait()
        await until(lambda: not _takes(several.port) and len(living_processes().keys() & pids) == 1)
        (draining,) = living_processes().keys() & pids
        goon.set()
        assert b"orphan" in await client.chunk()
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(draining, signal.SIGTERM)
        await until(lambda: draining not in living_processes())
        assert not list(tmp_path.iterdir())
        client.leave()
    await engine.stop()


@_several
async def test_a_group_takes_over_from_a_group() -> None:
    """By the same command, so all addresses are those of the old one. What it still answers holds up none of
    them, and survives one signal."""
    engine = MockEngine("a")
    goon = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if b"long" in exchange.body:
            await goon.wait()
        await exchange.answer(b"{}")

    async def load() -> None:
        try:
            while True:
                await old.ask()
        except Exception as error:
            failed.append(error)

    failed: list[BaseException] = []
    engine.behave = answer
    await engine.start()
    with held_run(2) as peer_port:
        exchanged = ("--peer-listen", f"127.0.0.1:{peer_port}", "--peer", f"127.0.0.1:{peer_port}")
        async with group(engine, 2, "--listen", "127.0.0.1:0", *exchanged) as old:
            spoke = await _who_speaks_at(peer_port)
            asking = asyncio.ensure_future(load())
            long = asyncio.ensure_future(old.ask(b'{"model":"m","messages":[],"user":"long"}'))
            await until(lambda: any(b"long" in each.body for each in engine.seen))
            same = ("--listen", f"127.0.0.1:{old.port}", *exchanged)
            async with group(engine, 2, *same, "--take-over", own_port=old.own_port) as new:
                assert new.port == old.port
                while spoke & await _who_speaks_at(peer_port):
                    pass
                old.process.send_signal(signal.SIGTERM)  # as of a script that stops what it has replaced
                for number in range(2):
                    assert "moonpool_proxy_requests" in await new.page(number, "/metrics")
                for _ in range(20):
                    await new.ask()
                assert old.process.returncode is None
                goon.set()
                assert await long
                assert await old.process.wait() == 0
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                assert not failed
    await engine.stop()


@_several
async def test_an_address_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert moonpool.__file__ is not None
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "moonpool",
                "proxy",
                "--processes",
                "2",
                "--engine",
                "http://127.0.0.1:9",
            ),
            *("--listen", f"127.0.0.1:{port}"),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(moonpool.__file__).parent.parent)},
        )
        _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode().count("\n") == 1
    assert f"127.0.0.1:{port} is in use" in said.decode()


async def _who_speaks_at(peer_port: int) -> set[str]:
    """The names of both processes, as other proxies hear them."""

    def hear(port: int) -> str:
        with zmq.Context() as context, context.socket(zmq.SUB) as heard:
            heard.setsockopt(zmq.LINGER, 0)
            heard.connect(f"tcp://127.0.0.1:{port}")
            heard.subscribe(b"")
            return decode_head(heard.recv_multipart()[0]).sender

    return set(await asyncio.gather(*(asyncio.to_thread(hear, peer_port + number) for number in range(2))))


def _takes(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@_several
async def test_an_engine_that_registers_at_one_is_there_in_all_and_in_one_that_starts_again() -> None:
    engine, other = MockEngine("a"), MockEngine("b")
    for each in (engine, other):
        await each.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0", "--discovery", "http") as several:
        client = Client(*await asyncio.open_connection("127.0.0.1", several.port))
        body = json.dumps({"instance_id": "b", "url": other.spec.url}).encode()
        assert (await client.ask("POST", "/register", body)).status == 200

        async def everywhere(there: bool) -> None:
            for number in range(2):
                while (other.spec.url in await several.page(number, "/engines")) != there:
                    await asyncio.sleep(0.01)

        await everywhere(True)
        victim = min(several.pids())
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(several.pids()) == 2 and victim not in several.pids())
        while True:  # the new one does not listen yet
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await everywhere(True)
                break
            await asyncio.sleep(0.01)
        client = Client(*await asyncio.open_connection("127.0.0.1", several.port))
        assert (await client.ask("POST", "/unregister", b'{"instance_id": "b"}')).status == 200
        await everywhere(False)
    for each in (engine, other):
        await each.stop()


@_several
async def test_sighup_has_every_process_open_its_access_log_again(tmp_path: Path) -> None:
    log, engine = tmp_path / "access", MockEngine("engine")
    await engine.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0", "--access-log", str(log)) as several:
        files = [tmp_path / f"access.{number}" for number in range(2)]
        await until(lambda: all(file.exists() for file in files))
        for file in files:
            file.rename(f"{file}.old")
        several.process.send_signal(signal.SIGHUP)
        await until(lambda: all(file.exists() for file in files))
        several.process.terminate()
        assert await several.process.wait() == 0
    await engine.stop()


@_several
async def test_sighup_has_every_process_read_the_file_again(tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    file.write_text(ROWS)
    engine = MockEngine("engine")
    await engine.start()
    async with group(engine, 2, "--listen", "127.0.0.1:0", "--clients-file", str(file)) as several:

        async def status(number: int, name: str) -> int:
            client = Client(*await asyncio.open_connection("127.0.0.1", several.own_port + number))
            answer = await client.ask("GET", "/engines", head=shown(name))
            client.leave()
            return answer.status

        assert [await status(number, "watcher") for number in range(2)] == [200, 200]
        file.write_text(ROWS.replace("key-of-watcher", "key-of-another"))
        several.process.send_signal(signal.SIGHUP)
        for number in range(2):
            while await status(number, "watcher") != 401:
                pass
            assert await status(number, "another") == 200
        several.process.terminate()
        assert await several.process.wait() == 0
    await engine.stop()
