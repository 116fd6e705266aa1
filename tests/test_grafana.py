"""The dashboard asks for metrics that are there, by labels that they have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .live_metrics import live_pages, samples, unknown_names_and_labels

DASHBOARD = Path(__file__).parent.parent / "deploy" / "grafana.json"
TROUBLESHOOTING = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
OF_ENGINES = {"moonpool_hicache_"} | {  # in an engine's own metrics
    f"moonpool_connector_{name}_total" for name in ("saved_objects", "lookups", "hit_tokens")
}
PROMTOOL = shutil.which("promtool")


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_every_panel_says_what_it_shows_and_overlaps_none() -> None:
    taken = set()
    for panel in panels():
        assert panel["title"]
        assert all(target["legendFormat"] and target["refId"] for target in panel["targets"])
        place = panel["gridPos"]
        cells = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert max(right for right, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    ids = [each["id"] for each in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)
    for expression in expressions():
        for left, right in ("()", "[]", "{}"):
            assert expression.count(left) == expression.count(right), expression


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")
def test_prometheus_understands_each_expression_and_every_page(tmp_path: Path) -> None:
    """With the variables set as Grafana sets them."""
    assert PROMTOOL is not None
    rules = [
        {
            "record": f"panel:{number}",
            "expr": each.replace("$__rate_interval", "1m").replace("$engine", "engine-0|.*"),
        }
        for number, each in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(rules)} rules found" in checked.stdout

    for page in live_pages():
        checked = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True, check=False
        )
        assert checked.returncode in (0, 3), checked.stderr  # 3: it remarks on names, such as those in _ms


def test_each_metric_is_there_with_the_labels_that_are_asked_for() -> None:
    there = samples(live_pages())
    in_text = set(re.findall(r"\bmoonpool_[a-z0-9_]+", TROUBLESHOOTING.read_text()))
    assert in_text - OF_ENGINES <= set(there)
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    asked = [*expressions(), *(str(each["query"]) for each in variables)]
    for expression in asked:
        assert unknown_names_and_labels(expression, there) == [], expression
    assert len(set(re.findall(r"\bmoonpool_[a-z0-9_]+", " ".join(asked)))) > 40
