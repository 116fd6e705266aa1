"""Hostile scenarios against real processes, one row each with what was measured, the target, and whether it
is met.

    python -m benchmarks.hostile [--only NAME ...] [--quick] [--json FILE]

Strangers, tenants, engines and peers that do what they can (benchmarks/hostile/); names of scenarios are
those of --help. What this machine does not allow is left out, and the reason is said. All addresses are of
the loopback: one attacker is 127.0.0.2, others are served at 127.0.0.3.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.hostile.bed import LeftOut, Setting
from benchmarks.hostile.engines import event_flood, killers, stopped_engine
from benchmarks.hostile.faults import frozen_threads, too_much_memory, two_stopped
from benchmarks.hostile.large_bodies import large_bodies
from benchmarks.hostile.nodes import connection_floods, other_hosts, replay_askers
from benchmarks.hostile.strangers import forged, held_bodies
from benchmarks.hostile.tenant_memory import tenant_memory
from benchmarks.hostile.tenants import priority, tenants
from benchmarks.options import make_parser
from benchmarks.processes import end_on_sigterm
from benchmarks.report import Row, print_table, write_json

SCENARIOS: dict[str, Callable[[Setting], list[Row]]] = {
    "held_bodies": held_bodies,
    "tenants": tenants,
    "priority": priority,
    "tenant_memory": tenant_memory,
    "forged": forged,
    "large_bodies": large_bodies,
    "killers": killers,
    "stopped_engine": stopped_engine,
    "event_flood": event_flood,
    "replay_askers": replay_askers,
    "other_hosts": other_hosts,
    "connection_floods": connection_floods,
    "frozen_threads": frozen_threads,
    "too_much_memory": too_much_memory,
    "two_stopped": two_stopped,
}


def main() -> int:
    """1 where a scenario did not run to its end."""
    parser = make_parser(__doc__, "seconds in place of a minute, smaller bodies, which are not judged")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    parser.epilog = f"scenarios: {', '.join(SCENARIOS)}"
    options = parser.parse_args()
    end_on_sigterm()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows: list[Row] = []
    failed = False
    for name in options.only:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder, ExitStack() as stack:
            os.chmod(folder, 0o700)
            try:
                rows += SCENARIOS[name](Setting(Path(folder), options.quick, stack))
                print(f"{name}: {time.monotonic() - began_s:.1f} s", flush=True)
            except LeftOut as why:
                print(f"{name}: left out: {why}", flush=True)
            except Exception as why:
                failed = True
                print(f"{name}: failed: {why}", flush=True)
                traceback.print_exc()
    if rows:
        print_table("Hostile scenarios", rows, "without")
    write_json(options.json, rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
