"""The node process: its name on the host, its pages, and bad clients on its HTTP port.

The socket and HTTP parts run with a stand-in for the native server; the last tests run the real command.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.core.config import paths
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.service import http_faults, metrics
from moonpool.core.service.listen_addresses import node_addresses
from moonpool.core.service.node import Node, ServerFactory
from moonpool.core.service.node_socket import Claim, hand_over_default, is_served, link_default
from tests.core.http_bed import DEADLINE_S, StandIn, connect, exchange, get, serving, settings


class Failing(StandIn):
    def start(self) -> None:
        raise Unavailable("no memory for the arena", operation="node")


def test_pages(runtime: Path) -> None:
    async def body(node: Node) -> None:
        status, page = await get(node, "/health")
        assert (status, json.loads(page)["status"], json.loads(page)["pid"]) == (200, "ok", os.getpid())
        status, page = await get(node, "/stat")
        assert (status, set(json.loads(page))) == (200, {"name", "pid", "uptime_s", "metrics"})
        token = (runtime / "admin-token").read_text().strip()
        status, page = await get(node, "/stat", f"Authorization: Bearer {token}\r\n")
        stat = json.loads(page)
        assert status == 200
        assert stat["socket"] == str(runtime / "node-default.sock")
        assert stat["tenants"] == {"default": 1 << 20}
        assert (stat["wire"], stat["advertise"], stat["host_id"]) == (
            ["127.0.0.1:4711"],
            "10.0.0.7:4711",
            "h",
        )
        assert stat["metrics"]["objects"] == 3
        assert (await get(node, "/nothing"))[0] == 404

    serving(body, settings(node__advertise="10.0.0.7:0", node__host_id="h"))


def test_metrics_have_names_types_labels_and_cumulative_buckets(runtime: Path) -> None:
    async def body(node: Node) -> None:
        status, page = await get(node, "/metrics")
        assert status == 200
        families = {family.name: family for family in text_string_to_metric_families(page.decode())}
        assert families["moonpool_node_objects"].type == "gauge"
        assert families["moonpool_node_objects"].samples[0].value == 3
        assert families["moonpool_node_objects"].documentation == "Complete objects."
        assert families["moonpool_node_stored"].type == "counter"
        assert families["moonpool_node_stored"].samples[0].name == "moonpool_node_stored_total"
        arenas = {
            sample.labels["tenant"]: sample.value for sample in families["moonpool_node_arena_bytes"].samples
        }
        assert arenas == {"a": 5, "b": 6}
        lookup = families["moonpool_node_lookup_seconds"]
        assert lookup.type == "histogram"
        values = {sample.labels.get("le", sample.name): sample.value for sample in lookup.samples}
        assert values["0.001"] == 2
        assert values["0.01"] == 5
        assert values["+Inf"] == 6
        assert values["moonpool_node_lookup_seconds_sum"] == 0.5

    serving(body)


def test_buckets_that_do_not_fit_their_bounds_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 bounds need 3 counts, not 2"):
        metrics.cumulative([0.1, 0.2], [1, 2])


def test_a_name_without_a_description_gets_one_of_its_own() -> None:
    assert metrics.describe("moons_seen_total") == "Moons seen."


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + b"\r\n", b"400"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"405"),
    ],
    ids=["garbage", "long header", "many headers", "long line", "wrong method"],
)
def test_bad_requests_are_refused_and_others_are_served(
    runtime: Path, request_: bytes, status: bytes
) -> None:
    async def body(node: Node) -> None:
        assert (await exchange(node, request_)).split(b" ", 2)[1] == status
        assert (await get(node, "/health"))[0] == 200

    serving(body)


def test_a_connection_ends_after_one_answer(runtime: Path) -> None:
    async def body(node: Node) -> None:
        twice = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2
        assert (await exchange(node, twice)).count(b"HTTP/1.1 200") == 1

    serving(body)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"]
)
def test_an_idle_or_half_request_is_cut_off_at_its_deadline(runtime: Path, sent: bytes) -> None:
    async def body(node: Node) -> None:
        began = asyncio.get_running_loop().time()
        await exchange(node, sent)
        assert asyncio.get_running_loop().time() - began < 5.0  # without the setting it is 10 s
        assert (await get(node, "/health"))[0] == 200

    serving(body, settings(node__http_timeout_s=0.2))


def test_too_many_connections_close_the_oldest_and_newcomers_are_served(runtime: Path) -> None:
    async def body(node: Node) -> None:
        idle = [await connect(node) for _ in range(8)]
        assert (await get(node, "/health"))[0] == 200
        with_end = [asyncio.ensure_future(reader.read()) for reader, _ in idle]
        done, pending = await asyncio.wait(with_end, return_when=asyncio.FIRST_COMPLETED)
        assert with_end[0] in done
        assert len(pending) <= 4
        assert node._http is not None
        assert node._http.connections <= 4
        for task in pending:
            task.cancel()
        for _, writer in idle:
            writer.close()

    serving(body, settings(node__http_connections_max=4, node__http_timeout_s=3600))


def test_http_can_be_off(runtime: Path) -> None:
    async def body(node: Node) -> None:
        assert node.http_url is None
        assert is_served(node.socket)

    serving(body, settings(node__http="off"))


def test_an_open_address_needs_a_token_that_somebody_chose(runtime: Path) -> None:
    async def nothing(_node: Node) -> None: ...

    with pytest.raises(
        ConfigError, match=r"ask for no secret: .* cluster.token_file or MOONPOOL_CLUSTER_TOKEN"
    ):
        serving(nothing, settings(node__http="0.0.0.0:0"))
    assert list(runtime.iterdir()) == []
    secret = runtime / "secret"
    secret.touch(0o600)
    secret.write_text("chosen by a person")
    serving(nothing, settings(node__http="0.0.0.0:0", cluster__token_file=str(secret)))


def test_an_address_in_use_is_one_sentence_and_leaves_nothing_behind(runtime: Path) -> None:
    async def nothing(_node: Node) -> None: ...

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"address 127.0.0.1:{port} is in use; choose another with --http"
        ):
            serving(nothing, settings(node__http=f"127.0.0.1:{port}"))
    assert not (runtime / "node-default.sock").exists()
    assert not (runtime / "node.sock").is_symlink()


def test_a_configured_token_stands_beside_the_socket_for_clients(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = runtime / "secret"
    secret.touch(0o600)
    secret.write_text("chosen\n")
    beside = runtime / "node-default.sock.token"

    async def body(node: Node) -> None:
        assert beside.stat().st_mode & 0o777 == 0o600
        assert paths.client_token(node.socket) == b"chosen"
        assert paths.client_token(runtime / "node.sock") == b"chosen"
        monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "of-env")
        assert paths.client_token(node.socket) == b"of-env"
        monkeypatch.delenv("MOONPOOL_CLUSTER_TOKEN")

    async def without(node: Node) -> None:
        assert not beside.exists()
        assert paths.client_token(node.socket) == (runtime / "token").read_bytes().strip()

    serving(body, settings(cluster__token_file=str(secret)))
    assert not beside.exists()
    beside.write_text("of a node that was killed")
    serving(without)


def test_a_claim_removes_sockets_alone(runtime: Path) -> None:
    """Files of an operator that have the names of the streams stay."""
    path = runtime / "node-a.sock"
    for name in (".pub", ".replay"):
        Path(f"{path}{name}").write_text("mine")
    Claim(path).release()
    assert all(Path(f"{path}{name}").read_text() == "mine" for name in (".pub", ".replay"))
    Path(f"{path}.pub").unlink()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{path}.pub")
    Claim(path).release()
    assert not Path(f"{path}.pub").exists()


def test_a_server_that_cannot_start_leaves_nothing_behind(runtime: Path) -> None:
    with pytest.raises(Unavailable, match="no memory"):
        asyncio.run(Node(settings(), make_server=Failing).start())
    assert not (runtime / "node-default.sock").exists()
    Claim(runtime / "node-default.sock").release()


def test_a_tenant_must_not_be_called_default(runtime: Path) -> None:
    from moonpool.core.service.node import tenant_sizes

    assert tenant_sizes(settings(node__tenants={"a": 5})) == [("default", 1 << 20), ("a", 5)]
    with pytest.raises(ConfigError, match="must not name the tenant default"):
        tenant_sizes(settings(node__tenants={"default": 5}))


@contextmanager
def listening(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(runtime: Path) -> None:
    path = runtime / "node-default.sock"
    with (
        listening(path),
        pytest.raises(ConfigError, match=f"another node already serves {path}; choose --name"),
    ):
        Claim(path)
    assert path.is_socket()
    Claim(path).release()
    assert not path.exists()


def test_of_two_that_start_at_once_the_second_is_refused_before_either_listens(runtime: Path) -> None:
    path = runtime / "node-default.sock"
    first = Claim(path)
    with pytest.raises(ConfigError, match="another node already serves"):
        Claim(path)
    first.release()
    Claim(path).release()


def test_a_file_in_the_sockets_place_is_kept(runtime: Path) -> None:
    path = runtime / "node-default.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket; remove it"):
        Claim(path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_not_there(runtime: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot make the socket .*No such file"):
        Claim(runtime / "no" / "node.sock")


def test_the_first_node_makes_the_link_and_only_its_owner_removes_it(runtime: Path) -> None:
    link = paths.default_node_socket()
    first, second = paths.node_socket("first"), paths.node_socket("second")
    with listening(first), listening(second):
        assert link_default(first)
        assert link.readlink() == Path("node-first.sock")
        assert not link_default(second)
        hand_over_default(second)
        assert link.readlink() == Path("node-first.sock")
    hand_over_default(first)
    assert not link.is_symlink()


def test_a_node_that_leaves_hands_the_link_over_to_the_oldest_living_one(runtime: Path) -> None:
    link = paths.default_node_socket()
    first, stale, second, third = (
        paths.node_socket(name) for name in ("first", "a-stale", "second", "third")
    )
    with listening(first):
        assert link_default(first)
        with listening(stale):
            pass
        with listening(third), listening(second):
            for age, path in enumerate((stale, second, third)):
                os.utime(path, (age, age))
            hand_over_default(first)
            assert link.readlink() == Path("node-second.sock")
            hand_over_default(second)
            assert link.readlink() == Path("node-third.sock")
        first.unlink()
        second.unlink()
        hand_over_default(third)
    assert not link.is_symlink()


def test_a_stale_link_is_replaced(runtime: Path) -> None:
    link = paths.default_node_socket()
    link.symlink_to("node-gone.sock")
    second = paths.node_socket("second")
    with listening(second):
        assert link_default(second)
        assert link.resolve() == second.resolve()


def native() -> ServerFactory:
    pytest.importorskip("moonpool._native")
    from moonpool.core.service.node import native_server

    return native_server


def test_the_native_server_has_what_the_node_expects(runtime: Path) -> None:
    made = settings()
    server = native()(made, runtime / "node-x.sock", b"token", node_addresses(made))
    server.start()
    try:
        families = list(text_string_to_metric_families(metrics.exposition(server).decode()))
        assert {family.type for family in families} == {"counter", "gauge", "histogram"}
        names = {metrics.split_labels(name)[0] for name in (*server.metrics(), *server.histograms())}
        assert names <= set(metrics.DESCRIPTIONS), "a metric without a description"
    finally:
        server.stop()


def command(*arguments: str) -> subprocess.Popen[bytes]:
    native()
    return subprocess.Popen(
        [sys.executable, "-m", "moonpool", "node", "--dram", "16MiB", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_and_ends_cleanly(runtime: Path, number: signal.Signals) -> None:
    with command("--http", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith(
            f"moonpool node default: 16.0 MiB of DRAM at {runtime}/node-default.sock, http://"
        )
        assert (runtime / "node.sock").resolve() == (runtime / "node-default.sock").resolve()
        assert process.stderr is not None
        # Told by a thread of its own, which may be later than the ready line.
        reserved = process.stderr.readline().decode()
        assert reserved.endswith("moonpool.node: all 16.0 MiB of memory are reserved\n")
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
        said = process.stderr.read().decode()
        assert "Traceback" not in said
        assert [line.split("moonpool.node: ")[1] for line in said.splitlines()] == ["stopping", "stopped"]
    assert sorted(path.name for path in runtime.iterdir()) == ["admin-token", "node.sock.lock", "token"]


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode()


def test_the_log_level_is_read(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio tells which selector it takes, at level debug only."""
    monkeypatch.setenv("MOONPOOL_LOG_LEVEL", "debug")
    with command("--http", "off") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.terminate()
        assert process.stderr is not None
        assert "DEBUG asyncio: Using selector" in process.stderr.read().decode()
        assert process.wait(DEADLINE_S) == 0


def test_two_nodes_of_one_host_need_only_different_names(runtime: Path) -> None:
    """Whoever comes second finds the default ports taken, and takes free ones."""
    seen: list[str] = []
    with command() as first:
        seen += [line_of(first), os.readlink(runtime / "node.sock")]
        with command("--name", "second") as second:
            seen.append(line_of(second))
            first.terminate()
            seen += [str(first.wait(DEADLINE_S)), os.readlink(runtime / "node.sock")]
            second.terminate()
            seen.append(str(second.wait(DEADLINE_S)))
    assert "http://127.0.0.1:" in seen[0]
    assert "http://127.0.0.1:" in seen[2]
    assert [seen[1], *seen[3:]] == ["node-default.sock", "0", "node-second.sock", "0"]
    assert not (runtime / "node.sock").is_symlink()


def test_a_second_node_of_the_name_exits_2_and_after_kill_9_a_new_one_starts(runtime: Path) -> None:
    with command("--http", "off") as first:
        assert first.stdout is not None
        assert first.stdout.readline()
        with command("--http", "off") as second:
            assert second.stderr is not None
            said = second.stderr.read().decode()
            assert second.wait(DEADLINE_S) == 2
        what = f"moonpool: another node already serves {runtime}/node-default.sock"
        assert said == f"{what}; choose --name, or replace it with --take-over\n"
        first.kill()
        first.wait(DEADLINE_S)
    assert (runtime / "node-default.sock").is_socket()
    with command("--http", "off") as third:
        assert third.stdout is not None
        assert third.stdout.readline()
        assert is_served(runtime / "node.sock")
        third.terminate()
        assert third.wait(DEADLINE_S) == 0


def test_a_node_may_have_more_descriptors_than_the_usual_limit() -> None:
    code = (
        "import resource;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard));"
        "from moonpool.core.service.processes import allow_many_descriptors;"
        "allow_many_descriptors();"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- what strangers can make it write


def test_hostile_requests_and_idle_connections_write_little(
    runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of 1 MiB that is none wrote half of it to the log, and each idle connection beyond the
    limit a traceback."""
    # How many lines may still be written is known to the process, and other tests wrote some a moment ago.
    monkeypatch.setattr(logging.getLogger("moonpool.http"), "filters", [])
    gc.collect()  # what other tests left is heard of here, and not below
    hostile = (b"\xff" * (1 << 20), b"GET /" + b"a" * (1 << 20), b"POST / HTTP/1.1\r\nbad field\r\n\r\n")

    async def body(node: Node) -> None:
        for garbage in hostile:
            reader, writer = await connect(node)
            with suppress(ConnectionError):
                writer.write(garbage)
                await reader.read()
            writer.close()
        idle = await asyncio.gather(*(connect(node) for _ in range(100)))
        assert (await get(node, "/health"))[0] == 200
        for _, writer in idle:
            writer.close()
        answer = await exchange(node, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"Server: moonpool\r\n" in answer
        assert b"aiohttp" not in answer

    caplog.clear()
    with caplog.at_level(logging.INFO):
        serving(body, settings(node__http_connections_max=4))
        gc.collect()  # a task that failed unheard says so when it goes
    said = [logging.Formatter("%(message)s").format(record) for record in caplog.records]
    assert sum(map(len, said)) < 4000, said
    assert not any("Traceback" in text for text in said), said
    assert any("no request that is served" in text for text in said)


def test_too_few_descriptors_are_a_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what other tests left is heard of here, and not below
    caplog.clear()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        http_faults.calm(loop)
        context = {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")}
        for _ in range(1000):
            loop.call_exception_handler(context)
        loop.call_exception_handler({"message": "something else"})

    asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) < 500  # some at once, and one a second
    assert said[0] == "a connection waits: Too many open files; raise the limit of open files"
    assert said[-1] == "something else"
