"""`moonpool proxy`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.core.cli.options import ConfigFile, TokenFile, examples


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "moonpool proxy --engine http://127.0.0.1:8100 --engine http://127.0.0.1:8101",
            "moonpool proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8101",
            "moonpool proxy --processes 4 --engine http://127.0.0.1:8100",
            "moonpool proxy --engine http://127.0.0.1:8100 --ttft-slo 5 --queue-max 1000",
            "moonpool proxy --listen 127.0.0.1:9000 --engine left=http://127.0.0.1:8100",
            "moonpool proxy --discovery file:/etc/moonpool/engines.yaml",
            "moonpool proxy --discovery http --discovery-keys-file /etc/moonpool/registrars",
            "moonpool proxy --discovery etcd:http://127.0.0.1:2379/moonpool/engines/",
            "moonpool proxy --discovery 'kubernetes:prod/app=vllm?port=8000'",
        )
    )(proxy)


def proxy(
    engine: Annotated[
        list[str] | None, typer.Option(metavar="URL|NAME=URL", help="An engine; give it once for each.")
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL|NAME=URL",
            help="Computes prompts for --decode; once for each. #bootstrap=PORT behind it, where not 8998.",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL|NAME=URL", help="An engine that answers what --prefill computed."),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the OpenAI API.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address alone.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="The port alone; 0: a free one.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace a proxy that runs there; no connection is refused.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="conductor (default with --prefill and --decode, or events), prefix_affinity, least_load, "
            "round_robin (default otherwise), or package.module:Class."
        ),
    ] = None,
    handover: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="From prefill to decode: auto, two_step, concurrent, one_shot, context_first,"
            " generation_first.",
        ),
    ] = None,
    api_keys_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="API keys of clients, one per line.")
    ] = None,
    access_log: Annotated[
        str | None, typer.Option(metavar="FILE", help="Gets a line per request; - is standard output.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Gets OpenTelemetry spans, such as http://host:4318.")
    ] = None,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=FOLDER", help="Tokenise here instead of asking engines; or: none."),
    ] = None,
    events: Annotated[
        list[str] | None, typer.Option(metavar="NAME=ZMQ", help="KV events of an engine; once for each.")
    ] = None,
    pool_events: Annotated[
        list[str] | None, typer.Option(metavar="NAME=ZMQ", help="KV events of a node of the pool.")
    ] = None,
    discovery: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Find engines while it runs: file:PATH, http, etcd:URL/PREFIX, kubernetes:NAMESPACE/LABELS.",
        ),
    ] = None,
    discovery_keys_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keys of who may register engines over HTTP, one per line."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes that serve at the address.")
    ] = None,
    process_listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Reach each of them alone, too: at PORT, PORT + 1, ..."),
    ] = None,
    peer_listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where other proxies hear what this one has in flight."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Another proxy's --peer-listen; once for each."),
    ] = None,
    ttft_slo: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Refuse what would get its first token later."),
    ] = None,
    gap_slo: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Refuse what would get its tokens more slowly, each."),
    ] = None,
    queue_max: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="So many requests may wait until engines are free.")
    ] = None,
    queue_deadline: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="The longest such wait.")
    ] = None,
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Run the proxy: one OpenAI address in front of the engines, until SIGTERM."""
    from dataclasses import replace

    from moonpool.core import logs
    from moonpool.core.addresses import Address, parse_address
    from moonpool.core.config import load
    from moonpool.core.proxy_settings import proxy_settings
    from moonpool.disagg_proxy import group, process

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
            "proxy.api_keys_file": api_keys_file,
            "proxy.access_log": access_log,
            "proxy.otlp_endpoint": otlp_endpoint,
            "proxy.tokenizer": tokenizer or None,
            "proxy.events": events or None,
            "proxy.pool_events": pool_events or None,
            "proxy.discovery": discovery or None,
            "proxy.discovery_keys_file": discovery_keys_file,
            "proxy.ttft_slo": ttft_slo,
            "proxy.gap_slo": gap_slo,
            "proxy.queue_max": queue_max,
            "proxy.queue_deadline": queue_deadline,
            "proxy.listen": listen,
            "proxy.policy": policy,
            "proxy.processes": processes,
            "proxy.process_listen": process_listen,
            "proxy.peer_listen": peer_listen,
            "proxy.peers": peer or None,
            "proxy.handover": handover,
            "cluster.token_file": None if token_file is None else str(token_file),
        },
    )
    logs.set_up(settings)
    made = replace(proxy_settings(settings), take_over=take_over)
    return process.run(made) if made.processes == 1 else group.run(made)
