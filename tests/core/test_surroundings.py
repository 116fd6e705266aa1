"""Node, master and proxy in surroundings that are not as they should be: hang-ups, disks that are full or
read-only, locks that are held, variables that mean something else, peers that send what a terminal obeys."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from moonpool import Store
from moonpool.cli import status
from moonpool.core.config import config, foreign_variables, logs, paths
from moonpool.core.errors import ConfigError
from moonpool.core.printable import printable
from moonpool.core.service import node_socket
from moonpool.core.service.cluster import Cluster, ClusterNode
from moonpool.core.service.listen_addresses import listen_address
from moonpool.launch.snapshot import EngineRow, Snapshot

from .master_bed import environment
from .store_bed import until

DEADLINE_S = 60
COMMANDS = {
    "node": ["node", "--dram", "16MiB", "--http", "off", "--listen", "127.0.0.1:0"],
    "master": ["master", "--listen", "127.0.0.1:0", "--http", "off"],
    "proxy": ["proxy", "--listen", "127.0.0.1:0", "--engine", "http://127.0.0.1:1"],
    "proxies": ["proxy", "--listen", "127.0.0.1:0", "--engine", "http://127.0.0.1:1", "--processes", "2"],
    "up": ["up", "--dram", "16MiB"],
}


def moonpool(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | env,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hangup_ends_none_of_them(runtime: Path, tmp_path: Path, command: str) -> None:
    """As log rotation sends it. The log says that it came, and the process ends by SIGTERM as ever."""
    log = tmp_path / "log"
    env = environment() | {"MOONPOOL_UP_PROXY": "false", "MOONPOOL_NODE_HTTP": "off"}
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "moonpool", *COMMANDS[command]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
        )
    try:
        assert process.stdout is not None
        # `up` speaks before it listens to signals; then it says more.
        ready = b"all is up" if command == "up" else b"moonpool "
        assert any(ready in line for line in iter(process.stdout.readline, b""))
        process.send_signal(signal.SIGHUP)
        until(lambda: "SIGHUP" in log.read_text(), DEADLINE_S)
        assert process.poll() is None
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


# ---- the runtime folder


def test_up_goes_on_where_its_own_state_cannot_be_written(runtime: Path) -> None:
    """A full disk ends no engine. Here a folder stands in the file's place."""
    (runtime / "up.json").mkdir()
    env = environment() | {"MOONPOOL_UP_PROXY": "false", "MOONPOOL_NODE_HTTP": "off"}
    command = [sys.executable, "-m", "moonpool", *COMMANDS["up"]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True
    ) as up:
        try:
            assert up.stdout is not None
            said = [up.stdout.readline()]
            while "all is up" not in said[-1]:
                assert said[-1], said
                said.append(up.stdout.readline())
            assert any("up.json is not up to date: Is a directory" in line for line in said)
            up.terminate()
            assert up.wait(DEADLINE_S) == 0
        finally:
            up.kill()


def in_own_mounts(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script in a mount namespace; skips where that is not allowed."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("needs mount namespaces (root)")
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize("command", ["node", "master"])
@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_a_folder_that_takes_nothing_is_one_sentence(tmp_path: Path, command: str, fault: str) -> None:
    place = tmp_path / "run"
    place.mkdir()
    spoil = {
        "read-only": f"mount -o remount,ro {place}",
        "full": f"head -c 1000000 /dev/zero > {place}/fill 2> /dev/null",
    }[fault]
    done = in_own_mounts(
        f"mount -t tmpfs -o size=8k,mode=700 none {place} && {{ {spoil}; "
        f"MOONPOOL_RUNTIME_DIR={place} exec {sys.executable} -m moonpool {' '.join(COMMANDS[command])}; }}"
    )
    assert done.returncode == 2, done.stderr
    assert f"cannot write {place}/" in done.stderr
    assert {"read-only": "Read-only file system", "full": "No space left"}[fault] in done.stderr
    assert "internal error" not in done.stderr


def test_a_lock_that_another_process_keeps_is_waited_for_so_long_only(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_socket, "LOCK_TIMEOUT_S", 0.05)
    lock = runtime / "node.sock.lock"
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process has held .*node\.sock\.lock"):
            node_socket.link_default(runtime / "node-a.sock")
    assert node_socket.link_default(runtime / "node-a.sock")


def test_the_sentence_about_a_folder_of_another_user_reads_well(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(
        ConfigError,
        match=r"belongs to user \d+, not to you \(4711\); run this as that user, or set MOONPOOL_RUN",
    ):
        paths.runtime_dir()


# ---- exit codes


@pytest.mark.parametrize("command", ["node", "master"])
def test_a_taken_port_exits_2_with_the_remedy(runtime: Path, command: str, free_port: int) -> None:
    arguments = ["--listen", f"127.0.0.1:{free_port}", "--http", "off"]
    holder = subprocess.Popen(
        [sys.executable, "-m", "moonpool", "master", *arguments], stdout=subprocess.PIPE, env=environment()
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        small = ["--dram", "16MiB"] if command == "node" else []  # memory that is not there is said first
        done = moonpool(command, *arguments, *small)
        assert done.returncode == 2
        assert f"127.0.0.1:{free_port} cannot be listened on: Address already in use; choose" in done.stderr
        assert "--listen" in done.stderr
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()


def test_a_reader_that_leaves_and_a_full_disk(runtime: Path) -> None:
    command = f"{sys.executable} -m moonpool config schema"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    full = subprocess.run(
        ["sh", "-c", f"{command} > /dev/full"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert full.returncode == 2
    assert "cannot write the output: No space left on device" in full.stderr


# ---- variables


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """warnings(variables): what loading a configuration with them warns of."""

    def load(env: Mapping[str, str]) -> list[str]:
        monkeypatch.setattr(foreign_variables, "_warned", set())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "moonpool.config"):
            config.load(env=env)
        return [record.getMessage() for record in caplog.records]

    return load


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MOONPOOL_TOKEN_FILE", "MOONPOOL_CLUSTER_TOKEN_FILE"),
        ("MOONPOOL_TOKEN", "MOONPOOL_CLUSTER_TOKEN"),
        ("MOONPOOL_DRAM", "MOONPOOL_NODE_DRAM"),
        ("MOONPOOL_LOG", "MOONPOOL_LOG_LEVEL"),
        ("MOONPOOL_MASTER", "MOONPOOL_CLUSTER_MASTER"),
        ("MOONPOOL_MEMORY", "MOONPOOL_NODE_DRAM"),
    ],
)
def test_a_variable_that_nothing_reads_is_named(
    warnings: Callable[..., list[str]], variable: str, meant: str
) -> None:
    assert warnings({variable: "a secret"}) == [
        f"the variable {variable} is no setting of ours and is not read; did you mean {meant}?"
    ]


def test_what_others_of_ours_read_is_not_named(warnings: Callable[..., list[str]]) -> None:
    ours = dict.fromkeys(
        ("MOONPOOL_DEBUG", "MOONPOOL_SGLANG_NODE", "MOONPOOL_TENSORRT_LLM", "MOONPOOL_VLLM_PYTHON", "PATH"),
        "1",
    )
    assert warnings(ours | {"MOONPOOL_SERVICE_HOST": "10.0.0.1"}) == []
    assert len(warnings({"MOONPOOL_IMAGE": "x"})) == 1


def test_the_port_of_a_node_is_called_listen() -> None:
    with pytest.raises(ConfigError, match=r"unknown variable MOONPOOL_NODE_PORT .* MOONPOOL_NODE_LISTEN"):
        config.load(env={"MOONPOOL_NODE_PORT": "7710"})


def test_the_command_says_it_too(runtime: Path) -> None:
    done = moonpool("config", "show", MOONPOOL_TOKEN_FILE="/etc/token")
    assert done.returncode == 0
    assert "MOONPOOL_TOKEN_FILE is no setting of ours" in done.stderr


# ---- tokens and users


def test_a_short_token_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("moonpool.node")
    config.load(env={"MOONPOOL_CLUSTER_TOKEN": "s3cret"}).warn_of_short_token(log)
    assert "can be guessed" in caplog.records[0].getMessage()
    assert "s3cret" not in caplog.records[0].getMessage()
    caplog.clear()
    config.load(env={"MOONPOOL_CLUSTER_TOKEN": "x" * 16}).warn_of_short_token(log)
    config.load(env={}).warn_of_short_token(log)  # ours to make, and long
    assert not caplog.records


@pytest.mark.parametrize("key", ["node.http", "master.http"])
def test_pages_do_not_pretend_to_be_protected_by_a_token(key: str) -> None:
    wanted = config.load(env={}, arguments={key: "0.0.0.0:7711"})
    with pytest.raises(ConfigError, match=r"these pages ask for no secret: keep them on 127\.0\.0\.1:7711"):
        listen_address(wanted, key)


def test_a_socket_of_another_user_is_called_that(runtime: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    folder = runtime / "theirs"
    folder.mkdir(mode=0o700)
    runtime.chmod(0o711)
    script = (
        "import os, sys, moonpool, moonpool.core.config.config, moonpool.core.service.control_tls as _\n"
        "import moonpool.core.store.store, moonpool._native\n"
        "os.setegid(65534); os.seteuid(65534)\n"
        "try: moonpool.Store(sys.argv[1], token=b'x')\n"
        "except moonpool.Error as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder / "node.sock")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "belongs to another user (Permission denied); run this as the user of the node" in done.stdout
    assert done.stderr == ""


# ---- what terminals and logs print

EVIL = "evil\x1b]0;pwned\x07\x1b[31m\r\n[bold]\u202e\x9b"


def evil_snapshot() -> Snapshot:
    node = ClusterNode(EVIL, EVIL, "alive", EVIL, 0.0, 1, 0, 0, 0, 1)
    return Snapshot(
        nodes=[{"name": EVIL, "socket": EVIL, "metrics": {"objects": 1}}],
        cluster=Cluster(EVIL, [node]),
        proxy_url=EVIL,
        proxy_answers=True,
        engines=[EngineRow(EVIL, EVIL, EVIL, EVIL)],
        problems=[EVIL],
    )


def test_status_prints_nothing_that_a_terminal_obeys() -> None:
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=True, color_system=None, markup=False, emoji=False)
    console.print(status.render(evil_snapshot()))
    text = out.getvalue()
    assert "\\x1b]0;pwned\\x07" in text
    assert "[bold]" in text
    assert not any(c in text for c in "\x07\r\u202e\x9b")
    assert "\x1b]" not in text
    assert "\x1b[31m" not in text


def test_printable_keeps_what_prints() -> None:
    assert printable("ordinary text, auch Übergrößen, 中文") == "ordinary text, auch Übergrößen, 中文"
    assert printable("a\nb\x00") == "a\\nb\\x00"
    assert len(printable("x" * 10_000, characters_max=100)) < 150


@pytest.fixture
def log_lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    return lambda: capsys.readouterr().err.splitlines()


def test_a_record_is_one_line_of_a_bounded_length(log_lines: Callable[[], list[str]]) -> None:
    logs.begin("INFO")
    logging.getLogger("moonpool.x").warning("%s", EVIL)
    logging.getLogger("moonpool.x").warning("%s", "\xff" * (1 << 20))
    first, second = log_lines()
    assert first.endswith("WARNING moonpool.x: " + printable(EVIL))
    assert len(second) < 2200


def test_json_on_request(log_lines: Callable[[], list[str]]) -> None:
    logs.set_up(config.load(env={"MOONPOOL_LOG_FORMAT": "json"}))
    logging.getLogger("moonpool.x").warning(EVIL, extra={"event": "join_refused", "peer": "10.0.0.7:1"})
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("moonpool.x").exception("failed")
    first, second = map(json.loads, log_lines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "logger": "moonpool.x",
        "event": "join_refused",
        "peer": "10.0.0.7:1",
        "message": printable(EVIL),
    }
    assert "ValueError: no" in second["traceback"]


# ---- a disk that fails


def test_a_disk_that_takes_no_more_is_logged_with_the_reason(runtime: Path, tmp_path: Path) -> None:
    """Writing fails for the file's size, which the kernel limits from then on."""
    log, disk = tmp_path / "log", tmp_path / "disk"
    disk.mkdir()
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "moonpool", *COMMANDS["node"], "--ssd", f"{disk}:64MiB"],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(),
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
        token = environment()["MOONPOOL_CLUSTER_TOKEN"].encode()
        with Store(token=token, timeout_s=DEADLINE_S) as store:
            numbers = itertools.count()

            def logged() -> bool:
                store.put([f"key {next(numbers)}" for _ in range(8)], [bytes(256 << 10)] * 8)
                return "writing to" in log.read_text()

            until(logged, DEADLINE_S)
        line = next(line for line in log.read_text().splitlines() if "writing to" in line)
        assert f"ERROR moonpool.node: {disk}: writing to {disk} failed: " in line
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
