"""The command line: help, exit codes, one sentence for what is wrong, and the objects by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.core.config.sections import SECTIONS
from moonpool.core.config.setting import settings_of
from moonpool.core.errors import AuthError, ConfigError, Error, InvalidArgument, Timeout, Unavailable
from moonpool.core.service.exit_codes import guarded
from moonpool.disagg_proxy.conductor.policy import POLICIES

from ..core.store_bed import until

DEADLINE_S = 30
COMMANDS = [
    ["node"],
    ["proxy"],
    ["up"],
    ["down"],
    ["logs"],
    ["status"],
    ["saved"],
    ["topology"],
    ["doctor"],
    ["drain"],
    ["put"],
    ["get"],
    ["ls"],
    ["rm"],
    ["stat"],
    ["bench"],
    ["bench", "transfer"],
    ["bench", "store"],
    ["bench", "serve"],
    ["replay"],
    ["plan"],
    ["config"],
    ["config", "show"],
    ["config", "schema"],
    ["vllm"],
    ["version"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_has_help_with_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example" in text
    assert " ".join(["moonpool", *command]) in text.split("Example", 1)[1]


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        ("proxy", ["Engines", "Address", "Choice of an engine", "Admission", "Several processes", "Access"]),
        ("simulate", ["Load", "Instances", "Proxies", "Objective and admission", "Question and answer"]),
    ],
)
def test_many_options_are_shown_in_groups(
    command: str, groups: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert [text.index(f"─ {group}") for group in groups] == sorted(text.index(f"─ {g}") for g in groups)
    own = text.split("─ Options ", 1)[1].split("╰", 1)[0]
    assert [line.split()[1] for line in own.splitlines() if "--" in line] == (
        ["--config", "--token-file", "--help"] if command == "proxy" else ["--help"]
    )


def test_the_help_of_all_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command[0] in text


def test_the_help_of_the_proxy_names_each_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["proxy", "--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in POLICIES if name not in text] == []
    assert "moonpool proxy --policy" in text


@pytest.mark.parametrize("settings", [False, True])
def test_help_loads_nothing_heavy_and_settings_for_a_command_alone(settings: bool) -> None:
    arguments = ["node", "--help"] if settings else ["--help"]
    program = (
        f"import sys\nfrom moonpool.cli import run\nassert run({arguments}) == 0\n"
        "heavy = {'aiohttp', 'torch', 'vllm', 'numpy', 'uvloop', 'prometheus_client', 'moonpool._native'}\n"
        f"assert ('moonpool.core.config.sections' in sys.modules) == {settings}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=DEADLINE_S, check=True
    )
    assert done.stderr.decode() == "[]\n"


@pytest.mark.parametrize("command", ["node", "master", "proxy"])
def test_an_option_says_of_its_setting_what_the_configuration_says(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    for each in settings_of(SECTIONS[command]):
        if each.name == "listen":
            assert each.help[1:] in text
            assert f"[default: ({each.default})]" in text


def test_without_a_command_the_help_is_printed_and_the_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("Usage: moonpool") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["node", "--dramm", "1GiB"], "no such option: --dramm; did you mean --dram?"),
        (["statuss"], "no such command 'statuss'. Did you mean 'status'"),
        (["config", "shwo"], "no such command 'shwo'. Did you mean 'show'"),
        (["put", "key"], "missing argument 'FILE|-'"),
        (["put", "key", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["ls", "--limit", "0"], "invalid value for '--limit'"),
        (["node", "--dram", "lots"], "node.dram = 'lots' (argument --dram) is wrong"),
        (["node", "--http", "7711"], "node.http = '7711' is no address; write host:port"),
        (["node", "--config", "/no/such.toml"], "cannot read the config file /no/such.toml"),
        (["proxy"], "a proxy needs at least one engine"),
        (["proxy", "--engine", "ftp://x"], "an engine's URL looks like http://host:port"),
        (["proxy", "--engine", "http://a:1", "--listen", "0.0.0.0:1"], "give --api-keys-file with keys"),
        (["proxy", "--engine", "http://a:1", "--process-listen", "0.0.0.0:1"], "or --open where a gateway"),
        (["proxy", "--engine", "http://a:1", "--listen", "x:1", "--port", "2"], "exclude each other"),
        (["up"], "there is no engine to start"),
        (["up", "--model", "m", "--engines", "0"], "invalid value for '--engines'"),
        (["ls", "--token-file", "/no/such"], "cannot read the cluster token file /no/such"),
        (["bench", "transfer", "--direction", "up"], "--direction is read or write, not up"),
        (["bench", "transfer", "--serve", "--connect", "x:1"], "exclude each other"),
        (["bench", "transfer", "--size", "4Kib,lots"], "--size: 'lots' is no size"),
        (["bench", "transfer", "--working-set", "0"], "--working-set must be above 0"),
        (["bench", "transfer", "--size", "1GiB"], "raise --working-set"),
        (["bench", "transfer", "--serve", "--listen", "0.0.0.0:0"], "which needs a cluster token"),
        (["bench", "store", "--verb", "put,fetch"], "--verb knows put, get, exists, longest_prefix"),
        (["bench", "store", "--node", "n", "--embedded"], "exclude each other"),
        (["bench", "store", "--embedded", "--size", "1GiB"], "do not fit into a quarter"),
        (["vllm", "serve", "m", "--kv-role", "kv_bth"], "did you mean kv_both?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_called_wrongly_is_one_sentence_and_code_2(
    runtime: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence.lower() in captured.err.lower()
    assert captured.err.startswith("moonpool")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["node", "--dram", "16MiB", "--listen", "0.0.0.0:0"],
        ["node", "--dram", "16MiB", "--events", "tcp://0.0.0.0:5557"],
        ["master", "--listen", "0.0.0.0:0"],
        ["proxy", "--engine", "http://127.0.0.1:1", "--peer-listen", "0.0.0.0:7000"],
        ["bench", "transfer", "--serve", "--listen", "0.0.0.0:0"],
        ["up", "--model", "m", "--config", "{up}"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_short_token_beyond_loopback_is_one_sentence_and_code_2(
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "fifteen letters")
    up = tmp_path / "up.toml"
    up.write_text('[node]\nlisten = "0.0.0.0:0"\n')
    assert run([argument.format(up=up) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = (line for line in captured.err.splitlines() if " WARNING " not in line)
    assert "the cluster token has 15 bytes, where fewer than 16 can be guessed" in sentence
    assert "openssl rand -hex 32" in sentence


def test_a_short_token_on_loopback_is_a_warning(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "fifteen letters")
    command = [sys.executable, "-m", "moonpool", "master", "--listen", "127.0.0.1:0", "--http", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("moonpool master at 127.0.0.1:")
        process.terminate()
        assert "fewer than 16 characters" in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (InvalidArgument("x"), 2),
        (AuthError("x"), 2),
        (Unavailable("x"), 3),
        (Timeout("x"), 3),
        (Error("x"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_of_errors(error: BaseException, code: int) -> None:
    def fail() -> object:
        raise error

    assert guarded(fail) == code


def test_our_own_mistakes_are_told_apart_and_shown_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> object:
        raise KeyError("k")

    monkeypatch.delenv("MOONPOOL_DEBUG", raising=False)
    assert guarded(fail) == 70
    said = capsys.readouterr().err
    assert said == "moonpool: internal error: KeyError: 'k'; MOONPOOL_DEBUG=1 shows where\n"
    monkeypatch.setenv("MOONPOOL_DEBUG", "1")
    assert guarded(fail) == 70
    assert "Traceback" in capsys.readouterr().err


def test_config_show_tells_value_and_origin(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = runtime / "m.toml"
    file.write_text('[node]\nname = "n"\n')
    monkeypatch.setenv("MOONPOOL_NODE_DRAM", "3GiB")
    assert run(["config", "show", "--config", str(file)]) == 0
    lines = [line.split("#") for line in capsys.readouterr().out.splitlines()]
    shown = {line[0].strip(): line[1].strip() for line in lines}
    assert shown['node.dram = "3GiB"'] == "environment MOONPOOL_NODE_DRAM"
    assert shown['node.name = "n"'] == f"file {file}"
    assert shown["node.parts_max = 4096"] == "default"
    assert run(["config", "show", "--json"]) == 0
    assert {"key": "node.dram", "value": "3GiB", "origin": "environment MOONPOOL_NODE_DRAM"} in json.loads(
        capsys.readouterr().out
    )


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    assert "node" in json.loads(capsys.readouterr().out)["properties"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import moonpool

    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"moonpool {moonpool.__version__}\n"


@pytest.mark.parametrize("command", [["get", "k"], ["ls"], ["rm", "k"], ["stat"], ["status", "--once"]])
def test_without_a_node_the_code_is_3(
    runtime: Path, capsys: pytest.CaptureFixture[str], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moonpool._native")
    monkeypatch.setenv("MOONPOOL_NODE_HTTP", "127.0.0.1:9")
    monkeypatch.setenv("MOONPOOL_PROXY_LISTEN", "127.0.0.1:9")
    assert run(command) == 3
    captured = capsys.readouterr()
    assert "node" in captured.out + captured.err


@pytest.fixture
def node(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real node; its runtime folder. Stores of this process have patience with a machine that pauses."""
    pytest.importorskip("moonpool._native")
    from moonpool import Store

    monkeypatch.setitem(Store.__init__.__kwdefaults__, "timeout_s", float(DEADLINE_S))
    arguments = ["--dram", "16MiB", "--http", "off"]
    with subprocess.Popen(
        [sys.executable, "-m", "moonpool", "node", *arguments], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield runtime
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_objects_by_hand(node: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    content = bytes(range(256)) * 100
    file, copy = node / "in.bin", node / "out.bin"
    file.write_bytes(content)
    assert run(["put", "a/b", str(file)]) == 0
    assert run(["put", "a/b", str(file)]) == 1
    assert b"is there already, and stays" in capfdbinary.readouterr().err
    assert run(["put", "a/b", str(file), "--replace"]) == 0
    assert run(["get", "a/b", "-o", str(copy)]) == 0
    assert copy.read_bytes() == content
    capfdbinary.readouterr()
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "get", "a/b"], capture_output=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout == content
    assert run(["ls"]) == 0
    assert capfdbinary.readouterr().out.split() == [b"25600", b"a/b"]
    assert run(["ls", "x", "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out) == []
    assert run(["ls", "--namespace", "other"]) == 0
    assert capfdbinary.readouterr().out == b""
    assert run(["stat", "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["objects"] == 1
    assert run(["rm", "a/b", "nothing"]) == 1
    assert b"there is no object nothing" in capfdbinary.readouterr().err
    assert run(["get", "a/b"]) == 1
    assert capfdbinary.readouterr().err == b"moonpool get: there is no object a/b\n"


def test_put_reads_standard_input_and_refuses_what_is_too_large(
    node: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put = [sys.executable, "-m", "moonpool", "put"]
    done = subprocess.run(
        [*put, "k", "-"], input=b"hello", capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0
    large = subprocess.run(
        [*put, "big", "-"], input=bytes(5 << 20), capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert large.returncode in (1, 2)
    assert large.stderr.count(b"\n") == 1
    assert b"Traceback" not in large.stderr

    def told() -> bool:  # a node that needs over a second to answer is left out
        return run(["status", "--once"]) == 0 and "node-default.sock" in capfd.readouterr().out

    until(told, DEADLINE_S)


def test_a_wrong_token_is_code_2(
    node: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "wrong")
    assert run(["ls"]) == 2
    assert "token" in capfd.readouterr().err
