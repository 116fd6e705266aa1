"""The transfer engine between two hosts, by `moonpool bench transfer`: the bytes go over TCP and arrive
whole; a cable that is out for 3 s costs 3 s, one that is out for ever an error that says so."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from .hosts import Host, Network, Process

TOKEN = {"MOONPOOL_CLUSTER_TOKEN": "the token of these hosts"}
PORT = 7720
MARGIN = 5  # times what is promised: real processes on a busy machine


@pytest.fixture
def hosts(network: Network) -> tuple[Host, Host]:
    return network.host("client"), network.host("server")


def serve(server: Host) -> str:
    """A bench server; its address."""
    address = f"{server.address}:{PORT}"
    process = server.moonpool(
        *("bench", "transfer", "--serve", "--listen", address, "--memory", "16MiB"), name="serve", **TOKEN
    )
    process.said("moonpool bench transfer --connect")
    return address


def measure(client: Host, address: str, *options: object) -> Process:
    arguments = ("bench", "transfer", "--connect", address, "--working-set", "16MiB", "--json", "-")
    return client.moonpool(*arguments, *options, name="measure", **TOKEN)


def row_of(process: Process) -> dict[str, Any]:
    found = re.search(r"^\{.*^\}", process.text(), re.MULTILINE | re.DOTALL)
    assert found, process.text()
    (row,) = json.loads(found[0])["rows"]
    return dict(row)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_between_two_hosts(hosts: tuple[Host, Host], direction: str) -> None:
    """One boot id and one kernel: only what can be proved counts, and shared memory cannot."""
    client, server = hosts
    process = measure(client, serve(server), "--seconds", 1, "--direction", direction, "--verify")
    assert process.wait(60) == 0, process.text()
    row = row_of(process)
    print({name: row[name] for name in ("gb_per_s", "p50_us", "cpu_s_per_gb", "peer_cpu_s_per_gb")})
    assert row["transport"] == "tcp"
    assert row["bytes"] > 0
    assert row["verified_bytes"] >= min(row["bytes"], 16 << 20)


def test_another_token(hosts: tuple[Host, Host]) -> None:
    client, server = hosts
    address = serve(server)
    process = client.moonpool(
        *("bench", "transfer", "--connect", address), name="guess", MOONPOOL_CLUSTER_TOKEN="a guess"
    )
    assert process.wait(60) == 2
    assert "token" in process.text()


def test_a_cable_that_is_out_for_three_seconds(network: Network, hosts: tuple[Host, Host]) -> None:
    client, server = hosts
    process = measure(client, serve(server), "--seconds", 6, "--verify")
    process.said(r"\d s .*operations/s")
    network.unplug(server)
    time.sleep(3)  # the outage itself: there is no event for its length
    network.plug(server)
    assert process.wait(60) == 0, process.text()
    row = row_of(process)
    print(process.text())
    assert row["verified_bytes"] >= row["bytes"] > 0


def test_a_cable_that_is_out_for_ever(network: Network, hosts: tuple[Host, Host]) -> None:
    client, server = hosts
    address = serve(server)
    process = measure(client, address, "--seconds", 120)
    process.said(r"\d s .*operations/s")
    network.cut((client, server))
    began = time.monotonic()
    assert process.wait(5 * MARGIN) == 3, process.text()
    print(f"noticed after {time.monotonic() - began:.1f} s (promised: 5 s)")
    last = process.text().splitlines()[-1]
    assert last.startswith("moonpool: the transfer with engine")
    assert address in last
    assert "5 s" in last
