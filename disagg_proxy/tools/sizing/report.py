"""A plan for people and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from moonpool.core.config.units import format_size
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS
from moonpool.disagg_proxy.tools.sizing.model import Model

USUAL_LINK_BYTES_S = 25e9 / 8  # judged where no link is given
LONGEST = 1 << 20  # tokens


@dataclass(frozen=True, slots=True)
class Compute:
    """name: of the GPUs, for people; operations_s: of all of them together, of which prefill reaches
    ``share``."""

    name: str
    operations_s: float
    share: float = 1.0

    @property
    def reached_s(self) -> float:
        """Operations a second that prefill reaches: an estimate, unless ``share`` was measured."""
        return self.operations_s * self.share


@dataclass(frozen=True, slots=True)
class Plan:
    """prefixes: tokens. link_bytes_s: 0 where none is asked about. pools: bytes, with the share of the
    trace's tokens that each would have; NaN without a trace. endless: of a pool without end."""

    model: Model
    compute: Compute
    prefixes: Sequence[int]
    link_bytes_s: float
    pools: Sequence[tuple[int, float]]
    trace: str = ""
    endless: float = math.nan


def pool_blocks(model: Model, size: int) -> int:
    """Blocks of 512 tokens that a pool of so many bytes holds."""
    return size // model.kv_bytes(BLOCK_TOKENS)


def pool_tokens(model: Model, size: int) -> int:
    """Of prompts, in whole blocks."""
    return pool_blocks(model, size) * BLOCK_TOKENS


def show(plan: Plan, console: Console) -> None:
    """Prints the plan for people, in five parts: the model, its KV, its links, advice, sizes of a pool."""
    model = plan.model
    for part in (
        f"{model.name}: {model.attention}, {_layers(model)}",
        f"KV of a token: {model.token_bytes:,} bytes at {model.value_bytes} a value{_sliding(model)}",
        _links(plan),
        _advice(plan),
        _pools(plan),
    ):
        console.print(part, highlight=False)


def as_json(plan: Plan) -> str:
    """{"model", "kv_bytes_per_token", ..., "prefixes": [...], "pools": [...]}; NaN becomes null."""
    model = plan.model
    return json.dumps(
        {
            "model": model.name,
            "attention": model.attention,
            "value_bytes": model.value_bytes,
            "kv_bytes_per_token": model.token_bytes,
            "layers": [
                {
                    "count": layer.count,
                    "kv_bytes_per_token": layer.kv_values * model.value_bytes,
                    "window": layer.window or None,
                }
                for layer in model.layers
            ],
            "operations_per_second": plan.compute.reached_s,
            "prefixes": [_prefix(plan, tokens) for tokens in plan.prefixes],
            "trace": plan.trace or None,
            "hits_endless": _number(plan.endless),
            "pools": [
                {"bytes": size, "tokens": pool_tokens(model, size), "hits": _number(hits)}
                for size, hits in plan.pools
            ],
        },
        indent=1,
    )


def _prefix(plan: Plan, tokens: int) -> dict[str, Any]:
    model, speed = plan.model, plan.compute.reached_s
    size = model.kv_bytes(tokens)
    return {
        "tokens": tokens,
        "bytes": size,
        "compute_s": model.operations(tokens) / speed,
        "link_bytes_per_second": model.link_bytes_s(tokens, speed),
        "fetch_s": size / plan.link_bytes_s if plan.link_bytes_s else None,
    }


def _links(plan: Plan) -> Table:
    compute = plan.compute
    made = Table(
        title=f"prefill on {compute.name} at {compute.share:.0%} of its peak: "
        f"{compute.reached_s / 1e12:,.0f} TFLOP/s",
        title_justify="left",
        caption="link: from this speed on fetching a prefix from another host is faster than computing it",
        caption_justify="left",
    )
    for name in ("prefix", "KV", "compute s", "link GB/s", "Gbit/s"):
        made.add_column(name, justify="right", no_wrap=True)
    if plan.link_bytes_s:
        made.add_column(f"fetch at {plan.link_bytes_s / 1e9:g} GB/s", justify="right", no_wrap=True)
    for tokens in plan.prefixes:
        row = _prefix(plan, tokens)
        link = row["link_bytes_per_second"]
        cells = [f"{tokens:,}", format_size(row["bytes"]), f"{row['compute_s']:.3f}", f"{link / 1e9:.2f}"]
        cells.append(f"{link * 8 / 1e9:.1f}")
        if plan.link_bytes_s:
            times = row["compute_s"] / row["fetch_s"]
            cells.append(
                f"{row['fetch_s']:.3f} s, {times:.1f}x" if times > 1 else f"{row['fetch_s']:.3f} s, no"
            )
        made.add_row(*cells)
    return made


def fetch_from_tokens(plan: Plan, link_bytes_s: float) -> int:
    """From how many tokens on fetching a prefix over such a link takes no longer than computing it; 0: not up
    to LONGEST. A longer prefix needs a slower link, since computing grows with the square."""
    low, high = 1, LONGEST
    if plan.model.link_bytes_s(high, plan.compute.reached_s) > link_bytes_s:
        return 0
    while low < high:
        middle = (low + high) // 2
        if plan.model.link_bytes_s(middle, plan.compute.reached_s) > link_bytes_s:
            low = middle + 1
        else:
            high = middle
    return low


def _advice(plan: Plan) -> str:
    """The verdict of the table for one link, in a sentence."""
    link = plan.link_bytes_s or USUAL_LINK_BYTES_S
    tokens = fetch_from_tokens(plan, link)
    over = f"Over a link of {link * 8 / 1e9:g} Gbit/s"
    if tokens == 0:
        return f"{over} computing beats fetching at every length up to {LONGEST:,} tokens."
    if tokens == 1:
        return f"{over} fetching beats computing at every length."
    return f"{over} fetching beats computing from {tokens:,} tokens on."


def _pools(plan: Plan) -> Table:
    made = Table()
    made.add_column("pool", justify="right", no_wrap=True)
    made.add_column("tokens", justify="right", no_wrap=True)
    if plan.trace:
        made.caption = f"hit rate: of the prompt tokens of {plan.trace}, least recently used out first"
        made.add_column("hit rate", justify="right", no_wrap=True)
    for size, hits in plan.pools:
        cells = [format_size(size), f"{pool_tokens(plan.model, size):,}"]
        made.add_row(*cells, *([f"{hits:.1%}"] if plan.trace else []))
    if plan.trace:
        made.add_row("endless", "", f"{plan.endless:.1%}")
    return made


def _layers(model: Model) -> str:
    parts = []
    for layer in model.layers:
        what = (
            "without KV" if not layer.kv_values else f"{layer.kv_values * model.value_bytes:,} bytes a token"
        )
        if layer.window:
            what += f" of the last {layer.window:,}"
        parts.append(
            f"{layer.count} layers {what}" if layer.kv_values or layer.window else f"{layer.count} {what}"
        )
    return "; ".join(parts)


def _sliding(model: Model) -> str:
    windows = sorted({layer.window for layer in model.layers if layer.window})
    if not windows:
        return ""
    most = sum(layer.count * layer.kv_values * layer.window * model.value_bytes for layer in model.layers)
    return f", and at most {format_size(most)} a prompt in layers with a window"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
