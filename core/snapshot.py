"""What runs on this host now, gathered from the HTTP pages of the nodes and the proxy and from `up`'s own
file.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool.core import paths
from moonpool.core.cluster import Cluster, read_cluster
from moonpool.core.config import Config
from moonpool.core.control_tls import control_client_for
from moonpool.core.errors import Error, Unavailable
from moonpool.core.http_get import get_json
from moonpool.core.tls import client_context, scheme
from moonpool.core.up import UpState, read_state


class EngineRow(msgspec.Struct, frozen=True):
    """An engine as the proxy sees it."""

    name: str
    url: str = ""
    health: str = ""
    why: str = ""
    in_flight: int = 0
    requests: int = 0
    failures: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """node: the first node's /stat; nodes: of all that answer; cluster: what the master tells of the nodes of
    all hosts; engines: as the proxy sees them; problems: a sentence for each that did not answer.
    """

    node: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = []
    cluster: Cluster | None = None
    proxy_url: str = ""
    proxy_answers: bool = False
    engines: list[EngineRow] = []
    up: UpState | None = None
    problems: list[str] = []

    @property
    def anything(self) -> bool:
        return self.node is not None or self.cluster is not None or self.proxy_answers or self.up is not None


def take(
    config: Config,
    *,
    node_url: str = "",
    proxy_url: str = "",
    master: str = "",
    timeout_s: float = 1.0,
) -> Snapshot:
    """One reading. Addresses that are not given come from `up`'s file, else from the configuration."""
    up = read_state()
    places = [(node_url, "")]
    if not node_url:
        if up is not None and up.nodes:
            places = [(node.url, node.socket) for node in up.nodes]
        elif config.node.http != "off":
            places = [(f"{scheme(config)}://{config.node.http}", "")]
    if not proxy_url:
        proxy_url = (
            up.proxy.url if up is not None and up.proxy is not None else f"http://{config.proxy.listen}"
        )
    problems: list[str] = []
    nodes: list[dict[str, Any]] = []
    engines: list[EngineRow] = []
    answers = False
    for url, socket in places:
        try:
            nodes.append(_node(config, url, socket, timeout_s))
        except Error as error:
            problems.append(str(error))
    try:
        page = get_json(f"{proxy_url.rstrip('/')}/engines", timeout_s=timeout_s)
        engines = msgspec.convert(page["engines"] if isinstance(page, dict) else page, list[EngineRow])
        answers = True
    except (Unavailable, msgspec.ValidationError, KeyError) as error:
        problems.append(f"no proxy serves {proxy_url} ({getattr(error, 'cause', None) or error})")
    cluster = _cluster(config, master, nodes, timeout_s, problems)
    return Snapshot(nodes[0] if nodes else None, nodes, cluster, proxy_url, answers, engines, up, problems)


def _cluster(
    config: Config, master: str, nodes: list[dict[str, Any]], timeout_s: float, problems: list[str]
) -> Cluster | None:
    """From the master that was named, or that a node of this host has joined, or that runs on this host."""
    named = master or config.cluster.master or next((str(n["master"]) for n in nodes if n.get("master")), "")
    try:
        tls = control_client_for(config)
        return read_cluster(
            named or config.master.listen, config.client_token(), tls=tls, timeout_s=timeout_s
        )
    except Error as error:
        if named:
            problems.append(f"the master at {named} does not answer: {error}")
        return None


def _node(config: Config, url: str, socket: str, timeout_s: float) -> dict[str, Any]:
    """The node's /stat; when HTTP does not answer, its counters over its socket or the host's default one."""
    try:
        if url:
            tls = client_context(config) if url.startswith("https:") else None
            page = get_json(f"{url.rstrip('/')}/stat", timeout_s=timeout_s, tls=tls)
            return msgspec.convert(page, dict[str, Any])
    except (Unavailable, msgspec.ValidationError):
        pass
    from moonpool.core.store import Store

    token, control = config.client_token(socket), control_client_for(config, socket)
    with Store(socket or None, token=token, tls=control, timeout_s=timeout_s) as store:
        return {"name": "", "socket": socket or str(paths.default_node_socket()), "metrics": store.stat()}
