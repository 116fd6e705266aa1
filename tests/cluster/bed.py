"""A master and nodes of moonpool in test hosts, as a person would start them, and what they count."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Sequence
from typing import Any

from moonpool import _native

from ..core.store_bed import MIB, until
from .hosts import Host, Network, Process
from .puppet import Puppet

TOKEN = "the cluster token of these tests"
MASTER_PORT, NODE_PORT = 7700, 7710
JOIN_S = 20.0  # for processes that start on a busy machine


class Node:
    """`moonpool node` in a host."""

    def __init__(self, host: Host, process: Process, name: str, port: int) -> None:
        self.host, self.process, self.name, self.port = host, process, name, port

    @property
    def address(self) -> str:
        return f"{self.host.address}:{self.port}"

    def metrics(self) -> dict[str, int]:
        """The page has none when the node's loop did not come round within 2 s."""
        rows: dict[str, int] = until(lambda: fetch(self.host, self.port + 1, "/stat")["metrics"], JOIN_S)
        return rows

    def metric(self, name: str) -> int:
        return self.metrics()[name]

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """How much each of its counters has grown."""
        now = self.metrics()
        return {name: now[name] - before.get(name, 0) for name in now if name.endswith("_total")}

    def moved(self, before: dict[str, int]) -> tuple[int, int]:
        """(bytes of objects that it sent by TCP, that it received by TCP) since then"""
        grown = self.since(before)
        return grown["tcp_sent_bytes_total"], grown["tcp_received_bytes_total"]

    def kill(self) -> None:
        self.process.kill()


class Cluster:
    """Hosts that share a token; each has a host_id of its own, whatever machine it is on."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes: list[Node] = []
        self.puppets: list[Puppet] = []
        self.master_host: Host | None = None
        self.master_process: Process | None = None
        self.standby_host: Host | None = None
        self.ranges: list[str] = []  # where there are several: the masters of each, as in cluster.master
        self._directory: _native.DirectoryClient | None = None

    def host(self, name: str) -> Host:
        host = self.network.hosts.get(name) or self.network.host(name)
        host.env |= {"MOONPOOL_CLUSTER_TOKEN": TOKEN, "MOONPOOL_NODE_HOST_ID": name}
        return host

    @property
    def master(self) -> str:
        """Where the master is, or will be."""
        assert self.master_host is not None
        return f"{self.master_host.address}:{MASTER_PORT}"

    def start_master(self, host: Host | None = None) -> Process:
        """In a host of its own if not told otherwise, the first time; then in the same place."""
        self.master_host = host or self.master_host or self.host("m")
        process = self.master_host.moonpool("master", "--listen", self.master)
        process.said("^moonpool master")
        self.master_process = process
        return process

    @property
    def masters(self) -> str:
        """The master and its standby, if it has one; those of all ranges, if there are several."""
        if self.ranges:
            return ";".join(self.ranges)
        both = [] if self.standby_host is None else [f"{self.standby_host.address}:{MASTER_PORT}"]
        return ",".join([self.master, *both])

    def start_standby(self, host: Host | None = None, **settings: object) -> Process:
        """Of the master that runs: in a host of its own if not told otherwise."""
        host = host or self.standby_host or self.host("s")
        self.standby_host = host
        env = {f"MOONPOOL_MASTER_{key.upper()}": str(value) for key, value in settings.items()}
        listen = f"{host.address}:{MASTER_PORT}"
        process = host.moonpool("master", "--listen", listen, "--standby-of", self.master, **env)
        process.said("^moonpool master")
        assert self.master_host is not None
        owner = self.master_host
        until(lambda: master_metric(owner, "standby_is_whole"), JOIN_S)
        return process

    def start_node(
        self,
        host: Host,
        *,
        dram: str = "64MiB",
        name: str = "",
        port: int = NODE_PORT,
        wait: bool = True,
        **settings: object,
    ) -> Node:
        """Its pages are on the port above. ``settings``: more of the section [node] of the configuration."""
        name = name or f"node-{host.name}"
        arguments = ["--dram", dram, "--name", name, "--listen", f"{host.address}:{port}"]
        arguments += ["--http", f"127.0.0.1:{port + 1}"]
        if self.master_host is not None or self.ranges:
            arguments += ["--master", self.masters]
        env = {f"MOONPOOL_NODE_{key.upper()}": str(value) for key, value in settings.items()}
        process = host.moonpool("node", *arguments, **env)
        node = Node(host, process, name, port)
        self.nodes.append(node)
        if wait:
            process.said("^moonpool node")
            if self.master_process is not None and self.master_process.is_running:
                until(lambda: node.metric("master_joined"), JOIN_S)
        return node

    def start(self, *names: str, master: bool = True, **node: Any) -> list[Node]:
        """A master in a host of its own and a node in each of these hosts, all of which know each other."""
        if master:
            self.start_master()
        nodes = [self.start_node(self.host(name), wait=False, **node) for name in names]
        for each in nodes:
            each.process.said("^moonpool node")
        if master:
            self.wait_alive(len(nodes))
            for each in nodes:
                until(lambda each=each: each.metric("master_joined"), JOIN_S)
        return nodes

    def puppet(self, host: Host, **options: Any) -> Puppet:
        """A client in that host. ``options``: as of Store."""
        self.puppets.append(Puppet(host, **options))
        return self.puppets[-1]

    # ---- what the master thinks, asked from the switch, which no partition cuts off

    def directory(self) -> _native.DirectoryClient:
        if self._directory is None:
            with self.network.switch.entered():
                self._directory = _native.DirectoryClient(self.masters, TOKEN.encode(), timeout_s=5.0)
        return self._directory

    def states(self) -> dict[str, str]:
        """name of each member -> alive or suspect; empty while the master does not answer"""
        return {row.name: row.state for row in self.members()}

    def members(self) -> list[_native.Member]:
        with self.network.switch.entered():
            try:
                return list(self.directory().members(fresh=True)[1])
            except (ConnectionError, TimeoutError):
                return []

    def free_bytes(self, node: Node) -> int:
        """Of its arena, as of its last beat. (A directory client that has asked before learns loads only with
        the next change of the membership.)"""
        with self.network.switch.entered():
            fresh = _native.DirectoryClient(self.master, TOKEN.encode(), timeout_s=5.0)
            rows = fresh.members()[1]
            fresh.close()
        return int(next(row for row in rows if row.name == node.name).tenants[0].free_bytes)

    def found(self, names: Sequence[str], copies: int = 1) -> None:
        """Waits until the directory knows so many holders of each: nodes tell it some ms after a put."""
        keys = b"".join(_native.key_hash("default", "default", b"", name.encode()) for name in names)

        def look() -> bool:
            with self.network.switch.entered():
                try:
                    answer = self.directory().locate(keys)
                except (ConnectionError, TimeoutError):
                    return False  # the master has just died, or has just come back
            return all(len(answer[i]) >= copies for i in range(len(names)))

        until(look)

    def wait_alive(self, n: int) -> None:
        until(lambda: list(self.states().values()).count("alive") >= n, JOIN_S)

    def close(self) -> None:
        for puppet in self.puppets:
            puppet.close()
        if self._directory is not None:
            self._directory.close()


def fetch(host: Host, port: int, path: str) -> Any:
    """A JSON page that a process of the host serves on loopback."""
    with (
        host.namespace.entered(),
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as page,
    ):
        return json.load(page)


def master_metric(host: Host, name: str) -> int:
    """Of the master in that host, by its name without the prefix; 0 when it does not answer."""
    url = f"http://127.0.0.1:{MASTER_PORT + 1}/metrics"
    try:
        with host.namespace.entered(), urllib.request.urlopen(url, timeout=10) as page:
            text = page.read().decode()
    except OSError:
        return 0
    found = re.search(rf"^moonpool_master_{name} (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


__all__ = ["MIB", "NODE_PORT", "TOKEN", "Cluster", "Node", "fetch", "master_metric", "until"]
