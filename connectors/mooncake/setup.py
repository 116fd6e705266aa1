"""Refuses to be installed beside the original: both are the one package `mooncake`."""

from __future__ import annotations

import runpy
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup  # type: ignore[import-untyped]

# A build is isolated from the environment that it is for, but runs under its interpreter.
PLACES = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
GUARD = runpy.run_path(str(Path(__file__).with_name("mooncake") / "_guard.py"))

if sentence := GUARD["conflict"](PLACES):
    raise SystemExit(sentence)
# Not in this folder: checkers that read the tree would find every module twice.
with tempfile.TemporaryDirectory() as folder:
    setup(options={"build": {"build_base": folder}})
