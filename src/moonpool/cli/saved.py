"""`moonpool saved`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ConfigFile, examples

if TYPE_CHECKING:
    from moonpool.disagg_proxy.tools.savings import Savings


def register(app: typer.Typer) -> None:
    """Adds ``saved`` to the top level of ``moonpool``."""
    app.command(
        epilog=examples(
            "moonpool saved",
            "moonpool saved --url http://10.0.0.5:8080",
            "moonpool saved --url http://127.0.0.1:8081 --url http://127.0.0.1:8082 --json",
        )
    )(saved)


def saved(
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A proxy; several are added up. Default: the one of this host."),
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Show what reuse saved since the proxy's start: prompt tokens not computed, seconds of prefill.

    Seconds are predictions of the proxy's model of its engines, and exist under a policy that looks at
    prompts (conductor, prefix_affinity) once it has learnt from 16 prompts.
    """
    from moonpool.core.config.config import load
    from moonpool.core.service.http_tls import own_proxy_context, own_proxy_url
    from moonpool.disagg_proxy.tools.savings import read_savings
    from moonpool.launch.up import read_state

    urls, tls = list(url or ()), None
    if not urls:
        settings, up = load(config), read_state()
        urls = [up.proxy.url if up is not None and up.proxy is not None else own_proxy_url(settings)]
        tls = own_proxy_context(settings)
    found = read_savings(urls, tls)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found.as_dict()), indent=2).decode())
        return
    for label, text in lines(found):
        print(f"{label:42} {text}")


def lines(found: Savings) -> list[tuple[str, str]]:
    """What is shown: labels and values."""
    made = [("prompt tokens not computed", f"{found.saved_tokens:,}")]
    if found.told_tokens:
        made.append(
            ("of the prompt tokens that engines report", f"{found.cached_tokens / found.told_tokens:.1%}")
        )
    if not found.priced_prompts:
        return [*made, ("seconds of prefill saved", "not known yet (see moonpool saved --help)")]
    made.append(
        ("seconds of prefill saved, predicted", f"{found.saved_s:,.2f} of {found.without_reuse_s:,.2f} s")
    )
    made.append(("of so many prompts", f"{found.priced_prompts:,}"))
    if found.ttft_s is not None and found.recomputation_s is not None:
        made.append(("mean TTFT of streams", f"{found.ttft_s:.3f} s"))
        made.append(("their recomputation, predicted, mean", f"{found.recomputation_s:.3f} s"))
    return made
