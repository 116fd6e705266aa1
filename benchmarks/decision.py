"""What a decision costs by the size of the fleet, beside Dynamo's SelectionService.

    python -m benchmarks.decision [--peers-venv DIR] [--quick] [--json FILE]

CPU time of one decision, medians over rounds; README.md explains the rows. The peer needs a venv with
ai-dynamo-runtime; without one its column says "not run".
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.conductor import decision
from benchmarks.options import make_parser
from benchmarks.report import NOT_RUN, Row, print_table, write_json

FLEETS = (8, 64, 256, 1000)
TOKENS = 4608
BLOCK_TOKENS = 64
BLOCKS_EACH = 128
MOST_US = 400.0  # whatever the size of the fleet
NATIVE_CALLS_MAX = 2
PEER = "dynamo"
PEER_SCRIPT = Path(__file__).parent / "conductor" / "selection_service.py"
PEER_TIMEOUT_S = 120


def peer_us(venv: str | None, engines: int) -> float | str:
    if venv is None:
        return NOT_RUN
    command = [f"{venv}/bin/python", str(PEER_SCRIPT), str(engines), str(TOKENS), str(BLOCK_TOKENS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
    if result.returncode != 0:
        print(f"{PEER}: {result.stderr.strip().splitlines()[-1:]}")
        return NOT_RUN
    return float(result.stdout.splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__, "fewer rounds", "a venv with ai-dynamo-runtime")
    options = parser.parse_args()
    rows = []
    for engines in FLEETS:
        rounds = 5 if options.quick else 21
        ours = decision.measure(engines, TOKENS, BLOCK_TOKENS, BLOCKS_EACH, rounds, streams=False)
        peer = peer_us(options.peers_venv, engines)
        work = f"decision, {TOKENS:,} tokens [{engines:,} engines]"
        rows.append(
            Row(work, ours.cpu_us, "us", {PEER: peer}, None, f"<= {MOST_US:g}", ours.cpu_us <= MOST_US)
        )
        work, calls = f"calls of C++ functions, the same [{engines:,} engines]", ours.native_calls
        rows.append(Row(work, calls, "calls", {}, None, f"<= {NATIVE_CALLS_MAX}", calls <= NATIVE_CALLS_MAX))
    print_table("decisions", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
