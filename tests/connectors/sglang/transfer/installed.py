"""Makes an engine with a folder in PYTHONPATH load our plugin, as `pip install` of this checkout would."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[4]


def install(folder: Path) -> None:
    """Writes the entry points of pyproject.toml into ``folder``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    info = folder / "moonpool-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moonpool\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
