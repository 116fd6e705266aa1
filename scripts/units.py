"""Translation units: sources of one folder of a ``csrc`` and of the folders in it are compiled together, as
files that include them.

The headers of the standard library and of pybind11 cost the compiler more than most of our files, so in units
they take about half of the CPU time (`time pip install .` shows it). LINES_MAX bounds what an edit of one
file compiles again. Names in anonymous namespaces are therefore unique within such a folder.

Run as a program, it prints the paths of the units, for make: `python units.py FOLDER SOURCE...`
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

DEPTH = 3  # of core/csrc/store, whose folders are compiled with it
LINES_MAX = 2200
BINDINGS_FACTOR = 4


def write_units(sources: Iterable[str], folder: Path) -> list[Path]:
    """Writes the units of ``sources`` into ``folder`` -> the units, those that cost most first.

    sources: paths below the current folder, which has to be the compiler's -iquote. A unit that says the same
    as before keeps its date. Its name has a digest of its sources' names, so that two programs of which one
    uses a folder in part share the objects of the other folders.
    """
    folder.mkdir(parents=True, exist_ok=True)
    costs: dict[Path, int] = {}
    for place, files in groupby(sorted(sources, key=_in_order), key=_place):
        for members in _split(list(files)):
            text = "".join(f'#include "{name}"\n' for name in members)
            unit = folder / f"{place.replace('/', '-')}-{zlib.crc32(text.encode()):08x}.cpp"
            if not unit.exists() or unit.read_text() != text:
                unit.write_text(text)
            # Bindings instantiate templates: a line of theirs takes several times as long.
            costs[unit] = sum(_lines(name) for name in members) * (
                BINDINGS_FACTOR if "python" in place else 1
            )
    return sorted(costs, key=lambda unit: costs[unit], reverse=True)  # the last ones leave cores idle


def _place(name: str) -> str:
    """The folder of a ``csrc`` that a source is in, at whatever depth."""
    return "/".join(name.split("/")[:-1][:DEPTH])


def _in_order(name: str) -> tuple[str, str, str]:
    """A folder's own files before those of folders in it."""
    return (_place(name), name.rpartition("/")[0], name)


def _split(files: list[str]) -> list[list[str]]:
    """Parts of about the same number of lines, about LINES_MAX at most unless one file alone has more."""
    lines = {name: _lines(name) for name in files}
    total = sum(lines.values())
    count = -(-total // LINES_MAX) or 1
    parts: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name in files:
        middle = before + lines[name] / 2
        parts[min(int(middle * count / max(total, 1)), count - 1)].append(name)
        before += lines[name]
    return [part for part in parts if part]


def _lines(name: str) -> int:
    return Path(name).read_bytes().count(b"\n")


if __name__ == "__main__":
    print(*write_units(sys.argv[2:], Path(sys.argv[1])))
