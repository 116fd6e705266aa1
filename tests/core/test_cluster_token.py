"""The cluster token, and the pool while one secret replaces another: no call fails, and nothing restarts."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest

from moonpool import Store, _native
from moonpool.core.config import paths
from moonpool.core.config.cluster_token import check_token, read_token, secret_after, secrets_of
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.errors import AuthError, ConfigError
from moonpool.core.service.admin_http import bearer_is
from moonpool.core.service.node_socket import Claim
from moonpool.core.store.types import Presence
from tests.token_file import NEW, OLD, STEPS, TokenFile

from .store_bed import MIB, until

HOSTS = ("a", "b", "c")


def test_the_lines_of_a_token_are_one_secret_or_two() -> None:
    assert secrets_of(OLD) == (OLD,)
    assert secrets_of(NEW + b"\r\n\n " + OLD) == (NEW, OLD)
    for whole in (b"short", OLD + b"\n" + NEW + b"\n" + OLD, b"\x01 random bytes \n\xff and some others"):
        assert secrets_of(whole) == (whole,)
    with pytest.raises(ConfigError, match="it holds two secrets, of which one has 4 bytes"):
        check_token(NEW + b"\nslip", "it")
    assert [secret_after(tried, NEW + b"\n" + OLD) for tried in (b"", NEW, OLD)] == [NEW, OLD, NEW]
    assert secret_after(OLD, OLD) == OLD


def test_a_token_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TokenFile(tmp_path / "token")
    token = file.token()
    assert token == OLD
    assert secrets_of(token) == (OLD,)
    file.replace(STEPS[0])
    assert secrets_of(token) == (OLD, NEW)
    assert secrets_of(pickle.loads(pickle.dumps(token))) == (OLD, NEW)
    with caplog.at_level(logging.ERROR):
        for text, mode in ((b"", 0o600), (b"too short", 0o600), (NEW, 0o644)):
            caplog.clear()
            file.replace(text, mode)
            for _ in range(3):
                assert secrets_of(token) == (OLD, NEW)
            assert len(caplog.records) == 1
            assert caplog.records[0].message.endswith("the secrets from before are in use")
        caplog.clear()
        file.path.unlink()
        assert secrets_of(token) == (OLD, NEW)
        assert not caplog.records
    file.replace(NEW, 0o644)
    assert secrets_of(token) == (OLD, NEW)
    file.path.chmod(0o600)
    assert secrets_of(token) == (NEW,)


def test_a_store_opens_by_a_token_whose_file_is_no_good_now(tmp_path: Path) -> None:
    """Later ones of a process as well: it has the secrets of before."""
    cluster = _Cluster(tmp_path)
    for text in (b"", b"too short"):
        cluster.files[-3].replace(text)  # of stores at the host a
        with cluster.store("a") as store:
            assert store.put("key", b"bytes", replace=True)
    cluster.files[-3].path.unlink()
    with cluster.store("a") as store:
        assert bytes(store.get("key")) == b"bytes"
    cluster.close()


def test_a_bearer_is_any_of_the_secrets() -> None:
    assert bearer_is("Bearer one", b"two", b"one")
    assert not bearer_is("Bearer one", b"two", b"three")
    assert not bearer_is("Bearer one")


def test_a_node_tells_its_user_the_token_as_it_is_now(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "token")
    claim = Claim(tmp_path / "node.sock")
    beside = paths.socket_token(claim.path)
    claim.tell_token(file.token())
    assert read_token(beside) == OLD
    file.replace(STEPS[1])
    until(lambda: secrets_of(read_token(beside)) == (NEW, OLD))
    claim.release()
    assert not beside.exists()


class _Cluster:
    """A master, a node on each of three hosts, and a program with a store there: each has its own file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[TokenFile] = []
        self._file("master")
        self.address = "127.0.0.1:0"
        self.master = self._master()
        self.nodes = {host: self._node(host) for host in HOSTS}
        self.tokens = {host: self._file(f"store-{host}").token() for host in HOSTS}
        self.put = 0

    def _file(self, name: str) -> TokenFile:
        self.files.append(TokenFile(self.folder / name))
        return self.files[-1]

    def _master(self) -> _native.MasterServer:
        master = _native.MasterServer(
            [self.address], read_token(self.folder / "master"), master_settings(suspect_after_s=30)
        )
        master.start()
        self.address = master.addresses[0]
        return master

    def _node(self, host: str) -> _native.Server:
        node = _native.Server(
            str(self.folder / f"{host}.sock"),
            [("default", 16 * MIB)],
            self._file(f"node-{host}").token(),
            node_settings(),
            name=host,
            host_id=f"host-{host}",
            listen=["127.0.0.1:0"],
            master=self.address,
        )
        node.start()
        until(lambda: node.metrics()["masters_joined"] == 1)
        return node

    def store(self, host: str) -> Store:
        return Store(str(self.folder / f"{host}.sock"), token=self.tokens[host], timeout_s=20.0)

    def restart_master(self) -> None:
        """All have to prove the token to it anew."""
        self.master.stop()
        self.master = self._master()
        # A node may have yet to hear that the former one is gone.
        until(lambda: [row.member.state for row in self.master.nodes()[1]] == ["alive"] * len(self.nodes))
        for node in self.nodes.values():
            until(lambda node=node: node.membership()[0])

    def use(self) -> None:
        """Puts at one host what is read at the others, small and striped, by clients that begin now."""
        self.put += 1
        small, large = os.urandom(1000), os.urandom(9 * MIB)
        with self.store("a") as a, self.store("b") as b, self.store("c") as c:
            assert a.put(f"small-{self.put}", small)
            assert b.put("large", large, replace=True)
            for each in (b, c):
                until(lambda each=each: each.get(f"small-{self.put}") is not None)
                assert bytes(each.get(f"small-{self.put}")) == small
            for each in (a, c):
                until(lambda each=each: each.get("large") is not None)
                assert bytes(each.get("large")) == large

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop()
        self.master.stop()


def test_no_call_fails_while_one_secret_replaces_another(tmp_path: Path) -> None:
    cluster = _Cluster(tmp_path)
    with cluster.store("a") as stays:
        assert stays.put("kept", b"since the beginning")
        cluster.use()
        for step in STEPS:
            for file in cluster.files:
                file.replace(step)
                if file is cluster.files[len(cluster.files) // 2]:
                    cluster.use()
            cluster.restart_master()
            cluster.use()
            assert bytes(stays.get("kept")) == b"since the beginning"
    refused = [node.metrics()["auth_failures_total"] for node in cluster.nodes.values()]
    assert refused == [0, 0, 0]
    with pytest.raises(AuthError):
        Store(str(tmp_path / "a.sock"), token=OLD)
    cluster.close()


def test_a_large_object_is_read_under_either_secret(tmp_path: Path) -> None:
    """Its manifest is proved by the secret of its time: without that it is a miss, not the manifest."""
    cluster = _Cluster(tmp_path)
    data = os.urandom(9 * MIB)
    with cluster.store("a") as a:
        assert a.put("large", data)
        for file in cluster.files:
            file.replace(STEPS[1])
        with cluster.store("b") as b:
            until(lambda: b.get("large") is not None)
            assert bytes(b.get("large")) == data
            assert b.exists("large") == Presence.HIT
        for file in cluster.files:
            file.replace(STEPS[2])
        with cluster.store("b") as b:
            assert b.get("large") is None
            assert b.get("large", bytearray(len(data))) is None
            assert b.exists("large") == Presence.MISS
            assert b.exists(["large"], pin=True) == ([Presence.MISS], None)
            assert b.put("large", data, replace=True)
            assert bytes(b.get("large")) == data
    cluster.close()
