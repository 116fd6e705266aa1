"""Clusters of several hosts on this machine, and what must hold when parts of them fail.

    namespaces.py      a network + mount namespace: where a host or the switch lives
    hosts.py           the switch, hosts on cables, processes in them; partitions by routing, not by asking
    relay.py           a relay that a test puts on the way between two hosts, unseen by both
    bed.py             masters and nodes of moonpool in hosts, their counters
    puppet.py          a client in a host, driven by the test; puppet_process.py is its other end
    tcp_wire.py        the wire over TCP in plain Python, for what no client of ours would send

Each test that asks for ``network`` or ``cluster`` gets one of its own; the logs of its processes are shown
when it fails. Root is needed: without it the tests are skipped and say why.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from .bed import Cluster
from .hosts import Network
from .namespaces import why_not


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    network = Network(tmp_path / "logs")
    yield network
    network.close()


@pytest.fixture
def cluster(network: Network) -> Iterator[Cluster]:
    cluster = Cluster(network)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and the nodes a and b, for all tests of a file that do them no harm."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    network = Network(tmp_path_factory.mktemp("logs"))
    cluster = Cluster(network)
    try:
        cluster.start("a", "b")
        yield cluster
    finally:
        cluster.close()
        network.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    bed = getattr(item, "funcargs", {})
    cluster = bed.get("cluster") or bed.get("shared_cluster")
    network = bed.get("network") if cluster is None else cluster.network
    if report.failed and network is not None:
        report.sections += network.logs()
    return report
