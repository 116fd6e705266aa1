"""The runtime folder, socket names and the token."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moonpool.core.config import paths
from moonpool.core.errors import ConfigError


def test_the_folder_is_made_on_demand_and_private(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runtime / "deep" / "er"
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(folder))
    assert paths.runtime_dir() == folder
    assert not folder.exists()
    assert paths.runtime_dir(ensure=True) == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("uid", "xdg", "expected"),
    [(0, "/x", "/run/moonpool"), (7, "/x", "/x/moonpool"), (7, "", "/tmp/moonpool-7")],
)
def test_the_folder_without_an_override(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, uid: int, xdg: str, expected: str
) -> None:
    monkeypatch.delenv("MOONPOOL_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", xdg)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert paths._runtime_path() == Path(expected)


def test_a_folder_that_others_may_enter_is_refused_with_the_remedy(runtime: Path) -> None:
    runtime.chmod(0o755)
    with pytest.raises(ConfigError, match=f"chmod 700 {runtime}"):
        paths.runtime_dir()


def test_a_folder_of_another_user_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        paths.runtime_dir()


def test_a_file_in_the_folders_place_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime / "file").write_text("")
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(runtime / "file"))
    with pytest.raises(ConfigError, match=r"is not a folder|cannot create"):
        paths.runtime_dir(ensure=True)


def test_sockets_have_the_nodes_name(runtime: Path) -> None:
    assert paths.node_socket("a.b-1") == runtime / "node-a.b-1.sock"
    assert paths.default_node_socket() == runtime / "node.sock"


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-a", "a" * 65, "a b"])
def test_a_name_that_makes_no_file_name_is_refused(runtime: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="node name"):
        paths.node_socket(name)


def test_a_path_too_long_for_a_socket_is_refused_before_it_is_bound(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(runtime / ("x" * 100)))
    with pytest.raises(ConfigError, match="a Unix socket takes 107"):
        paths.node_socket("default")


def test_the_token_is_made_once_private_and_random(runtime: Path) -> None:
    token = paths.read_or_create_token(env={})
    assert len(token) == 64
    int(token, 16)
    assert (runtime / "token").stat().st_mode & 0o777 == 0o600
    assert paths.read_or_create_token(env={}) == token
    assert [path.name for path in runtime.iterdir()] == ["token"]


def test_all_who_come_at_once_get_the_same_whole_token(runtime: Path) -> None:
    gate = threading.Barrier(16)
    seen: list[bytes] = []

    def come() -> None:
        gate.wait()
        seen.append(paths.read_or_create_token(env={}))

    threads = [threading.Thread(target=come) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 16
    assert len(set(seen)) == 1
    assert len(seen[0]) == 64


def test_a_reader_between_creation_and_content_cannot_be(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name appears only by link(), when the content is whole."""
    sizes: list[int] = []
    link = os.link

    def spying_link(source: Path, target: Path) -> None:
        assert not target.exists()
        sizes.append(Path(source).stat().st_size)
        link(source, target)

    monkeypatch.setattr(os, "link", spying_link)
    paths.read_or_create_token(env={})
    assert sizes == [65]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_file_that_others_can_read_is_refused(runtime: Path, mode: int) -> None:
    file = runtime / "secret"
    file.write_text("s3cret")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        paths.read_token(file)


def test_a_token_file_that_is_empty_missing_or_endless_is_refused(runtime: Path) -> None:
    file = runtime / "secret"
    with pytest.raises(ConfigError, match=f"cannot read the cluster token file {file}: No such file"):
        paths.read_token(file)
    file.touch(0o600)
    file.write_text(" \n")
    with pytest.raises(ConfigError, match=f"{file} is empty"):
        paths.read_token(file)
    file.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        paths.read_token(file)


def test_where_the_token_comes_from(runtime: Path) -> None:
    file = runtime / "secret"
    file.touch(0o600)
    file.write_text("from-file\n")
    assert paths.read_or_create_token(file, env={}) == b"from-file"
    assert paths.read_or_create_token(env={"MOONPOOL_CLUSTER_TOKEN": "direct"}) == b"direct"
    assert paths.read_or_create_token(env={"MOONPOOL_CLUSTER_TOKEN_FILE": str(file)}) == b"from-file"
    with pytest.raises(ConfigError, match="unset one of them"):
        paths.read_or_create_token(
            env={"MOONPOOL_CLUSTER_TOKEN": "direct", "MOONPOOL_CLUSTER_TOKEN_FILE": str(file)}
        )
    with pytest.raises(ConfigError, match="MOONPOOL_CLUSTER_TOKEN is empty"):
        paths.read_or_create_token(env={"MOONPOOL_CLUSTER_TOKEN": " "})
