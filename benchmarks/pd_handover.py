"""What a hand-over from a prefill to a decode engine takes, beside vLLM's in-tree NixlConnector.

    python -m benchmarks.pd_handover [--nixl DIR | --peers-venv DIR] [--vllm-python PYTHON] [--quick]
        [--json FILE]

--nixl DIR: a folder with NIXL for that Python, made by

    PYTHON -m pip install --no-deps --target DIR nixl==1.5.1 nixl-cu12==1.5.1

--peers-venv DIR: a venv with the same two. Without either our figures stand alone. Four real engines in four
processes on one host: a prefill and a decode engine with our connector, without a pool, and a pair with NIXL
over UCX as it runs on CPU. Each round computes a new prompt on each prefill engine and hands it over, the
pairs in turn. Time: from the request's arrival at the decode engine until its scheduler knows that the KV is
here. CPU: of both processes, user and system, in that time, and at the prefill engine until its blocks are
free again. The tokens that decode goes on with must be equal between the pairs. Figures are medians; the
first rounds, after which all KV memory was touched once, are not counted.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.fleet import Failed, Fleet, prompt, ready, vllm_python
from benchmarks.options import make_parser
from benchmarks.processes import Talker, end_on_sigterm
from benchmarks.report import NOT_RUN, Row, print_table, write_json

LENGTHS = (200, 1000, 3500)
TARGET = 0.8
DECODE_TOKENS = 8
GIVE_TIMEOUT_S = 60.0
OURS = {
    "kv_connector": "Mooncake",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"backends": ["UCX"]},
}
MEMORY = {"kv_cache_memory_bytes": 64 << 20}  # 512 blocks, all of them used in the first four rounds
WARM_UP_ROUNDS = 5
NIXL_PORTS = (15601, 15611)


@dataclass
class Pair:
    """seconds, cpu_s: of each hand-over, by prompt length."""

    prefill: Talker
    decode: Talker
    seconds: dict[int, list[float]] = field(default_factory=dict)
    cpu_s: dict[int, list[float]] = field(default_factory=dict)

    def hand_over(self, tokens: list[int], *, counted: bool) -> list[int]:
        """One prompt. Returns what decode says to it. Raises Failed."""
        params = self.prefill.ask({"do": "prefill", "prompt": tokens})
        self.prefill.tell({"do": "give"})
        taken = self.decode.ask(
            {"do": "take_over", "prompt": tokens, "params": params, "tokens": DECODE_TOKENS}
        )
        given_cpu_s = self.prefill.receive(GIVE_TIMEOUT_S)
        if taken["tokens_here"] < len(tokens) - 1:
            raise self.decode.process.failed(
                f"was handed {taken['tokens_here']} of {len(tokens)} tokens over"
            )
        if counted:
            self.seconds.setdefault(len(tokens), []).append(taken["handover_s"])
            self.cpu_s.setdefault(len(tokens), []).append(taken["cpu_s"] + given_cpu_s)
        answer: list[int] = taken["tokens"]
        return answer


def pairs_of(fleet: Fleet, nixl: Path | None) -> dict[str, Pair]:
    """Starts all engines. Raises Failed."""
    pairs = {"ours": Pair(*(fleet.engine(f"ours-{side}", OURS, **MEMORY) for side in "pd"))}
    if nixl is not None:
        engines = [fleet.engine(f"nixl-{port}", NIXL, _nixl(nixl, port), **MEMORY) for port in NIXL_PORTS]
        pairs["nixl"] = Pair(*engines)
    ready(*(engine for pair in pairs.values() for engine in (pair.prefill, pair.decode)))
    return pairs


def measure(pairs: dict[str, Pair], rounds: int) -> list[Row]:
    """Raises Failed."""
    names = list(pairs)
    for number in range(rounds + WARM_UP_ROUNDS):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for length in LENGTHS:
            tokens = prompt(length, f"{number}/{length}")
            answers = {name: pairs[name].hand_over(tokens, counted=number >= WARM_UP_ROUNDS) for name in turn}
            if len({tuple(answer) for answer in answers.values()}) > 1:
                raise Failed(f"the pairs disagree about a prompt of {length} tokens: {answers}")
    return [row for length in LENGTHS for row in rows_of(pairs, length, rounds)]


def rows_of(pairs: dict[str, Pair], length: int, rounds: int) -> list[Row]:
    rows = []
    for what in ("seconds", "cpu_s"):
        medians = {name: 1e3 * statistics.median(getattr(pair, what)[length]) for name, pair in pairs.items()}
        ours, nixl = medians["ours"], medians.get("nixl")
        work = {"seconds": "hand-over", "cpu_s": "CPU of both engines"}[what]
        rows.append(
            Row(
                f"{work} [{length} tokens, {rounds} prompts]",
                ours,
                "ms",
                {"NixlConnector": NOT_RUN if nixl is None else nixl},
                None,
                f"<= {TARGET}x NixlConnector",
                None if nixl is None else ours <= TARGET * nixl,
            )
        )
    return rows


def nixl_of(venv: Path, folder: Path) -> Path | None:
    """A folder inside of ``folder`` with NIXL alone: the rest of ``venv`` would hide what the engine has.
    None where it has no NIXL."""
    found = [path.resolve() for path in venv.glob("lib/python3*/site-packages/nixl*")]
    if "nixl" not in (path.name for path in found):
        return None
    alone = folder / "nixl"
    alone.mkdir()
    for path in found:
        (alone / path.name).symlink_to(path)
    return alone


def _nixl(folder: Path, port: int) -> dict[str, Any]:
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])),
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }


def main() -> None:
    parser = make_parser(__doc__, "fewer prompts; under 240 s", "a venv with NIXL, for --nixl")
    parser.add_argument("--nixl", type=Path, metavar="DIR", help="a folder with NIXL, see above")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    options = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        try:
            nixl = options.nixl or (options.peers_venv and nixl_of(options.peers_venv, folder))
            pairs = pairs_of(Fleet(folder, options.vllm_python, stack), nixl)
            rows = measure(pairs, 7 if options.quick else 25)
        except Failed as error:
            sys.exit(f"pd_handover: {error}")
    print_table("From prefill to decode on one host, medians; the pairs in turn", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
