"""/livez, /readyz and /health of node and master: what they say is asked of the threads that serve."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.service.node import Node
from moonpool.core.service.probes import Probes
from moonpool.core.store.store import Store
from moonpool.core.store.types import PutStatus

from . import frozen_thread
from .http_bed import StandIn, get, serving, settings
from .master_bed import MasterProcess, environment
from .store_bed import TOKEN, until

DEADLINE_S = 60
# `moonpool`, but the ready line waits as long as this test does for the master's first word. (2 s are enough
# for a user; a machine that pauses takes longer.)
PATIENT = (
    "from moonpool.core.service import node; from moonpool.cli import main; "
    f"node.READY_WAITS_S = {DEADLINE_S}.0; main()"
)


def ask(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def frozen(pid: int, name: str) -> Iterator[None]:
    """Skips the test, with the reason, where the system forbids ptrace."""
    with ExitStack() as stack:
        try:
            stack.enter_context(frozen_thread.frozen(frozen_thread.thread_of(pid, name)))
        except PermissionError as error:
            pytest.skip(str(error))
        yield


def until_status(url: str, status: int) -> Any:
    """The page as soon as it has the status."""
    found: list[Any] = []

    def matches() -> bool:
        code, page = ask(url)
        found[:] = [page]
        return code == status

    until(matches, DEADLINE_S)
    return found[0]


@contextmanager
def node_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`moonpool node`: the process, its ready line and where its pages are. Its log goes to its stdout."""
    command = [sys.executable, "-c", PATIENT, "node", "--dram", "16MiB", "--http", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("moonpool node "), line
            pages = next(w for w in line.replace(";", ",").split(", ") if w.strip().endswith("/metrics"))
            yield process, line, pages.strip().removesuffix("/metrics")
        finally:
            process.kill()


def test_every_reason_is_named(runtime: Path) -> None:
    async def body(node: Node) -> None:
        server = node._server
        assert isinstance(server, StandIn)

        async def page(path: str) -> tuple[int, Any]:
            status, text = await get(node, path)
            return status, json.loads(text)

        for path, good in (
            ("/livez", {"alive": True}),
            ("/readyz", {"ready": True}),
            ("/health", {"status": "ok"}),
        ):
            status, found = await page(path)
            assert status == 200
            assert found.items() >= {**good, "reasons": [], "name": "default"}.items()

        server.state = (False, -1, "the master at 10.0.0.1:7700 refuses connections", 0.0)
        status, found = await page("/readyz")
        assert (status, found["ready"]) == (503, False)
        assert found["reasons"] == ["not joined: the master at 10.0.0.1:7700 refuses connections"]
        assert (await page("/livez"))[0] == 200
        status, found = await page("/health")  # as it always was: 200 while it serves; but not "ok"
        assert (status, found["status"]) == (200, "not ready")

        server.state = (True, 3, "", 60.0)
        assert "has been silent for 60 s" in (await page("/readyz"))[1]["reasons"][0]
        server.state = (True, 3, "", 0.1)
        server.reserved = 1 << 19
        status, found = await page("/readyz")
        assert status == 503
        assert found["reasons"] == ["512.0 KiB of 1.0 MiB of memory are reserved so far"]
        assert found["memory"] == {"reserved_bytes": 1 << 19, "bytes": 1 << 20}

        server.alive = False
        for path, status in (("/livez", 503), ("/readyz", 503), ("/health", 503)):
            code, found = await page(path)
            assert code == status
            assert found["reasons"] == ["the data plane did not answer within 1 s"]
        assert found["status"] == "stuck"

        node._stopping = True
        assert (await page("/livez"))[0] == 200  # to be ended is no reason to be killed
        status, found = await page("/readyz")
        assert (status, found["reasons"]) == (503, ["this process is stopping"])

    serving(body, settings())


def test_a_node_whose_loop_stands_still_says_so(runtime: Path) -> None:
    with node_process() as (process, _, url):
        for thread in ("mp-node", "mp-listener"):
            assert until_status(f"{url}/livez", 200)["alive"]
            with frozen(process.pid, thread):
                page = until_status(f"{url}/livez", 503)
                assert page["reasons"] == ["the data plane did not answer within 1 s"]
                assert ask(f"{url}/readyz")[0] == 503
                assert ask(f"{url}/health")[1]["status"] == "stuck"
            assert until_status(f"{url}/readyz", 200)["ready"]


def test_a_master_whose_loop_stands_still_says_so(runtime: Path) -> None:
    master = MasterProcess()
    try:
        for thread in ("mp-master", "mp-listener"):
            assert until_status(f"{master.http}/livez", 200)["alive"]
            with frozen(master.process.pid, thread):
                assert until_status(f"{master.http}/livez", 503)["alive"] is False
                assert ask(f"{master.http}/health")[1]["status"] == "stuck"
            assert until_status(f"{master.http}/health", 200)["status"] == "ok"
    finally:
        master.close()


def test_a_node_that_is_to_stop_serves_on_as_not_ready(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_NODE_STOP_DELAY_S", "1h")
    with node_process() as (process, _, url):
        until_status(f"{url}/readyz", 200)
        process.send_signal(signal.SIGTERM)
        assert until_status(f"{url}/readyz", 503)["reasons"] == ["this process is stopping"]
        assert ask(f"{url}/livez")[0] == 200
        with Store(token=TOKEN) as store:
            assert store.put(b"key", b"value").status is PutStatus.STORED
            assert store.get(b"key") == b"value"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_a_master_that_is_to_stop_serves_on_as_not_ready(runtime: Path) -> None:
    master = MasterProcess(stop_delay_s=3600)
    try:
        assert ask(f"{master.http}/readyz")[0] == 200
        master.process.send_signal(signal.SIGTERM)
        assert until_status(f"{master.http}/readyz", 503)["reasons"] == ["this process is stopping"]
        assert master.page("/nodes") == {"nodes": []}
        master.process.send_signal(signal.SIGINT)
        assert master.process.wait(DEADLINE_S) == 0
    finally:
        master.close()


def test_a_node_that_is_to_stop_ends_by_itself(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_NODE_STOP_DELAY_S", "100ms")
    with node_process() as (process, _, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_one_question_for_a_loop_that_many_ask_about(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is blocked for an hour must not find an hour of questions."""
    import asyncio

    came = 0
    is_alive = Probes._is_alive

    async def counted(probes: Probes) -> bool:
        nonlocal came
        came += 1
        return await is_alive(probes)

    monkeypatch.setattr(Probes, "_is_alive", counted)

    async def body(node: Node) -> None:
        server = node._server
        assert isinstance(server, StandIn)
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(timeout_s: float) -> bool:
            server.asked += 1
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(DEADLINE_S)
            return True

        server.is_alive = slow  # type: ignore[method-assign]
        asks = [asyncio.create_task(get(node, "/livez")) for _ in range(20)]
        while came < 20 or server.asked == 0:  # one that came after the answer would ask anew
            await asyncio.sleep(0)
        release.set()
        assert [status for status, _ in await asyncio.gather(*asks)] == [200] * 20
        assert server.asked == 1

    serving(body, settings())


# ---- a node that did not join


def test_the_ready_line_the_page_and_status_say_that_no_master_is_there(
    runtime: Path, free_port: int
) -> None:
    with node_process("--master", f"127.0.0.1:{free_port}") as (_, line, url):
        assert f", master 127.0.0.1:{free_port} NOT JOINED: " in line
        assert "refused" in line
        page = until_status(f"{url}/readyz", 503)
        assert page["reasons"][0].startswith("not joined: ")

        def told() -> bool:
            done = subprocess.run(
                [sys.executable, "-m", "moonpool", "status", "--once", "--node-http", url],
                capture_output=True,
                text=True,
                env=environment() | {"COLUMNS": "200"},
                timeout=DEADLINE_S,
                check=False,
            )
            return f"node default has not joined the master at 127.0.0.1:{free_port}: " in done.stdout

        until(told, DEADLINE_S)  # it waits one second for the page


LATE = " in time"  # the master's answer, which a node waits a second for before it connects anew


def says_why_not(line: str, url: str, reason: str) -> None:
    """The ready line names what keeps the node out, and so does its page for as long as it is out."""
    assert "NOT JOINED: " in line
    assert reason in line or LATE in line
    until(lambda: any(reason in each for each in ask(f"{url}/readyz")[1]["reasons"]), DEADLINE_S)


def test_a_wrong_token_and_a_taken_name_are_said_on_both_sides(runtime: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    token = tmp_path / "token"
    token.write_text("another token than the master's\n")
    token.chmod(0o600)
    # A node that stands still for a moment keeps its name.
    patience = {"MOONPOOL_MASTER_SUSPECT_AFTER_S": "60", "MOONPOOL_MASTER_GONE_AFTER_S": "120"}
    with open(log, "w") as errors:
        command = [sys.executable, "-m", "moonpool", "master", "--listen", "127.0.0.1:0", "--http", "off"]
        master = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment() | patience, text=True
        )
    try:
        assert master.stdout is not None
        address = master.stdout.readline().strip().removeprefix("moonpool master at ")
        host = ["--master", address, "--host-id", "one-host"]
        with node_process(*host, "--name", "a") as (_, line, url):
            assert line.rstrip().endswith(f", master {address} joined") or LATE in line
            until_status(f"{url}/readyz", 200)
            with node_process(*host, "--name", "b", "--token-file", str(token)) as (_, line, other):
                says_why_not(line, other, "token is wrong")
            until(lambda: "127.0.0.1:" in log.read_text() and "token is wrong" in log.read_text(), DEADLINE_S)
            place = ["--socket", str(tmp_path / "second.sock")]
            with node_process(*host, "--name", "a", *place) as (_, line, other):
                says_why_not(line, other, "is in the pool already")
        until(lambda: "node a on host one-host is suspect" in log.read_text(), DEADLINE_S)
        said = log.read_text()
        assert "node a on host one-host has joined, as number 0" in said
        assert "the node a on host one-host is in the pool already" in said
        refused = next(row for row in said.splitlines() if "in the pool already" in row)
        assert "WARNING moonpool.master: 127.0.0.1:" in refused
        master.send_signal(signal.SIGTERM)
        assert master.wait(DEADLINE_S) == 0
        assert [row.split("moonpool.master: ")[1] for row in log.read_text().splitlines()][-2:] == [
            "stopping",
            "stopped",
        ]
    finally:
        master.kill()
        master.wait()
        if master.stdout is not None:
            master.stdout.close()


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--name", "evil\x1b[31m"),
        ("--name", "two words"),
        ("--name", "x" * 65),
        ("--host-id", "evil\x1b[31m"),
        ("--host-id", "h" * 257),
    ],
)
def test_a_name_that_does_not_print_is_refused_before_it_runs(
    runtime: Path, tmp_path: Path, option: str, name: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "node", option, name, "--socket", str(tmp_path / "n.sock")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "\x1b" not in done.stderr
