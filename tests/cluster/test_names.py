"""Engines of several hosts that find each other by name, and the host of the store behind a cut cable."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..core.store_bed import until
from .hosts import Host, Network, Process

TOKEN = {"MOONPOOL_CLUSTER_TOKEN": "the token of these hosts"}
PROGRAM = Path(__file__).with_name("names_process.py")
WAIT_S = 60.0


def start_master(host: Host) -> str:
    process = host.moonpool(
        "master", "--listen", f"{host.address}:7700", "--http", f"{host.address}:7701", **TOKEN
    )
    process.said("^moonpool master")
    return f"http://{host.address}:7701/metadata"


def start_etcd(host: Host) -> str:
    here, peer = f"http://{host.address}:2379", f"http://{host.address}:2380"
    process = host.start(
        "etcd",
        [
            *("etcd", "--data-dir", "/tmp/etcd", "--unsafe-no-fsync"),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        ],
    )
    process.said("ready to serve client requests|serving insecure client requests")
    return f"etcd://{host.address}:2379"


def start_redis(host: Host) -> str:
    process = host.start(
        "redis",
        ["redis-server", "--bind", host.address, "--protected-mode", "no", "--save", "", "--dir", "/tmp"],
    )
    process.said("Ready to accept connections")
    return f"redis://{host.address}"


STORES: dict[str, tuple[Callable[[Host], str], str]] = {
    "master": (start_master, sys.executable),
    "etcd": (start_etcd, "etcd"),
    "redis": (start_redis, "redis-server"),
}


def run(host: Host, *words: str) -> Process:
    return host.start(words[0], [sys.executable, PROGRAM, *words], **TOKEN)


def says_more(process: Process, pattern: str, times: int = 1) -> None:
    """Waits until it has said that so many times from now on."""
    before = len(process.text())
    until(lambda: len(re.findall(pattern, process.text()[before:], re.MULTILINE)) >= times, WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_the_host_of_the_store_is_cut_off(network: Network, kind: str) -> None:
    start, program = STORES[kind]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    middle, a, b, c = (network.host(name) for name in ("m", "a", "b", "c"))
    url = start(middle)
    gives = run(a, "gives", url, "kv", "1")
    gives.said("published", WAIT_S)
    takes = run(b, "takes", url, "kv")
    takes.said(rf"opened {a.address}:", WAIT_S)  # not 0.0.0.0 and not loopback, where it listens
    takes.said("read 1$", WAIT_S)

    network.unplug(middle)
    says_more(gives, "problem: ")
    says_more(takes, "read 1$", 3)  # opens the name each time, by what it knows
    assert "failed" not in takes.text()
    network.plug(middle)
    says_more(gives, "published$")

    gives.kill()
    says_more(takes, "failed: ")
    run(c, "gives", url, "kv", "2").said("published", WAIT_S)  # once the dead one's lease has ended
    says_more(takes, "read 2$")
