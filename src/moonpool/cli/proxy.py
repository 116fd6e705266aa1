"""`moonpool proxy`."""

from __future__ import annotations

import typer

from moonpool.cli import proxy_options as of
from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.cli.shown_defaults import command_of


def register(app: typer.Typer) -> None:
    app.command(
        cls=command_of("proxy"),
        epilog=examples(
            "moonpool proxy --engine http://127.0.0.1:8100 --engine http://127.0.0.1:8101",
            "moonpool proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8101",
            "moonpool proxy --policy least_load --engine http://127.0.0.1:8100 --engine http://127.0.0.1:8101",
            "moonpool proxy --processes 4 --engine http://127.0.0.1:8100",
            "moonpool proxy --engine http://127.0.0.1:8100 --ttft-slo 5 --queue-max 1000",
            "moonpool proxy --listen 127.0.0.1:9000 --engine left=http://127.0.0.1:8100",
            "moonpool proxy --discovery file:/etc/moonpool/engines.yaml",
            "moonpool proxy --discovery http --discovery-keys-file /etc/moonpool/registrars",
            "moonpool proxy --discovery etcd:http://127.0.0.1:2379/moonpool/engines/",
            "moonpool proxy --discovery 'kubernetes:prod/app=vllm?port=8000'",
        ),
    )(proxy)


def proxy(
    engine: of.Engines = None,
    prefill: of.Prefill = None,
    decode: of.Decode = None,
    discovery: of.Discovery = None,
    discovery_keys_file: of.DiscoveryKeysFile = None,
    discovery_allow: of.DiscoveryAllow = None,
    discovery_registry_file: of.DiscoveryRegistryFile = None,
    listen: of.Listen = None,
    host: of.Host = None,
    port: of.Port = None,
    take_over: of.TakeOver = False,
    policy: of.Policy = None,
    handover: of.Handover = None,
    tokenizer: of.Tokenizer = None,
    events: of.Events = None,
    pool_events: of.PoolEvents = None,
    ttft_slo: of.TtftSlo = None,
    gap_slo: of.GapSlo = None,
    queue_max: of.QueueMax = None,
    queue_deadline: of.QueueDeadline = None,
    processes: of.Processes = None,
    process_listen: of.ProcessListen = None,
    peer_listen: of.PeerListen = None,
    peer: of.Peers = None,
    api_keys_file: of.ApiKeysFile = None,
    open_to_all: of.Open = False,
    engine_key_file: of.EngineKeyFile = None,
    access_log: of.AccessLog = None,
    otlp_endpoint: of.OtlpEndpoint = None,
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Run the proxy: one OpenAI address in front of the engines, until SIGTERM."""
    from dataclasses import replace

    from moonpool.core.config import logs
    from moonpool.core.config.config import load
    from moonpool.core.service.addresses import Address, parse_address
    from moonpool.disagg_proxy import group, process
    from moonpool.disagg_proxy.from_config import proxy_settings

    if listen is not None and (host is not None or port is not None):
        raise typer.BadParameter("--listen and --host or --port exclude each other")
    if host is not None or port is not None:
        address = parse_address(load(config).proxy.listen, "proxy.listen")
        listen = str(Address(address.host if host is None else host, address.port if port is None else port))
    settings = load(
        config,
        arguments={
            "proxy.engines": engine or None,
            "proxy.prefill": prefill or None,
            "proxy.decode": decode or None,
            "proxy.discovery": discovery or None,
            "proxy.discovery_keys_file": discovery_keys_file,
            "proxy.discovery_allow": discovery_allow or None,
            "proxy.discovery_registry_file": discovery_registry_file,
            "proxy.listen": listen,
            "proxy.policy": policy,
            "proxy.handover": handover,
            "proxy.tokenizer": tokenizer or None,
            "proxy.events": events or None,
            "proxy.pool_events": pool_events or None,
            "proxy.ttft_slo": ttft_slo,
            "proxy.gap_slo": gap_slo,
            "proxy.queue_max": queue_max,
            "proxy.queue_deadline": queue_deadline,
            "proxy.processes": processes,
            "proxy.process_listen": process_listen,
            "proxy.peer_listen": peer_listen,
            "proxy.peers": peer or None,
            "proxy.api_keys_file": api_keys_file,
            "proxy.open": open_to_all or None,
            "proxy.engine_key_file": engine_key_file,
            "proxy.access_log": access_log,
            "proxy.otlp_endpoint": otlp_endpoint,
            "cluster.token_file": None if token_file is None else str(token_file),
        },
    )
    logs.set_up(settings)
    made = replace(proxy_settings(settings), take_over=take_over)
    return process.run(made) if made.processes == 1 else group.run(made)
