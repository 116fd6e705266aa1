"""A real master with the nodes and clients of a large pool (crowd.py): its CPU, and what its clients hear.

The processes of a host ask by their node, which has one connection to the master for them, and shares the
list of members with them in memory. In a pool of this size a process takes a list that is up to 5 s old
(members_cache.hpp), so that a host asks no more often for all of its processes than for one. Hosts are
played, then, and not processes: a question of each every 5 s.
"""

from __future__ import annotations

import resource
from contextlib import ExitStack

from benchmarks.directory import servers
from benchmarks.processes import PYTHON, Failed, Talker
from benchmarks.report import Row
from benchmarks.store.servers import Setting, runtime
from moonpool.core.bench.load import cpu_seconds

NODES, SECONDS, EVERY_S = 10_000, 20.0, 5.0
QUICK = (500, 5.0, 1.0)
PROCESSES_OF_A_HOST = 8
LOST = 50  # of the nodes, the ones that end in turns
DRIVERS = 2  # processes that play clients
START_TIMEOUT_S = 300.0
KEPT_UP = 0.9  # of the questions that were to be asked: with fewer the figure would be too good


def connections_of(nodes: int) -> int:
    """Of the hosts: one each, or as many as open files allow beside those of the nodes, and what the master
    keeps for further ones."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = files - files // 16 - nodes - 256
    return nodes // -(-nodes // max(most, 1))


def measure(setting: Setting, stack: ExitStack, quick: bool) -> list[Row]:
    """Raises Failed."""
    nodes, seconds, every_s = QUICK if quick else (NODES, SECONDS, EVERY_S)
    connections = connections_of(nodes)
    address, master = servers.lone_master(setting, stack)
    crowds: list[Talker] = []

    def crowd(role: str, *counts: int) -> Talker:
        log = setting.log(f"crowd-{len(crowds)}")
        arguments = [role, address, *map(str, counts)]
        crowds.append(Talker(PYTHON, "benchmarks.directory.crowd", arguments, log, runtime(setting)))
        stack.callback(crowds[-1].close)
        return crowds[-1]

    crowd("nodes", 0, nodes - LOST).wait_ready(START_TIMEOUT_S)
    lost = crowd("nodes", nodes - LOST, LOST)  # in a process that has time for it
    lost.wait_ready(START_TIMEOUT_S)
    askers = [crowd("clients", connections // DRIVERS, nodes // DRIVERS) for _ in range(DRIVERS)]
    for each in askers:
        each.wait_ready(START_TIMEOUT_S)
    before_s = cpu_seconds([master.pid])
    lost.tell({"lose": seconds})
    for each in askers:
        each.tell({"ask": seconds, "every_s": every_s})
    heard = [each.receive(seconds + START_TIMEOUT_S) for each in askers]
    beats = lost.receive(seconds + START_TIMEOUT_S)
    share = (cpu_seconds([master.pid]) - before_s) / seconds
    per_s = sum(each["questions_per_s"] for each in heard)
    if per_s < nodes / every_s * KEPT_UP:
        wanted = nodes / every_s
        raise Failed(f"the hosts asked {per_s:,.0f} times a second, not {wanted:,.0f}: the machine is busy")
    bytes_each = sum(each["bytes"] for each in heard) / sum(each["epochs"] for each in heard)
    whole = heard[0]["whole_bytes"]
    what = (
        f"{nodes:,} nodes, {nodes * PROCESSES_OF_A_HOST:,} processes that ask by their nodes, on "
        f"{connections:,} connections, a node lost every second "
        f"(a beat of each node every {beats['beat_s']:g} s, {per_s:,.0f} questions a second)"
    )

    def row(work: str, figure: float, unit: str, at_most: float) -> Row:
        met = None if quick else figure <= at_most  # a small pool is no proof of a large one
        return Row(work, figure, unit, {}, None, f"<= {at_most:g} {unit}", met)

    return [
        row(f"CPU of the master [{what}]", share, "cores", 0.5),
        row(f"what a host hears of a change [the same; of all nodes: {whole:,} B]", bytes_each, "B", 200),
    ]
