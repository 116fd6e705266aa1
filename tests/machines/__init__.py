"""Machines as trees of /sys, /proc and /dev, for tests of the topology and of the doctor.

A recording is a text: a line "/sys/... = text" for a file, with \\n for line ends in it, "/sys/... -> target"
for a link, and lines that begin with "#". `python -m tests.machines` records the machine that runs it;
virtio_vm.txt and rxe_vm.txt were made so, the others are written by hand after such machines.
tests/native/topology/test_topology.cpp reads the same files.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


def build(name: str, root: Path) -> Path:
    """The recorded machine ``name`` as files below ``root``, which it returns."""
    return build_text((FOLDER / f"{name}.txt").read_text(), root)


def build_text(recording: str, root: Path) -> Path:
    """The same of a recording that is no file."""
    for line in recording.splitlines():
        if line and not line.startswith("#"):
            _make(line, root)
    return root


def _make(line: str, root: Path) -> None:
    path, is_file, text = line.partition(" = ")
    if is_file:
        write(root, path, text.replace("\\n", "\n") + "\n")
    else:
        path, _, target = path.partition(" -> ")
        link(root, path, target)


def write(root: Path, path: str, text: str) -> None:
    """One file of a machine, made or replaced."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def link(root: Path, path: str, target: str) -> None:
    """One symbolic link of a machine."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, place)
