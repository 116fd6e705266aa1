"""The section [proxy] of the configuration as the proxy's own settings."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from moonpool.core.config.config import Config
from moonpool.core.config.proxy_section import Proxy, ProxyCommon
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.control_tls import control_settings
from moonpool.core.service.listen_addresses import master_text
from moonpool.core.service.published_events import local_nodes
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.events.settings import PoolSettings, parse_event_sources
from moonpool.disagg_proxy.peers.settings import PeerSettings
from moonpool.disagg_proxy.settings import AdmissionSettings, ProxySettings, parse_engines


def proxy_settings(config: Config) -> ProxySettings:
    """Raises ConfigError for what cannot be meant, and for an unguarded address beyond loopback."""
    address = parse_address(config.proxy.listen, "proxy.listen")
    _require_keys(config.proxy, "listen", address)
    if config.proxy.process_listen:
        process = parse_address(config.proxy.process_listen, "proxy.process_listen")
        _require_keys(config.proxy, "process_listen", process)
    policy = policy_of(config.proxy, has_pool=pool_is_there(config))
    # Nodes are also looked for where the choice of a policy would have been another one with them.
    may_look = config.proxy.policy == "auto" and len(config.proxy.engines) > 1
    looks = may_look or make_policy(policy).uses_tokens
    kept = {name: getattr(config.proxy, name) for name in ProxyCommon.__struct_fields__}
    made = {
        "host": address.host,
        "port": address.port,
        "engines": (
            *parse_engines(config.proxy.engines),
            *parse_engines(config.proxy.prefill, "prefill"),
            *parse_engines(config.proxy.decode, "decode"),
        ),
        "policy": policy,
        "events": (
            *parse_event_sources(config.proxy.events),
            *parse_event_sources(
                config.proxy.pool_events,
                pool=True,
                token=config.read_token() if config.token_is_configured else b"",
            ),
        ),
        "pool": pool_settings(config) if config.proxy.pool == "auto" and looks else None,
        "admission": AdmissionSettings(**msgspec.structs.asdict(config.proxy.admission)),
        "peers": PeerSettings(
            listen=(config.proxy.peer_listen,) if config.proxy.peer_listen else (),
            peers=tuple(config.proxy.peers),
            token=config.read_token() if config.proxy.peer_listen and config.token_is_configured else b"",
        ),
    }
    return ProxySettings(**(kept | made))


def pool_settings(config: Config) -> PoolSettings:
    """How nodes of the pool are found. Raises ConfigError for a master that is no address, or that is on
    another host and has no cluster token."""
    master = master_text(config)
    return PoolSettings(
        master,
        config.read_token() if config.token_is_configured else b"",
        control_settings(config),
    )


def pool_is_there(config: Config) -> bool:
    """Whether a node of this host and user runs now, or a master is configured, and the proxy may look."""
    if config.proxy.pool != "auto":
        return False
    try:
        return bool(config.cluster.master or local_nodes())
    except ConfigError:  # the proxy looks for nodes while it runs, and says why it cannot
        return False


def policy_of(proxy: Proxy, roles: Iterable[str] = (), *, has_pool: bool = False) -> str:
    """What ``proxy.policy`` means for the engines that [proxy] names and for others in these roles.

    "auto": engines of their own for prefill and decode want a policy that knows when a hand-over pays, and
    streams of KV events, of engines or of a pool, are there to be looked at. Engines that are discovered may
    be and have all of that, and admission predicts.
    """
    if proxy.policy != "auto":
        return proxy.policy
    apart = proxy.prefill or proxy.decode or any(role != "both" for role in roles)
    looks = apart or proxy.events or proxy.pool_events or proxy.discovery or has_pool
    wanted = proxy.admission
    admits = wanted.ttft_slo or wanted.gap_slo or wanted.queue_max
    return "conductor" if looks or admits else "round_robin"


def _require_keys(proxy: Proxy, name: str, address: Address) -> None:
    """Raises ConfigError for an ``address`` beyond loopback where no caller would be asked for a key."""
    if address.is_loopback or proxy.api_keys_file or proxy.clients_file or proxy.open:
        return
    raise ConfigError(
        f"proxy.{name} = {address} can be reached from other hosts, where every caller could use the "
        f"engines: give --api-keys-file with keys of clients, or --clients-file with their tenants and "
        f"rights, too, or --open where a gateway or a private network guards it, or listen on "
        f"127.0.0.1:{address.port}",
        operation="proxy",
        key=f"proxy.{name}",
        peer=str(address),
    )
