"""What every benchmark takes: --quick, --peers-venv DIR and --json FILE."""

from __future__ import annotations

import argparse
from pathlib import Path

NO_PEERS = "taken as by all benchmarks; this one's peers, if any, are in no venv"


def add_options(parser: argparse.ArgumentParser, quick: str, peers: str = NO_PEERS) -> None:
    """quick, peers: the help of --quick and of --peers-venv."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--peers-venv", type=Path, metavar="DIR", help=peers)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
