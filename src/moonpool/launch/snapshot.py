"""What runs on this host now, gathered from the HTTP pages of the nodes and the proxy and from `up`'s own
file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from moonpool.core.config import paths
from moonpool.core.config.cluster_token import secrets_of
from moonpool.core.config.config import Config
from moonpool.core.errors import ConfigError, Error, Unavailable
from moonpool.core.printable import printable_all
from moonpool.core.service.cluster import Cluster, MasterRow, read_cluster, read_masters
from moonpool.core.service.control_tls import control_client_for
from moonpool.core.service.data_tls import pool_tls_for
from moonpool.core.service.http_get import get_json
from moonpool.core.service.http_tls import client_context, own_proxy_context, own_proxy_url, scheme
from moonpool.core.service.listen_addresses import master_text
from moonpool.core.service.node_socket import is_served
from moonpool.launch.up import UpState, read_state


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
    all hosts; masters: where there are several, each of them; engines: as the proxy sees them; problems: a
    sentence for each that did not answer.
    """

    node: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = []
    cluster: Cluster | None = None
    masters: list[MasterRow] = []
    proxy_url: str = ""
    proxy_answers: bool = False
    engines: list[EngineRow] = []
    up: UpState | None = None
    problems: list[str] = []

    def printable(self) -> Snapshot:
        """The same with every text escaped where it would move a cursor."""
        return msgspec.convert(printable_all(msgspec.to_builtins(self)), Snapshot)

    @property
    def anything(self) -> bool:
        """Whether a node, a master, the proxy or `moonpool up` was found on this host."""
        return self.node is not None or self.cluster is not None or self.proxy_answers or self.up is not None


def take(
    config: Config,
    *,
    node_url: str = "",
    node_name: str = "",
    proxy_url: str = "",
    master: str = "",
    timeout_s: float = 1.0,
) -> Snapshot:
    """One reading. Addresses that are not given come from `up`'s file, else from the configuration; nodes
    also from their sockets in the runtime folder. node_name: that node alone.
    """
    up = read_state()
    places = [(node_url, "")]
    if node_name:
        places = [("", str(paths.node_socket(node_name)))]
    elif not node_url:
        places = _places(config, up)
    problems: list[str] = []
    nodes: list[dict[str, Any]] = []
    engines: list[EngineRow] = []
    answers = False
    for url, socket in places:
        if not url and socket in {str(node.get("socket")) for node in nodes}:
            continue  # its page has answered
        try:
            nodes.append(_node(config, url, socket, timeout_s))
        except Error as error:
            problems.append(str(error))
    proxy_is_named = bool(proxy_url) or config.origin("proxy.listen").kind != "default"
    key, is_own = "", not proxy_url
    if not proxy_url:
        key = _proxy_key(config)  # sent to this host's own proxy alone
        proxy_url = up.proxy.url if up is not None and up.proxy is not None else own_proxy_url(config)
    try:
        tls = own_proxy_context(config) if is_own else None
        page = get_json(f"{proxy_url.rstrip('/')}/engines", timeout_s=timeout_s, tls=tls, token=key.encode())
        engines = msgspec.convert(page["engines"] if isinstance(page, dict) else page, list[EngineRow])
        answers = True
    except (Unavailable, ConfigError, msgspec.ValidationError, KeyError) as error:
        if proxy_is_named or (up is not None and up.proxy is not None):
            problems.append(f"no proxy serves {proxy_url} ({getattr(error, 'cause', None) or error})")
        else:
            problems.append(f"no proxy on this host ({proxy_url} does not answer)")
    for node in nodes:
        state = node.get("membership")
        if isinstance(state, dict) and not state.get("joined"):
            problems.append(
                f"node {node.get('name')} has not joined the master at {state.get('address')}: "
                f"{state.get('why_not')}"
            )
    named = master or master_text(config) or next((str(n["master"]) for n in nodes if n.get("master")), "")
    cluster = _cluster(config, named, timeout_s, problems)
    return Snapshot(
        node=nodes[0] if nodes else None,
        nodes=nodes,
        cluster=cluster,
        # One that does not answer is not asked a second time.
        masters=_masters(config, named, timeout_s) if cluster or re.search("[,;]", named) else [],
        proxy_url=proxy_url,
        proxy_answers=answers,
        engines=engines,
        up=up,
        problems=problems,
    )


def _places(config: Config, up: UpState | None) -> list[tuple[str, str]]:
    """(URL, socket) of each node of this host and user that may run; either can be empty."""
    if up is not None and up.nodes:
        places = [(node.url, node.socket) for node in up.nodes]
    elif config.node.http != "off":
        places = [(f"{scheme(config)}://{config.node.http}", "")]
    else:
        places = [("", "")]
    known = {socket for _, socket in places}
    sockets = sorted(str(path) for path in paths.runtime_dir().glob("node-*.sock"))
    return places + [("", socket) for socket in sockets if socket not in known and is_served(Path(socket))]


def _proxy_key(config: Config) -> str:
    """A key with which the proxy's pages can be read; "": none is known."""
    from moonpool.disagg_proxy.clients import read_clients
    from moonpool.disagg_proxy.settings import read_api_keys

    try:
        if config.proxy.clients_file:
            rows = read_clients(config.proxy.clients_file, registers=False)
            return next((each.key for each in rows if each.key and "look" in each.may), "")
        return next(iter(read_api_keys(config.proxy.api_keys_file)), "")
    except ConfigError:  # this user may not read it
        return ""


def _masters(config: Config, named: str, timeout_s: float) -> list[MasterRow]:
    """Those of a pool that has several; of one master the cluster says all."""
    try:
        rows = read_masters(named, config.client_token(), tls=control_client_for(config), timeout_s=timeout_s)
    except Error:  # the reason stands with the cluster
        return []
    return rows if len(rows) > 1 else []


def _cluster(config: Config, named: str, timeout_s: float, problems: list[str]) -> Cluster | None:
    """From the masters that were named, or that a node of this host joins, or the one that runs here."""
    try:
        tls = control_client_for(config)
        return read_cluster(
            named or config.master.listen, config.client_token(), tls=tls, timeout_s=timeout_s
        )
    except Error as error:
        if named:
            problems.append(f"the master at {named} does not answer: {error}")
        return None


def _admin_token(config: Config) -> bytes:
    """As configured, or of this user's runtime folder; b"" where there is none: then pages say less."""
    cluster = config.cluster
    if cluster.admin_token or cluster.admin_token_file or (paths.runtime_dir() / "admin-token").exists():
        return secrets_of(config.read_admin_token())[0]
    return b""


def _node(config: Config, url: str, socket: str, timeout_s: float) -> dict[str, Any]:
    """The node's /stat; when HTTP does not answer, its counters over its socket or the host's default one."""
    try:
        if url:
            tls = client_context(config) if url.startswith("https:") else None
            token = _admin_token(config)
            page = get_json(f"{url.rstrip('/')}/stat", timeout_s=timeout_s, tls=tls, token=token)
            return msgspec.convert(page, dict[str, Any])
    except (Unavailable, msgspec.ValidationError):
        pass
    from moonpool.core.store.store import Store

    token, pool = config.client_token(socket), pool_tls_for(config, socket)
    with Store(socket or None, token=token, tls=pool, timeout_s=timeout_s) as store:
        path = os.path.realpath(socket or paths.default_node_socket())
        name = Path(path).name.removeprefix("node-").removesuffix(".sock")
        return {"name": name, "socket": path, "metrics": store.stat()}
