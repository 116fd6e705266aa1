"""The alert rules ask for metrics that are there, and the runbook says what to do for each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .live_metrics import live_pages, samples, unknown_names_and_labels

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy" / "alerts.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"
PROMTOOL = shutil.which("promtool")


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def chapters() -> dict[str, str]:
    """The runbook's text by heading."""
    _, *parts = re.split(r"^## ", RUNBOOK.read_text(), flags=re.M)
    return {heading: text for heading, _, text in (part.partition("\n") for part in parts)}


def test_each_alert_is_whole_and_has_its_chapter() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert names == list(dict.fromkeys(names))
    assert sorted(chapters()) == sorted(names)
    for alert in alerts():
        assert alert.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert re.fullmatch(r"\d+[smh]", alert.get("for", "0s"))
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert re.findall(r"^\*\*(\w+)\.\*\* \S", chapters()[alert["alert"]], re.M) == [
            "Meaning",
            "Check",
            "Remedy",
        ]
        for left, right in ("()", "[]", "{}"):
            assert alert["expr"].count(left) == alert["expr"].count(right)


def test_each_metric_is_there_with_the_labels_that_are_asked_for() -> None:
    there = samples(live_pages())
    for alert in alerts():
        assert unknown_names_and_labels(alert["expr"], there) == [], alert["alert"]
        asked = re.findall(r"\bmoonpool_[a-z0-9_]+", alert["expr"])
        has = {"job", "instance"}.union(*(there[name] for name in asked))
        shown = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
        assert shown <= has, alert["alert"]
    for name in re.findall(r"\bmoonpool_[a-z0-9_]+", RUNBOOK.read_text()):
        assert name in there or name == "moonpool_", f"no process shows {name}"


def test_each_reason_of_a_refusal_is_one_that_the_proxy_gives() -> None:
    (reasons,) = (found[1] for alert in alerts() if (found := re.search(r'reason=~"([^"]+)"', alert["expr"])))
    (row,) = re.findall(r"^\| rejected_total .*$", (ROOT / "docs" / "proxy.md").read_text(), re.M)
    page = (ROOT / "docs" / "proxy.md").read_text().split("## Limits")[1]
    for reason in reasons.split("|"):
        assert re.search(rf"\b{reason}\b", row) or f"`{reason}`" in page, reason


# What the metrics do in 30 minutes, in promtool's notation -> the alerts that fire at their end.
STORIES: list[tuple[dict[str, str], set[str]]] = [
    (
        {
            'moonpool_node_master_joined{job="n"}': "1x30",
            'moonpool_node_arena_memory_short{job="n"}': "0x30",
            'moonpool_node_ssd_off{job="n"}': "0x30",
            'moonpool_node_put_refused_total{job="n"}': "0+1x30",  # a minute
            'moonpool_node_lease_refused_total{job="n"}': "0x30",
            'moonpool_node_process_start_time_seconds{job="n"}': "1700000000x30",
            'moonpool_master_is_owner{job="m",instance="a"}': "1x30",
            'moonpool_master_is_owner{job="m",instance="b"}': "0x30",
            'moonpool_master_standby_attached{job="m",instance="a"}': "1x30",
            'moonpool_master_standby_is_whole{job="m",instance="a"}': "1x30",
            'moonpool_master_standby_lag_ms{job="m",instance="a"}': "2x30",
            'moonpool_master_standbys_lost_total{job="m",instance="a"}': "0x10 1x20",  # and is back
            'moonpool_proxy_engine_healthy{job="p",instance="c",engine="e"}': "1x30",
            'moonpool_proxy_engine_breaker_open{job="p",instance="c",engine="e"}': "0 1 0 0 1 0 0 1 0x23",
            'moonpool_proxy_rejected_total{job="p",instance="c",reason="unknown_path"}': "0+600x30",
            'moonpool_proxy_rejected_total{job="p",instance="c",reason="no_engine"}': "0+1x30",
            'moonpool_proxy_events_lag_seconds{job="p",instance="c",stream="e"}': "9x30",  # of long ago
            'moonpool_proxy_events_messages_total{job="p",instance="c",stream="e"}': "5x30",
            'moonpool_proxy_events_gaps_total{job="p",instance="c",stream="e"}': "0x28 1x2",  # replayed
            'moonpool_proxy_events_lost_total{job="p",instance="c",stream="e"}': "0x30",
            'moonpool_node_build_info{version="2"}': "1x30",
        },
        set(),
    ),
    (
        {
            'up{job="moonpool-node"}': "0x30",
            'moonpool_node_master_joined{job="n"}': "0x30",
            'moonpool_node_arena_memory_short{job="n"}': "1x30",
            'moonpool_node_ssd_off{job="n"}': "0x30",
            'moonpool_node_ssd_read_only{job="n"}': "0x25 1x5",
            'moonpool_node_ssd_read_errors_total{job="n"}': "0x30",
            'moonpool_node_ssd_write_errors_total{job="n"}': "0x25 3x5",
            'moonpool_node_ssd_corrupt_total{job="n"}': "0x30",
            'moonpool_node_put_refused_total{job="n"}': "0+90x30",
            'moonpool_node_lease_refused_total{job="n"}': "0+90x30",
            'moonpool_node_auth_failures_total{job="n"}': "0+60x30",
            'moonpool_node_limits_raised_total{job="n"}': "0x20 1x10",
            'moonpool_node_process_open_fds{job="n"}': "900x30",
            'moonpool_node_process_max_fds{job="n"}': "1000x30",
            'moonpool_node_process_start_time_seconds{job="n"}': "1x9 2x9 3x9 4x3",
        },
        {
            "MoonpoolAuthFailures",
            "MoonpoolDown",
            "MoonpoolLimitRaised",
            "MoonpoolMemoryShort",
            "MoonpoolNodeNotJoined",
            "MoonpoolOpenFiles",
            "MoonpoolPutsRefused",
            "MoonpoolRestarting",
            "MoonpoolSsdErrors",
            "MoonpoolSsdOff",
        },
    ),
    (
        {
            'moonpool_master_is_owner{job="m",instance="a"}': "1x30",
            'moonpool_master_standby_attached{job="m",instance="a"}': "1x10 0x20",
            'moonpool_master_standby_is_whole{job="m",instance="a"}': "1x10 0x20",
            'moonpool_master_standby_lag_ms{job="m",instance="a"}': "0x30",
            'moonpool_master_standbys_lost_total{job="m",instance="a"}': "0x10 1x20",
            'moonpool_master_nodes_suspect{job="m",instance="a"}': "0x20 2x10",
            'moonpool_master_directory_rows{job="m",instance="a"}': "95x30",
            'moonpool_master_directory_rows_max{job="m",instance="a"}': "100x30",
        },
        {"MoonpoolStandbyLost", "MoonpoolNodesSilent", "MoonpoolDirectoryFull"},
    ),
    (
        {
            'moonpool_master_is_owner{job="m",instance="a"}': "0x30",
            'moonpool_master_standby_attached{job="m",instance="a"}': "1x30",
            'moonpool_master_standby_is_whole{job="m",instance="a"}': "1x30",
            'moonpool_master_standby_lag_ms{job="m",instance="a"}': "0x20 5000x10",
        },
        {"MoonpoolNoOwner", "MoonpoolStandbyLate"},
    ),
    (
        {
            'moonpool_proxy_engine_healthy{job="p",instance="c",engine="e"}': "0x30",
            'moonpool_proxy_engine_breaker_open{job="p",instance="c",engine="e"}': "0 1 1 1 0 1 1 1 1 1x22",
            'moonpool_proxy_rejected_total{job="p",instance="c",reason="no_engine"}': "0+60x30",
            'moonpool_proxy_rejected_total{job="p",instance="c",reason="invalid_api_key"}': "0+600x30",
            'moonpool_proxy_events_connected{job="p",instance="c",stream="e"}': "0x30",
            'moonpool_proxy_events_lag_seconds{job="p",instance="c",stream="e"}': "9x30",
            'moonpool_proxy_events_messages_total{job="p",instance="c",stream="e"}': "0+60x30",
            'moonpool_proxy_events_gaps_total{job="p",instance="c",stream="e"}': "0x28 1x2",
            'moonpool_proxy_events_lost_total{job="p",instance="c",stream="e"}': "0x28 1x2",
        },
        {
            "MoonpoolApiKeysRefused",
            "MoonpoolBreakerOpen",
            "MoonpoolEngineDown",
            "MoonpoolEnginesDown",
            "MoonpoolEventGaps",
            "MoonpoolEventsAway",
            "MoonpoolProxyLate",
            "MoonpoolRequestsRejected",
        },
    ),
    (
        {
            'moonpool_node_build_info{version="1"}': "1x150",
            'moonpool_proxy_build_info{version="2"}': "1x150",
        },
        {"MoonpoolVersionsDiffer"},
    ),
]  # fmt: skip


def test_each_alert_has_a_story_in_which_it_fires() -> None:
    assert {name for _, fired in STORIES for name in fired} == {alert["alert"] for alert in alerts()}


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")
def test_prometheus_takes_the_rules_and_fires_those_that_it_should(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    checked = subprocess.run([PROMTOOL, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(alerts())} rules found" in checked.stdout
    names = [alert["alert"] for alert in alerts()]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            # How many alerts of each name fire; no sample where none does.
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0',
                    "eval_time": "150m" if "MoonpoolVersionsDiffer" in fired else "30m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if name in fired else [],
                }
                for name in names
            ],
        }
        for series, fired in STORIES
    ]
    story = tmp_path / "stories.json"  # JSON is YAML
    story.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}))
    checked = subprocess.run([PROMTOOL, "test", "rules", story], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
