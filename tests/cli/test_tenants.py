"""`moonpool tenants`, and a node that follows the file which it writes."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.core.config.tenants_file import native_limits, read_tenants

from ..core.store_bed import until

DEADLINE_S = 60


def add(file: Path, name: str, role: str, *options: str) -> Path:
    key = file.with_name(f"{name}-{role}.key")
    arguments = ["tenants", "add", name, "--role", role, "--file", str(file), "--key-file", str(key)]
    assert run([*arguments, *options]) == 0
    return key


def test_a_row_is_added_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.toml"
    key = add(file, "search", "writer")
    file.write_text(file.read_text() + "# a comment of the operator\n")
    add(file, "search", "reader")
    add(file, "chat", "admin", "--no-salt")
    said = capsys.readouterr().out
    rows = read_tenants(str(file))
    assert [(each.name, each.role) for each in rows] == [
        ("search", "writer"),
        ("search", "reader"),
        ("chat", "admin"),
    ]
    assert rows[0].salt == rows[1].salt != ""
    assert rows[2].salt == ""
    assert "# a comment of the operator" in file.read_text()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, key)] == [0o600, 0o600]
    assert key.read_text().strip() == rows[0].keys[0]
    assert run(["tenants", "list", "--file", str(file), "--json"]) == 0
    listed = capsys.readouterr().out
    assert json.loads(listed)[2] == {"name": "chat", "role": "admin", "keys": 1, "salt": False, "limits": {}}
    assert run(["tenants", "list", "--file", str(file)]) == 0
    listed += capsys.readouterr().out
    for each in rows:
        assert each.keys[0] not in said + listed
        assert not each.salt or each.salt not in said + listed


def test_limits_are_set_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.toml"
    add(
        file,
        "search",
        "writer",
        "--dram-min",
        "1GiB",
        "--dram-max",
        "4GiB",
        "--pins-max",
        "512MiB",
        "--bytes-per-s",
        "1GB",
    )
    add(file, "search", "reader", "--ssd-max", "0")  # of the tenant, whichever of its rows has it
    rows = read_tenants(str(file))
    given = {"dram_min": 1 << 30, "dram_max": 4 << 30, "pins_max": 512 << 20, "bytes_per_s": 10**9}
    assert [row.given() for row in rows] == [given, {"ssd_max": 0}]
    assert native_limits(rows) == [("search", 1 << 30, 4 << 30, 0, 512 << 20, 10**9)]
    capsys.readouterr()
    assert run(["tenants", "list", "--file", str(file)]) == 0
    assert "dram_min 1.0 GiB  dram_max 4.0 GiB  pins_max 512.0 MiB" in capsys.readouterr().out
    assert run(["tenants", "list", "--file", str(file), "--json"]) == 0
    assert [row["limits"] for row in json.loads(capsys.readouterr().out)] == [given, {"ssd_max": 0}]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("search", "--role", "reader", "--dram-max", "much"), "--dram-max: 'much' is no size"),
        (
            ("search", "--role", "reader", "--dram-min", "4GiB", "--dram-max", "2GiB"),
            "more than its dram_max",
        ),
        (("search", "--role", "owner"), "it is one of reader, writer, admin"),
        (("search", "--role", "writer"), "has the writer of search already"),
        (("of two words", "--role", "writer"), "is no name of a tenant"),
    ],
)
def test_a_row_that_makes_no_sense_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    file = tmp_path / "tenants.toml"
    add(file, "search", "writer")
    before = file.read_bytes()
    key = tmp_path / "new.key"
    assert run(["tenants", "add", *arguments, "--file", str(file), "--key-file", str(key)]) == 2
    assert why in capsys.readouterr().err
    assert file.read_bytes() == before
    assert not key.exists()
    assert run(["tenants", "list"]) == 2
    assert "set cluster.tenants_file" in capsys.readouterr().err


def test_the_file_keeps_its_owner_and_mode_and_a_link_stays_one(tmp_path: Path) -> None:
    """As an operator adds a row with sudo: the node's user has to read the file after that."""
    file, link = tmp_path / "real" / "tenants.toml", tmp_path / "tenants.toml"
    file.parent.mkdir()
    add(file, "search", "writer")
    link.symlink_to(file)
    owner = (12345, 12346) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    file.chmod(0o400)
    add(link, "search", "reader")
    assert link.is_symlink()
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o400)
    assert [each.role for each in read_tenants(str(file))] == ["writer", "reader"]
    assert [path.name for path in file.parent.iterdir() if path.suffix != ".key"] == ["tenants.toml"]


def test_a_row_waits_for_one_that_is_being_added(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    add(file, "first", "writer")
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another command does that has read the file already
        command = [sys.executable, "-m", "moonpool", "tenants", "add", "second", "--role", "writer"]
        more = ["--file", str(file), "--key-file", str(tmp_path / "second.key")]
        with subprocess.Popen([*command, *more]) as second:
            until(lambda: _waits_for_a_lock(second.pid) or second.poll() is not None, DEADLINE_S)
            assert second.returncode is None
            assert [each.name for each in read_tenants(str(file))] == ["first"]
            row = '[[tenants]]\nname = "other"\nrole = "reader"\nkeys = ["0123456789abcdef"]\n'
            file.write_text(file.read_text() + row)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.wait(DEADLINE_S) == 0
    finally:
        os.close(lock)
    assert [each.name for each in read_tenants(str(file))] == ["first", "other", "second"]


def _waits_for_a_lock(pid: int) -> bool:
    """Whether the kernel lists the process as one that a lock keeps waiting."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(line[1] == "->" and line[5] == str(pid) for line in lines)


def test_a_row_is_added_to_a_file_that_has_none_yet(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("# of the cluster in the north\n")
    file.chmod(0o600)
    add(file, "search", "writer")
    assert file.read_text().startswith("# of the cluster in the north\n")
    assert [each.name for each in read_tenants(str(file))] == ["search"]


def test_a_node_and_its_clients_by_settings_alone(runtime: Path, tmp_path: Path) -> None:
    """The processes as an operator starts them: none of the clients has the cluster token."""
    pytest.importorskip("moonpool._native")
    token, file, settings = tmp_path / "token", tmp_path / "tenants.toml", tmp_path / "moonpool.toml"
    token.write_text("the token of this cluster\n")
    token.chmod(0o600)
    key = add(file, "search", "writer")
    settings.write_text(
        f'[cluster]\ntoken_file = "{token}"\ntenants_file = "{file}"\n'
        '[node]\ndram = "8MiB"\nlisten = "off"\nhttp = "off"\ntenants = { search = "16MiB" }\n'
    )
    moonpool = [sys.executable, "-m", "moonpool"]
    with subprocess.Popen([*moonpool, "node", "--config", str(settings)], stdout=subprocess.PIPE) as node:
        try:
            assert node.stdout is not None
            assert node.stdout.readline()

            def client(key_file: Path | None, *arguments: str) -> subprocess.CompletedProcess[bytes]:
                env = os.environ | (
                    {} if key_file is None else {"MOONPOOL_CLUSTER_TENANT_KEY_FILE": str(key_file)}
                )
                return subprocess.run(
                    [*moonpool, *arguments],
                    input=b"bytes",
                    capture_output=True,
                    timeout=DEADLINE_S,
                    env=env,
                    check=False,
                )

            assert not Path(f"{runtime}/node-default.sock.token").exists()
            assert client(None, "put", "k", "-", "--tenant", "search").returncode != 0
            assert client(key, "put", "k", "-", "--tenant", "search").returncode == 0
            assert client(key, "get", "k", "--tenant", "search").stdout == b"bytes"
            assert client(key, "get", "k").returncode != 0  # of the tenant default
            assert b"role admin" in client(key, "ls", "--tenant", "search").stderr
            admin = add(file, "search", "admin")  # while the node runs
            until(lambda: client(admin, "ls", "--tenant", "search").stdout, DEADLINE_S)
        finally:
            node.terminate()
