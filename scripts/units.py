"""Translation units: sources of one folder are compiled together, as files that include them.

The headers of the standard library and of pybind11 cost the compiler more than most of our files, so in units
they take about half of the CPU time (`time pip install .` shows it). LINES_MAX bounds what an edit of one
file compiles again. Names in anonymous namespaces are therefore unique within a folder.

Run as a program, it prints the paths of the units, for make: `python units.py FOLDER SOURCE...`
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

LINES_MAX = 1500


def write_units(sources: Iterable[str], folder: Path) -> list[Path]:
    """Writes the units of ``sources`` into ``folder`` -> the units, those that cost most first.

    sources: paths below the current folder, which has to be the compiler's -iquote. A unit that says the same
    as before keeps its date. Its name has a digest of its sources' names, so that two programs of which one
    uses a folder in part share the objects of the other folders.
    """
    folder.mkdir(parents=True, exist_ok=True)
    units = []
    for place, files in groupby(sorted(sources), key=lambda name: name.rpartition("/")[0]):
        for members in _split(list(files)):
            text = "".join(f'#include "{name}"\n' for name in members)
            unit = folder / f"{place.replace('/', '-')}-{zlib.crc32(text.encode()):08x}.cpp"
            if not unit.exists() or unit.read_text() != text:
                unit.write_text(text)
            units.append(unit)
    # The bindings instantiate templates: they take longest, and would be waited for at the end.
    return sorted(units, key=lambda unit: "python" not in unit.name)


def _split(files: list[str]) -> list[list[str]]:
    """Parts of about the same number of lines, about LINES_MAX at most unless one file alone has more."""
    lines = {name: Path(name).read_bytes().count(b"\n") for name in files}
    total = sum(lines.values())
    count = -(-total // LINES_MAX) or 1
    parts: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name in files:
        middle = before + lines[name] / 2
        parts[min(int(middle * count / max(total, 1)), count - 1)].append(name)
        before += lines[name]
    return [part for part in parts if part]


if __name__ == "__main__":
    print(*write_units(sys.argv[2:], Path(sys.argv[1])))
