"""`moonpool proxy`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.cli.settings_options import command_of, given

# docs/proxy.md says more of each.
OPTIONS = {
    "Engines": {
        "proxy.engines": "URL|NAME=URL --engine",
        "proxy.prefill": "URL|NAME=URL",
        "proxy.decode": "URL|NAME=URL",
        "proxy.discovery": "SOURCE",
        "proxy.discovery_keys_file": "FILE",
        "proxy.discovery_allow": "CIDR",
        "proxy.discovery_registry_file": "FILE",
    },
    "Address": {"proxy.listen": "HOST:PORT"},
    "Choice of an engine": {
        "proxy.policy": "POLICY",
        "proxy.handover": "FORM",
        "proxy.neighbour_tokens_min": "N",
        "proxy.tokenizer": "MODEL=FOLDER",
        "proxy.events": "NAME=ZMQ",
        "proxy.pool": "auto|none",
        "cluster.master": "HOST:PORT",
        "proxy.pool_events": "NAME=ZMQ",
    },
    "Admission": {
        "proxy.ttft_slo": "SECONDS",
        "proxy.gap_slo": "SECONDS",
        "proxy.queue_max": "N",
        "proxy.queue_deadline": "SECONDS",
    },
    "Several processes and proxies": {
        "proxy.processes": "N",
        "proxy.process_listen": "HOST:PORT",
        "proxy.peer_listen": "HOST:PORT",
        "proxy.peers": "HOST:PORT --peer",
    },
    "Access and records": {
        "proxy.api_keys_file": "FILE",
        "proxy.clients_file": "FILE",
        "proxy.switch_headers": "load|store --switch-header",
        "proxy.open": "",
        "proxy.engine_key_file": "FILE",
        "proxy.engine_tls_ca": "FILE",
        "proxy.engine_tls_cert": "FILE",
        "proxy.engine_tls_key": "FILE",
        "proxy.tls_cert": "FILE",
        "proxy.tls_key": "FILE",
        "proxy.tls_client_ca": "FILE",
        "proxy.access_log": "FILE",
        "proxy.otlp_endpoint": "URL",
    },
}


def register(app: typer.Typer) -> None:
    """Adds ``proxy``, with an option for each setting of OPTIONS."""
    app.command(
        cls=command_of(OPTIONS),
        epilog=examples(
            "moonpool proxy --engine http://127.0.0.1:8100 --engine http://127.0.0.1:8101",
            "moonpool proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8101",
            "moonpool proxy --policy least_load --engine http://127.0.0.1:8100 --engine http://127.0.0.1:8101",
            "moonpool proxy --processes 4 --engine http://127.0.0.1:8100",
            "moonpool proxy --engine http://127.0.0.1:8100 --ttft-slo 5 --queue-max 1000",
            "moonpool proxy --listen 127.0.0.1:9000 --engine left=http://127.0.0.1:8100",
            "moonpool proxy --discovery file:/etc/moonpool/engines.yaml",
            "moonpool proxy --discovery http --discovery-keys-file /etc/moonpool/registrars",
            "moonpool proxy --engine http://127.0.0.1:8100 --clients-file /etc/moonpool/clients.toml",
            "moonpool proxy --engine http://127.0.0.1:8100 --tls-cert proxy.pem --tls-key proxy.key",
            "moonpool proxy --engine https://gpu-1:8100 --engine-tls-ca engines.pem",
            "moonpool proxy --discovery etcd:http://127.0.0.1:2379/moonpool/engines/",
            "moonpool proxy --discovery 'kubernetes:prod/app=vllm?port=8000'",
        ),
    )(proxy)


def proxy(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="The address alone.", rich_help_panel="Address")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The port alone; 0: a free one.", rich_help_panel="Address"),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Replace a proxy that runs there; no connection is refused.",
            rich_help_panel="Address",
        ),
    ] = False,
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Run the proxy: one OpenAI address in front of the engines, until SIGTERM."""
    from msgspec.structs import replace

    from moonpool.core.config import logs
    from moonpool.core.config.config import load
    from moonpool.core.service.addresses import Address, parse_address
    from moonpool.disagg_proxy import group, process
    from moonpool.disagg_proxy.from_config import proxy_settings

    arguments = given(ctx, token_file)
    if host is not None or port is not None:
        if "proxy.listen" in arguments:
            raise typer.BadParameter("--listen and --host or --port exclude each other")
        address = parse_address(load(config).proxy.listen, "proxy.listen")
        arguments["proxy.listen"] = str(
            Address(address.host if host is None else host, address.port if port is None else port)
        )
    settings = load(config, arguments=arguments)
    logs.set_up(settings)
    made = replace(proxy_settings(settings), take_over=take_over)
    return process.run(made) if made.processes == 1 else group.run(made)
