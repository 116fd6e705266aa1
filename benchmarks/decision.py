"""What a decision costs by the size of the fleet, beside Dynamo's SelectionService.

    python -m benchmarks.decision [--peers-venv DIR] [--quick] [--json FILE]

CPU time of one decision, medians over rounds; README.md explains the rows. The peer needs a venv with
ai-dynamo-runtime; without one its column says "not run".
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from benchmarks.conductor import decision
from benchmarks.report import Row, print_table, write_json

FLEETS = (8, 64, 256, 1000)
TOKENS = 4608
BLOCK_TOKENS = 64
BLOCKS_EACH = 128
MOST_US = 400.0  # whatever the size of the fleet
PEER = "dynamo"
PEER_SCRIPT = Path(__file__).parent / "conductor" / "selection_service.py"
PEER_TIMEOUT_S = 120


def peer_us(venv: str | None, engines: int) -> float | str:
    if venv is None:
        return "not run"
    command = [f"{venv}/bin/python", str(PEER_SCRIPT), str(engines), str(TOKENS), str(BLOCK_TOKENS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
    if result.returncode != 0:
        print(f"{PEER}: {result.stderr.strip().splitlines()[-1:]}")
        return "not run"
    return float(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers-venv", metavar="DIR", help="a venv with ai-dynamo-runtime")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for engines in FLEETS:
        rounds = 5 if options.quick else 21
        ours = decision.measure(engines, TOKENS, BLOCK_TOKENS, BLOCKS_EACH, rounds, streams=False)
        peer = peer_us(options.peers_venv, engines)
        work = f"decision, {TOKENS:,} tokens [{engines:,} engines]"
        rows.append(Row(work, ours, "us", {PEER: peer}, None, f"<= {MOST_US:g}", ours <= MOST_US))
    print_table("decisions", rows)
    if options.json is not None:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
