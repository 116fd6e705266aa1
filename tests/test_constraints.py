"""constraints.txt has one version of each package that Moonpool and its extras import, which pyproject.toml
admits and which these tests run with."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def constraints(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("scripts.constraints")


def test_each_requirement_admits_its_version(constraints: ModuleType) -> None:
    environments = importlib.import_module("scripts.environments")
    pins = {pin.name: pin for pin in constraints.read()}
    named = set()
    for text in environments.project_requirements(*constraints.EXTRAS):
        requirement = Requirement(text)
        pin = pins[constraints.canonical(requirement.name)]
        named.add(pin.name)
        assert requirement.specifier.contains(pin.version), (
            f"{text} excludes {pin.version}: `make constraints`"
        )
        assert any(via.startswith("moonpool") for via in pin.via)
    for pin in pins.values():
        ours = {via for via in pin.via if via.startswith("moonpool")}
        assert bool(ours) == (pin.name in named)
        assert set(pin.via) - ours <= pins.keys()
        assert pin.via, f"nothing needs {pin.name}"


def test_these_tests_run_with_them(constraints: ModuleType) -> None:
    installed = {pin.name: importlib.metadata.version(pin.name) for pin in constraints.read()}
    assert installed == {pin.name: pin.version for pin in constraints.read()}


def test_a_package_is_followed_by_those_that_need_it(constraints: ModuleType) -> None:
    def item(name: str, version: str, *needs: str) -> dict[str, object]:
        return {"metadata": {"name": name, "version": version, "requires_dist": list(needs)}}

    report = {
        "install": [
            item("Aiohttp", "3.1", "yarl>=1", "brotli; extra == 'speedups'"),
            item("yarl", "1.2", "typing_extensions (>=4)"),
            item("typing-extensions", "4.0"),
        ]
    }
    made = constraints.text(report, {"moonpool": ["aiohttp>=3"], "moonpool[x]": ["yarl"]})
    assert made == constraints.HEAD + (
        "aiohttp==3.1  # via moonpool\n"
        "typing-extensions==4.0  # via yarl\n"
        "yarl==1.2  # via moonpool[x], aiohttp\n"
    )
