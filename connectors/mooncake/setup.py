"""Refuses to be installed beside the original: both are the one package `mooncake`."""

from __future__ import annotations

import os
import runpy
import site
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup  # type: ignore[import-untyped]

# A build is isolated from the environment that it is for. pip runs it under the interpreter of that; uv may
# not, but names it in VIRTUAL_ENV. What is installed for the user is seen by both.
PLACES = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages(), *sys.path]
if environment := os.environ.get("VIRTUAL_ENV"):
    PLACES += map(str, Path(environment).glob("lib*/python*/site-packages"))
GUARD = runpy.run_path(str(Path(__file__).with_name("mooncake") / "_guard.py"))

if sentence := GUARD["conflict"](PLACES):
    raise SystemExit(sentence)
# Not in this folder: checkers that read the tree would find every module twice.
with tempfile.TemporaryDirectory() as folder:
    setup(options={"build": {"build_base": folder}})
