"""The command line of every benchmark: --quick, --peers-venv DIR and --json FILE."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NO_PEERS = "taken as by all benchmarks; this one's peers, if any, are in no venv"
MADE = "environment with the peers; made if missing"


def make_parser(description: str | None, quick: str, peers: str = NO_PEERS) -> argparse.ArgumentParser:
    """quick, peers: the help of --quick and of --peers-venv."""
    spec = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {spec.name.removesuffix('.__main__')}" if spec else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--peers-venv", type=Path, metavar="DIR", help=peers)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser
