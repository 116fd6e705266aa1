"""`moonpool put`, `rm`, `stat`, `status` and `config show`, as an operator or a script calls them."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from moonpool.cli import run
from moonpool.cli.status import render
from moonpool.core.service import exit_codes
from moonpool.core.service.cluster import Cluster, ClusterNode
from moonpool.launch.snapshot import Snapshot

from ..core.store_bed import until

DEADLINE_S = 60
# `moonpool`, whose store waits longer than a user's: a machine that pauses is no node that does not answer.
PATIENT = (
    f"from moonpool import Store; Store.__init__.__kwdefaults__['timeout_s'] = {DEADLINE_S}.0; "
    "from moonpool.cli import main; main()"
)
MOONPOOL = [sys.executable, "-c", PATIENT]
StartNode = Callable[[str], Path]


@pytest.fixture
def start_node(runtime: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> Iterator[StartNode]:
    """Starts a real node of that name in this test's runtime folder -> its socket. No proxy is looked for."""
    pytest.importorskip("moonpool._native")
    from moonpool import Store

    monkeypatch.setenv("MOONPOOL_PROXY_LISTEN", f"127.0.0.1:{free_port}")
    monkeypatch.setenv("MOONPOOL_NODE_HTTP", "off")
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "timeout_s", float(DEADLINE_S))
    with ExitStack() as stack:

        def start(name: str) -> Path:
            command = [sys.executable, "-m", "moonpool", "node", "--name", name, "--dram", "16MiB"]
            process = stack.enter_context(
                subprocess.Popen([*command, "--listen", "off"], stdout=subprocess.PIPE)
            )
            stack.callback(process.terminate)
            assert process.stdout is not None
            assert process.stdout.readline()
            return runtime / f"node-{name}.sock"

        yield start


def store(*keys: str) -> None:
    for key in keys:
        put = [*MOONPOOL, "put", key, "-"]
        subprocess.run(put, input=b"bytes", timeout=DEADLINE_S, check=True)


def listed(capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    assert run(["ls", "--json"]) == 0
    return {row["key"] for row in json.loads(capsys.readouterr().out)}


def test_an_empty_prefix_in_a_script_removes_nothing(
    start_node: StartNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`moonpool rm --prefix "$UNSET"` names every object."""
    start_node("default")
    store("a", "b")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(["rm", "--prefix", ""]) == 2
    said = capsys.readouterr().err
    assert "--all" in said
    assert said.count("\n") == 1
    assert listed(capsys) == {"a", "b"}
    assert run(["rm", "--all"]) == 0
    assert listed(capsys) == set()


@pytest.mark.parametrize(("answer", "left"), [("n", {"a"}), ("y", set())])
def test_an_empty_prefix_at_a_terminal_is_asked_about(
    start_node: StartNode, capsys: pytest.CaptureFixture[str], answer: str, left: set[str]
) -> None:
    start_node("default")
    store("a")
    ours, terminal = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        command = [*MOONPOOL, "rm", "--prefix", ""]
        done = subprocess.run(command, stdin=terminal, capture_output=True, timeout=DEADLINE_S, check=False)
    finally:
        os.close(ours)
        os.close(terminal)
    assert b"every object" in done.stdout + done.stderr
    assert done.returncode == (0 if answer == "y" else exit_codes.EXIT_INTERRUPTED)
    assert listed(capsys) == left


def test_a_refused_put_says_why_in_words(start_node: StartNode) -> None:
    start_node("default")
    put = [*MOONPOOL, "put", "big", "-"]
    done = subprocess.run(put, input=bytes(15 << 20), capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode in (1, 2)
    assert b"PutResult" not in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_stat_of_a_key(start_node: StartNode, capsys: pytest.CaptureFixture[str]) -> None:
    start_node("default")
    store("a")
    assert run(["stat", "a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["size"] == 5
    assert [copy["tiers"] for copy in found["copies"]] == [["dram"]]
    assert run(["stat", "nothing"]) == 1
    assert "there is no object nothing" in capsys.readouterr().err


def test_status_shows_each_node_of_the_host_and_its_hit_rate(
    start_node: StartNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sockets = [str(start_node("one")), str(start_node("two"))]
    store("a")  # at the host's first node
    subprocess.run([*MOONPOOL, "get", "a"], timeout=DEADLINE_S, check=True)

    def said(*arguments: str) -> str:
        capsys.readouterr()
        run(["status", *arguments])
        return capsys.readouterr().out

    # Asked until all have answered: a node that needs over a second is left out.
    until(lambda: [node["socket"] for node in json.loads(said("--json"))["nodes"]] == sockets, DEADLINE_S)
    until(lambda: all(word in said("--once") for word in ("one", "two", "100.0%")), DEADLINE_S)
    assert run(["status", "--json"]) == 0
    until(
        lambda: [node["name"] for node in json.loads(said("--node", "two", "--json"))["nodes"]] == ["two"],
        DEADLINE_S,
    )


def test_status_into_a_pipe_ends(start_node: StartNode) -> None:
    start_node("default")
    command = [sys.executable, "-m", "moonpool", "status"]

    def told() -> bool:  # a node that needs over a second to answer has no row
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
        return done.returncode == 0 and b"hit rate" in done.stdout

    until(told, DEADLINE_S)


def test_a_setup_without_a_proxy_does_not_read_as_a_failure(
    start_node: StartNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONPOOL_PROXY_LISTEN")
    start_node("default")
    run(["status", "--json"])
    found = json.loads(capsys.readouterr().out)
    if not found["proxy_answers"]:  # another program of this machine may serve the default port
        assert any(problem.startswith("no proxy on this host") for problem in found["problems"])


def test_a_narrow_terminal_keeps_addresses_whole() -> None:
    node = ClusterNode("n", "host", "alive", "10.20.30.40:77101", 0.0, 1 << 30, 1 << 29, 0, 0, 12)
    console = Console(width=80, file=io.StringIO())
    console.print(render(Snapshot(cluster=Cluster("10.0.0.1:7700", [node]))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "10.20.30.40:77101" in text
    assert "SSD" not in text


def test_config_show_gives_json_values(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_NODE_DRAM", "3GiB")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "0123456789abcdef0123456789abcdef")
    assert run(["config", "show", "--json"]) == 0
    values = {row["key"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert values["node.dram"] == "3GiB"
    assert values["node.parts_max"] == 4096
    assert values["up.engine"] == []
    assert values["cluster.token"] == "(set)"


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_as_an_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    import moonpool

    assert run([option]) == 0
    assert capsys.readouterr().out == f"moonpool {moonpool.__version__}\n"


@pytest.mark.parametrize(
    ("node", "command"),
    [
        ([], "moonpool node\n"),
        (["--node", "nope"], "moonpool node --name nope\n"),
        (["--node", "/tmp/of-mine"], "moonpool node --socket /tmp/of-mine\n"),
    ],
)
def test_where_no_node_is_the_command_that_starts_one(
    node: list[str], command: str, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("moonpool._native")
    assert run(["ls", *node]) == exit_codes.EXIT_UNAVAILABLE
    assert capsys.readouterr().err.endswith(f"start one with: {command}")


@pytest.mark.parametrize(
    ("command", "default"), [("node", "1GiB"), ("master", "127.0.0.1:7700"), ("proxy", "127.0.0.1:8080")]
)
def test_help_shows_the_defaults_of_settings(
    command: str, default: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run([command, "--help"]) == 0
    assert f"[default: ({default})]" in capsys.readouterr().out


def test_the_shell_completes_commands_and_options() -> None:
    for words, expected in (("moonpool no", "node"), ("moonpool node --dr", "--dram")):
        typed = {
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "_MOONPOOL_COMPLETE": "complete_bash",
        }
        done = subprocess.run(
            [str(Path(sys.executable).with_name("moonpool"))],
            env=os.environ | typed,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.stdout.split() == [expected], done.stderr


@pytest.mark.parametrize("command", ["ls", "rm"])
def test_help_shows_the_whole_pattern(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich takes [abc] for a style."""
    monkeypatch.setenv("COLUMNS", "160")
    assert run([command, "--help"]) == 0
    assert "[abc]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("proxy: no engine", "moonpool proxy: no engine"),
        ("moonpool proxy: no engine", "moonpool proxy: no engine"),
        ("mock-engine: no port", "moonpool mock-engine: no port"),
        ("moonpool: a token", "moonpool: a token"),
        ("a token", "moonpool: a token"),
    ],
)
def test_errors_begin_alike(message: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    from moonpool.core.errors import ConfigError

    def fail() -> None:
        raise ConfigError(message, operation="config")

    assert exit_codes.guarded(fail) == 2
    assert capsys.readouterr().err == f"{shown}\n"


def test_a_usage_error_names_the_command_as_it_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate"]) == 2
    assert capsys.readouterr().err.startswith("moonpool simulate: missing argument")
