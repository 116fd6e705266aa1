"""`moonpool tenants`, and a node that follows the file which it writes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.core.config.tenants_file import read_tenants

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
    assert json.loads(listed)[2] == {"name": "chat", "role": "admin", "keys": 1, "salt": False}
    assert run(["tenants", "list", "--file", str(file)]) == 0
    listed += capsys.readouterr().out
    for each in rows:
        assert each.keys[0] not in said + listed
        assert not each.salt or each.salt not in said + listed


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
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
