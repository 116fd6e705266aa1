"""The conductor beside other routers' policies, in the simulator, on public traces: every target in one
command.

    python -m benchmarks.conductor_vs_rivals --trace-dir DIR [--quick] [--processes N] [--seeds N]
        [--parts NAME,...] [--json FILE]

DIR holds conversation_trace.jsonl and synthetic_trace.jsonl as published with the Mooncake paper (FAST '25)
at github.com/kvcache-ai/Mooncake, folder FAST25-release/traces; MOONPOOL_TRACES names it, too. A figure from
here proves as much as the simulator's model does (docs/simulator.md). The same seed gives the same figures.
Who has a gate, a queue or our pool stands in the row or above the column: as shipped the rivals have none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from benchmarks.conductor import (
    capacity,
    end_to_end,
    first_token,
    fleet_decision,
    hit_rate,
    late_reports,
    overload,
    pool_links,
    proxies,
    scale,
    short_prompts,
    whole_engines,
)
from benchmarks.conductor.bed import PUBLISHED, Bed
from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json

PARTS: dict[str, Callable[[Bed], list[Row]]] = {
    "first_token": first_token.rows,
    "short_prompts": short_prompts.rows,
    "whole_engines": whole_engines.rows,
    "late_reports": late_reports.rows,
    "proxies": proxies.rows,
    "pool_links": pool_links.rows,
    "capacity": capacity.rows,
    "overload": overload.rows,
    "end_to_end": end_to_end.rows,
    "hit_rate": hit_rate.rows,
    "scale": scale.rows,
    "decision": fleet_decision.rows,
}


def main() -> None:
    parser = make_parser(__doc__, "under 50 s: 3,000 requests, one seed")
    parser.add_argument("--trace-dir", type=Path, metavar="DIR", default=os.environ.get("MOONPOOL_TRACES"))
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="simulations at the same time")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="at most so many for a row")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help=", ".join(PARTS))
    options = parser.parse_args()
    if options.trace_dir is None:
        parser.error(f"--trace-dir is needed; the traces are published at {PUBLISHED}")
    parts = options.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts knows {', '.join(PARTS)}")
    if options.seeds < 1:
        parser.error("--seeds must be 1 or more")
    bed = Bed(Path(options.trace_dir), quick=options.quick, processes=options.processes, seeds=options.seeds)
    rows = []
    for name in parts:
        found = PARTS[name](bed)
        for _, table in groupby(found, key=lambda row: tuple(row.peers)):
            print_table(name.replace("_", " "), list(table), "limit")
        rows += found
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
