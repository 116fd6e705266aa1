"""`moonpool mock-engine`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import examples


def register(app: typer.Typer) -> None:
    """Adds ``mock-engine``. Its options are not settings: no configuration file has them."""
    app.command(
        "mock-engine",
        epilog=examples(
            "moonpool mock-engine --port 8100",
            "moonpool mock-engine --port 8101 --prefill-us 100 --step-ms 10",
            "moonpool mock-engine --port 8102 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558",
        ),
    )(mock_engine)


def mock_engine(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8100,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="The model's name.")] = "mock",
    blocks: Annotated[int, typer.Option(help="KV blocks that it has.")] = 4096,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    step_tokens: Annotated[
        int, typer.Option(help="Tokens of a step: prefills are cut into such chunks.")
    ] = 8192,
    requests_max: Annotated[int, typer.Option(help="Requests that run at one time.")] = 256,
    answer_tokens: Annotated[int, typer.Option(help="Length of an answer that is not limited.")] = 16,
    step_ms: Annotated[float, typer.Option(min=0, help="Milliseconds of a step.")] = 0.0,
    prefill_us: Annotated[float, typer.Option(min=0, help="Microseconds for a token of prefill.")] = 0.0,
    prefill_ns2: Annotated[
        float, typer.Option(min=0, help="Nanoseconds for the square of the prompt's tokens.")
    ] = 0.0,
    decode_us: Annotated[
        float, typer.Option(min=0, help="Microseconds of a step for each request in it.")
    ] = 0.0,
    handover_us: Annotated[
        float, typer.Option(min=0, help="Microseconds for a token that is handed over.")
    ] = 0.0,
    lease_s: Annotated[float, typer.Option(help="How long blocks wait for a decode engine.")] = 10.0,
    events: Annotated[
        str, typer.Option(metavar="ZMQ", help="Publish KV events there, e.g. tcp://127.0.0.1:5557.")
    ] = "",
    replay: Annotated[str, typer.Option(metavar="ZMQ", help="Replay them there.")] = "",
    sglang: Annotated[
        str, typer.Option(metavar="MODE", help="Be like SGLang's, in this mode: null, prefill, decode.")
    ] = "",
) -> int:
    """Run an engine without a model: OpenAI API, all PD forms, KV events, KV accounts and a timing model."""
    from moonpool.disagg_proxy.tools.mock_engine import server
    from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings, Timing

    return server.run(
        MockSettings(
            host=host,
            port=port,
            model=model,
            blocks=blocks,
            block_tokens=block_tokens,
            step_tokens=step_tokens,
            requests_max=requests_max,
            answer_tokens=answer_tokens,
            lease_s=lease_s,
            events=events,
            replay=replay,
            sglang=sglang,
            timing=Timing(
                step_s=step_ms / 1e3,
                prefill_s_per_token=prefill_us / 1e6,
                prefill_s_per_token2=prefill_ns2 / 1e9,
                gap_s_per_request=decode_us / 1e6,
                handover_s_per_token=handover_us / 1e6,
            ),
        )
    )
