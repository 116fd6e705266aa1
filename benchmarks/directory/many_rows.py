"""A real master with an eighth of 10^9 rows, as one of 8 owners holds: its memory, its CPU, its restart."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.directory import servers
from benchmarks.processes import PYTHON, Talker
from benchmarks.report import Row
from benchmarks.store.servers import Setting, runtime
from moonpool.core.bench.load import cpu_seconds

ROWS, QUICK_ROWS = 125_000_000, 2_000_000
NODES = 16
LOOKED_UP = 0.1  # of the rows
START_TIMEOUT_S = 60.0
TIMEOUT_S = 3600.0
BYTES, PUT_US, LOOKUP_US, HEARD_PER_S = 40.0, 1.0, 0.5, 2e6


def measure(setting: Setting, stack: ExitStack, quick: bool) -> list[Row]:
    """Raises Failed."""
    wanted = QUICK_ROWS if quick else ROWS
    more = {"MOONPOOL_MASTER_KEYS_MAX": str(2 * wanted)}
    address, master = servers.lone_master(setting, stack, more)
    arguments = [address, str(NODES), str(wanted)]
    log = setting.log("holders")
    holders = Talker(PYTHON, "benchmarks.directory.holders", arguments, log, runtime(setting))
    stack.callback(holders.close)
    held = holders.receive(START_TIMEOUT_S)["rows"]
    what = f"[{held / 1e6:.3g} M rows of {NODES} nodes]"

    def cpu_us(request: dict[str, Any]) -> float:
        before_s = cpu_seconds([master.pid])
        answer = holders.ask(request, TIMEOUT_S)
        return (cpu_seconds([master.pid]) - before_s) * 1e6 / float(answer["keys"])

    empty = servers.private_bytes(master)
    put_us = cpu_us({"do": "put"})
    of_row = (servers.private_bytes(master) - empty) / held
    look_up_us = cpu_us({"do": "look_up", "keys": int(held * LOOKED_UP)})
    master.kill()
    servers.start_master(setting, stack, address, more)
    heard = holders.ask({"do": "tell"}, TIMEOUT_S)

    def at_most(work: str, ours: float, unit: str, most: float) -> Row:
        return Row(f"{work} {what}", ours, unit, {}, None, f"<= {most:g} {unit}", ours <= most)

    per_s = heard["keys"] / heard["seconds"]
    return [
        at_most("memory of the master for each row", of_row, "B", BYTES),
        at_most("a row that a node tells of a put: CPU of the master", put_us, "us", PUT_US),
        at_most("lookup of a key: CPU of the master", look_up_us, "us", LOOKUP_US),
        Row(
            f"heard again from the nodes after kill -9, without a standby {what}",
            per_s / 1e6,
            "M rows/s",
            {},
            None,
            f">= {HEARD_PER_S / 1e6:g} M rows/s",
            per_s >= HEARD_PER_S,
        ),
    ]
