"""Shows that the tests of RDMA over the software libibverbs find bugs of the kinds that lose or spoil bytes.

Each bug is planted into a copy of one source, in front of the true one on the compiler's path; the program of
the tests is linked with it, and has to fail. `make -C tests/native planted` runs it, after the tests have
passed without a bug.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 180  # of one run; a program that hangs has failed, too


@dataclass(frozen=True)
class Bug:
    """A text of one source, which stands there once, and what a planted bug makes of it."""

    name: str
    source: str
    text: str
    planted: str


BUGS = [
    Bug(
        "no fence: what a failed connection has sent may land later",
        "core/csrc/transport/nic/link_help.cpp",
        "Result<std::vector<std::byte>> answer = ask(end_question(options_.transport, rail.number));",
        "Result<std::vector<std::byte>> answer = std::vector<std::byte>();",
    ),
    Bug(
        "stripe off by one: pieces behind the first land one byte too far",
        "core/csrc/transport/nic/link_pieces.cpp",
        "{slice.remote + range->at, there.remote, to % remote->chunk_bytes}",
        "{slice.remote + range->at + (range->at != 0 && range->bytes > n ? 1 : 0), there.remote,"
        " to % remote->chunk_bytes}",
    ),
    Bug(
        "completion counted twice: each one ends the oldest batch",
        "core/csrc/transport/rdma/rail.cpp",
        "while (!batches_.empty() && (batches_.front().last < request ||",
        "for (bool once = true; once && wc.status == 0 && !batches_.empty(); once = false) {\n"
        "                Batch batch = std::move(batches_.front());\n"
        "                batches_.pop_front();\n"
        "                complete(batch, now);\n"
        "                done(batch.pieces);\n"
        "            }\n"
        "            while (false && (batches_.front().last < request ||",
    ),
    Bug(
        "completion of a connection before",
        "core/csrc/transport/rdma/rail.cpp",
        "if (wc.wr_id >> 40 != life_) continue;",
        "",
    ),
    Bug(
        "freed before drained: a region is given back with keys that work",
        "core/csrc/transport/nic/transport.cpp",
        "return revocation == 0 || keys_->released(revocation);",
        "return (void)revocation, true;",
    ),
    Bug(
        "freed before drained: a transfer ends, and its queue pair goes on",
        "core/csrc/transport/rdma/rail.cpp",
        "std::vector<Piece> Rail::stop(bool& writes) {\n    pair_.reset();",
        "std::vector<Piece> Rail::stop(bool& writes) {",
    ),
    Bug(
        "MTU of one side alone",
        "core/csrc/transport/rdma/queue_pair.cpp",
        "attr.path_mtu = std::min(own.port.mtu, peer.port.mtu);",
        "attr.path_mtu = own.port.mtu;",
    ),
    Bug(
        "back-off that one success forgives",
        "core/csrc/transport/nic/link_help.cpp",
        "rail.begin(clock());",
        "rail.begin(clock());\n    rail.faults = 0;",
    ),
]


def main(out: Path, words: list[str]) -> int:
    """words: a bug is planted when its name has one of them; none: all."""
    overlay = out / "planted-sources"
    program = out / "planted" / "program"
    missed = []
    for left in (out / "planted" / "units").glob("*.clean"):  # by a run that was ended
        left.replace(left.with_suffix(".o"))
    for bug in BUGS:
        if words and not any(word in bug.name for word in words):
            continue
        built = object_of(bug.source, out)
        clean = built.with_suffix(".clean")
        shutil.rmtree(overlay, ignore_errors=True)
        source = (ROOT / bug.source).read_text()
        if source.count(bug.text) != 1:
            print(f"planted: {bug.source} has no place for: {bug.name}")
            return 1
        (overlay / bug.source).parent.mkdir(parents=True)
        (overlay / bug.source).write_text(source.replace(bug.text, bug.planted))
        built.rename(clean)
        try:
            build(out, program, overlay)
            found = run(program)
        finally:
            clean.replace(built)
            os.utime(built)
        print(f"planted: {'found' if found else 'MISSED'}: {bug.name}" + (f"\n    {found}" if found else ""))
        if not found:
            missed.append(bug.name)
    program.unlink()
    return 1 if missed else 0


def object_of(source: str, out: Path) -> Path:
    """The object of the unit that has the source. Units of other states of the tree may lie beside it."""
    units = [unit for unit in (out / "units").glob("*.cpp") if f'"{source}"' in unit.read_text()]
    objects = [out / "planted" / "units" / f"{unit.stem}.o" for unit in units]
    return max((made for made in objects if made.exists()), key=lambda made: made.stat().st_mtime)


def build(out: Path, program: Path, overlay: Path) -> None:
    program.unlink(missing_ok=True)
    compiler = f"{os.environ.get('CXX', 'g++')} -iquote {overlay}"
    command = ["make", "--no-print-directory", "-s", "-C", str(ROOT / "tests/native"), str(program)]
    settings = [f"OUT={out}", "VARIANT=planted", f"CXX={compiler}"]
    subprocess.run(command + settings, check=True, stdout=subprocess.DEVNULL)


def run(program: Path) -> str:
    """-> what the tests said first of the bug; empty: they have passed."""
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    try:
        done = subprocess.run(
            [str(program), "--abort-after=1"],
            env=os.environ | options,
            cwd=program.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS_MAX} s"
    if done.returncode == 0:
        return ""
    lines = done.stdout.splitlines()
    marks = ("ERROR: ", "runtime error:", "AddressSanitizer")
    return next((line.strip() for line in lines if any(mark in line for mark in marks)), lines[-1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
