"""The bill of materials of a wheel: its binaries, what is compiled into them, what it imports."""

from __future__ import annotations

import hashlib
import importlib
import json
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("cyclonedx")

ROOT = Path(__file__).resolve().parent.parent
METADATA = (
    "Metadata-Version: 2.4\nName: moonpool\nVersion: 0.1.0\nSummary: s\nLicense-Expression: Apache-2.0\n"
)


def test_a_bill_has_binaries_libraries_and_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    sbom = importlib.import_module("scripts.sbom")
    pin = importlib.import_module("scripts.constraints").Pin
    wheel = tmp_path / "moonpool-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("moonpool/_native.so", b"code")
        archive.writestr("moonpool/__init__.py", b"")
        archive.writestr("moonpool-0.1.0.dist-info/METADATA", METADATA)
    pins = [
        pin("aiohttp", "3.1", ("moonpool",)),
        pin("yarl", "1.2", ("aiohttp",)),
        pin("pyyaml", "6.0", ("moonpool[yaml]",)),
        pin("libyaml", "1.0", ("pyyaml",)),
    ]
    made = json.loads(sbom.bill(wheel, {"pybind11": "3.0.1", "libstdc++": "12.2.0"}, pins))
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    moonpool = made["metadata"]["component"]
    assert moonpool["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    inside = {each["name"]: each for each in moonpool["components"]}
    assert inside.keys() == {"moonpool/_native.so", "pybind11", "libstdc++"}
    assert inside["moonpool/_native.so"]["hashes"][0]["content"] == hashlib.sha256(b"code").hexdigest()
    assert inside["libstdc++"]["licenses"] == [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}]
    scopes = {each["name"]: each["scope"] for each in made["components"]}
    assert scopes == {"aiohttp": "required", "yarl": "required", "pyyaml": "optional", "libyaml": "optional"}
    needs = {each["ref"]: each.get("dependsOn", []) for each in made["dependencies"]}
    assert sorted(needs["moonpool"]) == ["aiohttp@3.1", "libstdc++@12.2.0", "pybind11@3.0.1", "pyyaml@6.0"]
    assert needs["aiohttp@3.1"] == ["yarl@1.2"]
