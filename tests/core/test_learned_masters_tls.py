"""A master at an address that a node or client learned is dialed inside TLS by the settings that hold for
those in cluster.master, and its certificate is checked by the same rules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from moonpool import _native
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.errors import Error
from moonpool.core.service.control_tls import control_client, control_server

from .store_bed import MIB, TOKEN, until
from .tls_bed import control, made, pem

__all__ = ["control", "pem"]


class Pool:
    """An owner, whose address alone node and client are given, its standby, and both of them. All are at
    127.0.0.1. ``owner`` and ``standby`` are [cluster] of their ports, ``caller`` of all that dial."""

    def __init__(
        self,
        at_end: ExitStack,
        socket: Path,
        *,
        owner: dict[str, str],
        standby: dict[str, str],
        caller: dict[str, str],
    ) -> None:
        tls = control_client(made(caller))
        self.owner = self.master(owner)
        self.owner.start()
        at_end.callback(self.owner.stop)
        address = self.owner.addresses[0]
        self.standby = self.master(standby, standby_of=address, owner_tls=tls)
        self.standby.start()
        at_end.callback(self.standby.stop)
        until(lambda: self.owner.standby()[2])  # it is whole
        self.node = _native.Server(
            str(socket), [("default", 16 * MIB)], TOKEN, node_settings(), master=address, tls=tls
        )
        self.node.start()
        at_end.callback(self.node.stop)
        self.client = _native.DirectoryClient(address, TOKEN, timeout_s=5.0, tls=tls)
        at_end.callback(self.client.close)
        until(lambda: self.metric("master_joined") == 1)
        until(lambda: self.metric("masters_learned") == 1)
        assert [row.name for row in self.client.members(fresh=True)[1]] == ["default"]

    @staticmethod
    def master(cluster: dict[str, str], **options: Any) -> _native.MasterServer:
        tls = control_server(made(cluster))
        return _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings(), tls=tls, **options)

    def metric(self, name: str) -> int:
        return self.node.metrics()[name]

    def fail_over(self) -> None:
        self.owner.stop()
        until(self.standby.take_over)

    def client_finds_the_standby(self) -> bool:
        try:
            return len(self.client.members(fresh=True)[1]) == 1
        except Error:
            return False


@pytest.mark.parametrize("by_name", [False, True])
def test_a_learned_master_is_joined_and_asked_inside_tls(
    runtime_dir: Path, control: dict[str, str], pem: Callable[[str], str], by_name: bool
) -> None:
    """By its address, or by cluster.tls_name, which holds for all masters."""
    elsewhere = {"tls_cert": pem("master-elsewhere"), "tls_name": "master.example"}
    settings = control | (elsewhere if by_name else {})
    with ExitStack() as at_end:
        pool = Pool(at_end, runtime_dir / "n.sock", owner=settings, standby=settings, caller=settings)
        until(lambda: pool.metric("masters_joined") == 2)
        pool.fail_over()
        until(pool.client_finds_the_standby)


@pytest.mark.parametrize("kind", ["for another name", "of another authority", "in plain"])
def test_a_learned_master_that_cannot_show_the_certificate_is_not_joined(
    runtime_dir: Path, control: dict[str, str], pem: Callable[[str], str], kind: str
) -> None:
    standby = (
        control
        | {
            "for another name": {"tls_cert": pem("master-elsewhere")},
            "of another authority": {"tls_cert": pem("common-name")},
            "in plain": {"tls_control": "off"},
        }[kind]
    )
    with ExitStack() as at_end:
        pool = Pool(at_end, runtime_dir / "n.sock", owner=control, standby=standby, caller=control)

        def refused() -> int:
            counted = pool.standby.metrics()
            return counted["auth_failures_total"] + counted["protocol_errors_total"]

        until(lambda: refused() > 2)  # each is a try of the node's
        assert pool.metric("masters_joined") == 1
        assert pool.standby.nodes()[1] == []
        pool.fail_over()
        before = refused()
        assert not pool.client_finds_the_standby()
        until(lambda: refused() > before + 2)
        assert pool.metric("masters_joined") == 0
        assert pool.standby.nodes()[1] == []
