"""Copies between a CUDA card and the pool, and between two processes on one card, beside what the card does.

    python -m benchmarks.gpu_copies [--quick] [--json FILE]

Needs a card, its driver and about 40 GiB of host memory; no torch and no engine. The KV cache has the shape
of an 8B model: 32 layers, 8 KV heads, blocks of 16 tokens, 512 bytes for a token of a head; an object of the
pool is one head of one block, 256 KiB. Every kind is measured once in each round, the limits between them;
the bytes of a first round are compared.

Loads: from a node's memory to blocks of the card, by the pinned ring (4 threads), or by the card's own reads
of the node's pinned memory (``gpu_pin``). Saves: "blocks free" when the last block may be overwritten, "in
the pool" when others find the last object. Hand-over: read over CUDA IPC; the limit is one copy of as many
bytes within the card. CPU seconds are those of both processes.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu.card import LIBRARY, Card
from benchmarks.gpu.handover import Reader
from benchmarks.gpu.handover_owner import contents
from benchmarks.gpu.kv_cache import BLOCK_BYTES, BLOCK_TOKENS, HEADS, LAYERS, ORDERS, KvCache
from benchmarks.gpu.pool_copies import FORMS, PoolCopies, Times
from benchmarks.options import make_parser
from benchmarks.processes import PYTHON, Failed, Process, Talker, end_on_sigterm
from benchmarks.report import Row, print_table, write_json
from moonpool import _native
from moonpool.core.config import paths
from moonpool.core.errors import Error

TOKEN_BYTES = LAYERS * BLOCK_BYTES // BLOCK_TOKENS
LIMIT_BYTES = 1 << 30
LOAD_SHARES = {"ring": 0.8, "pinned": 0.9}
LOAD_CPU = {"ring": 0.15, "pinned": 0.02}
SAVE_SHARE, STORED_GB_S = 0.9, 10.0
HANDOVER_SHARES = {True: 0.8, False: 0.6}
SLICES_MAX, SLICES_OF_TOKEN = 1 << 20, LAYERS * HEADS  # of a transfer; between unlike layouts


class Run:
    def __init__(self, folder: Path, library: str, tokens: list[int], stack: ExitStack) -> None:
        self.folder, self.library, self.tokens, self.stack = folder, library, tokens, stack
        self.card = Card(library)
        blocks = max(tokens) // BLOCK_TOKENS
        self.source, self.target = (
            KvCache(self.card.allocate(LAYERS * blocks * BLOCK_BYTES), blocks) for _ in range(2)
        )
        self.limit_host = self.card.pinned(min(LIMIT_BYTES, self.source.size))
        self.source.fill(self.card, self.limit_host, seed=1)
        self.limits: dict[str, list[float]] = defaultdict(list)

    def measure_limits(self) -> None:
        """Copies of pinned memory in pieces of 64 MiB."""
        host, size = self.limit_host.ctypes.data, self.limit_host.size
        self.limits["load"].append(size / self.card.copy_s(self.target.address, host, size) / 1e9)
        self.limits["save"].append(size / self.card.copy_s(host, self.source.address, size) / 1e9)

    def node(self) -> tuple[str, bytes, int]:
        """Starts a node; its socket, its token and its pid."""
        path = self.folder / "node.sock"
        gib = max(2, 5 * self.source.size >> 30)
        command: list[str | Path] = [
            *(PYTHON, "-m", "moonpool", "node", "--dram", f"{gib}GiB"),
            *("--socket", path, "--http", "off", "--listen", "off"),
        ]
        node = Process(command, self.folder / "node.log")
        self.stack.callback(node.stop)
        node.wait_for_port(socket.AF_UNIX, str(path))
        token = paths.client_token(str(path))
        if token is None:
            raise Failed("the node has no token")
        return str(path), token, node.pid

    def pool_rows(self, rounds: int) -> list[Row]:
        path, token, pid = self.node()
        copies = PoolCopies(self.card, self.source, self.target, path, token, pid)
        self.stack.callback(copies.close)
        loads: dict[tuple[str, str, int], Times] = defaultdict(Times)
        staged: dict[str, Times] = defaultdict(Times)
        stored: dict[str, Times] = defaultdict(Times)
        names = {order: copies.save(order, max(self.tokens), Times(), Times()) for order in ORDERS}
        say(copies.pin())
        small = min(self.tokens)
        for number in range(rounds + 1):
            self.measure_limits()
            for order in ORDERS:
                for form in FORMS:
                    for tokens in self.tokens:
                        first = names[order][: len(names[order]) // max(self.tokens) * tokens]
                        times = loads[order, form, tokens] if number else Times()
                        copies.load(order, form, tokens, first, times, check=not number)
                free, there = (staged[order], stored[order]) if number else (Times(), Times())
                copies.save(order, small, free, there)
            say(f"round {number} of {rounds}")
        down, up = (statistics.median(self.limits[way][1:]) for way in ("load", "save"))
        rows = []
        for (order, form, tokens), times in loads.items():
            size = tokens * TOKEN_BYTES
            work = f"load, {form}, {order} [{tokens:,} tokens, {size / 1e9:.2g} GB]"
            share, cpu = LOAD_SHARES[form], LOAD_CPU[form]
            rate, spent = times.gb_s(size), times.cpu_s_gb(size)
            target = f">= {share:g}x pinned copies"
            rows.append(Row(work, rate, "GB/s", {}, down, target, rate >= share * down))
            rows.append(Row(f"CPU of a {work}", spent, "s/GB", {}, None, f"<= {cpu:g}", spent <= cpu))
        for order in ORDERS:
            size = small * TOKEN_BYTES
            work = f"{order} [{small:,} tokens, {size / 1e9:.2g} GB]"
            free, there = staged[order].gb_s(size), stored[order].gb_s(size)
            spent, target = stored[order].cpu_s_gb(size), f">= {SAVE_SHARE:g}x pinned copies"
            met = there >= STORED_GB_S
            rows += [
                Row(f"save, blocks free, {work}", free, "GB/s", {}, up, target, free >= SAVE_SHARE * up),
                Row(f"save, in the pool, {work}", there, "GB/s", {}, up, f">= {STORED_GB_S:g} GB/s", met),
                Row(f"CPU of a save, {work}", spent, "s/GB", {}, None, "", None),
            ]
        return rows

    def handover_rows(self, rounds: int) -> list[Row]:
        tokens, token = min(self.tokens), secrets.token_bytes(16)
        owner_blocks = 2 * tokens // BLOCK_TOKENS
        driver = [self.library] if self.library != LIBRARY else []
        owner = Talker(
            PYTHON,
            "benchmarks.gpu.handover_owner",
            [str(owner_blocks), token.hex(), *driver],
            self.folder / "owner.log",
        )
        self.stack.callback(owner.close)
        told = owner.receive(60.0)
        there = KvCache(told["cache"], owner_blocks)
        reader = Reader(self.card, self.target, there, told["address"], token)
        self.stack.callback(reader.close)
        values, rows = contents(owner_blocks), []
        for alike, layout in ((True, "like layouts"), (False, "unlike layouts")):
            pieces = reader.pieces(
                tokens if alike else min(tokens, SLICES_MAX // SLICES_OF_TOKEN), alike=alike
            )
            size = len(pieces[0]) * pieces[2]
            times, limits = Times(), []
            reader.read(pieces, [])
            reader.check(pieces, values)
            for _ in range(rounds):
                spent_s, cpu_s = reader.read(pieces, [os.getpid(), told["pid"]])
                times.spent_s.append(spent_s)
                times.cpu_s.append(cpu_s)
                limits.append(size / self.card.copy_s(self.target.address, self.source.address, size) / 1e9)
            work = (
                f"hand-over on one card, {layout} [{size / 1e9:.2g} GB, {len(pieces[0]):,} x {pieces[2]:,} B]"
            )
            rate, limit, share = times.gb_s(size), statistics.median(limits), HANDOVER_SHARES[alike]
            target = f">= {share:g}x a copy in the card"
            rows.append(Row(work, rate, "GB/s", {}, limit, target, rate >= share * limit))
            rows.append(Row(f"CPU of a {work}", times.cpu_s_gb(size), "s/GB", {}, None, "", None))
        return rows


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = make_parser(__doc__, "fewer rounds, no load of 32k tokens; under 50 s")
    parser.add_argument("--driver", default=LIBRARY, metavar="FILE", help="the driver's library")
    parser.add_argument("--tokens", type=int, nargs="*", help="of the loads; default: 8192 32768")
    options = parser.parse_args()
    end_on_sigterm()
    tokens = options.tokens or ([8192] if options.quick else [8192, 32768])
    rounds = 3 if options.quick else 7
    if options.driver != LIBRARY:
        _native.use_driver_for_tests(options.driver)
    table: list[Row] = []
    failed = ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        os.environ["MOONPOOL_RUNTIME_DIR"] = str(folder)
        try:
            run = Run(folder, options.driver, tokens, stack)
            say(f"{run.card.name}, driver {run.card.driver}")
            for part in (run.handover_rows, run.pool_rows):
                try:
                    table += part(rounds)
                except (Failed, Error) as error:
                    failed += f"gpu_copies: {error}\n"
        except Failed as error:
            sys.exit(f"gpu_copies: {error}")
    if table:
        print_table(f"Copies of a KV cache on {run.card.name}, medians of {rounds} rounds", table, "limit")
    write_json(options.json, table)
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    main()
