"""SGLang's HiCache over our backend, beside SGLang's own ``mooncake`` backend over Mooncake and our drop-in.

    python -m benchmarks.sglang_vs_peers --peers-venv DIR [--sglang-python PYTHON] [--quick] [--json FILE]

Two parts. *storage*: each backend in a process of its own over SGLang's own host pool class, driven as
HiCache drives it. *server*: one real SGLang server, to which the backends are attached in turn; what is timed
are the calls that SGLang itself makes. In each round each backend does the same work in turn; the first round
is not counted; figures are medians. README.md explains the rows.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import peers
from benchmarks.options import MADE, make_parser
from benchmarks.processes import Failed, end_on_sigterm
from benchmarks.report import Row, print_table, write_json
from benchmarks.sglang.runs import Server, Storage
from benchmarks.store.servers import Setting

PARTS = ("storage", "server")


def main() -> None:
    parser = make_parser(__doc__, "under 240 s; figures are rougher", MADE)
    parser.add_argument(
        "--sglang-python",
        default=os.environ.get("MOONPOOL_SGLANG_PYTHON"),
        metavar="PYTHON",
        help="(MOONPOOL_SGLANG_PYTHON)",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: both")
    options = parser.parse_args()
    if not options.sglang_python:
        parser.error("which Python has SGLang? --sglang-python, or MOONPOOL_SGLANG_PYTHON")
    end_on_sigterm()
    started_s = time.monotonic()
    peers_python = peers.python(options.peers_venv) if options.peers_venv else None
    table: list[Row] = []
    for kind, title in ((Storage, "HiCache's backends alone"), (Server, "In one real SGLang server")):
        if kind.part not in options.parts:
            continue
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
            setting = Setting(folder, peers_python, tcp=False)
            try:
                rows = kind(setting, options.sglang_python, stack).rows(3 if options.quick else 9)
            except Failed as error:
                sys.exit(f"sglang_vs_peers: {error}")
        print_table(f"{title}, medians (in brackets: how many times better ours is)", rows)
        print(f"{kind.part}: after {time.monotonic() - started_s:.0f} s", file=sys.stderr)
        table += rows
    write_json(options.json, table)
    met = [row.met for row in table]
    print(f"{met.count(True)} targets met, {met.count(False)} missed")


if __name__ == "__main__":
    main()
