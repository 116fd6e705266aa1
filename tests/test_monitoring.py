"""The compose file of Prometheus and Grafana: its files are there, and scrape what `moonpool up` serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from moonpool.core.config.config import load

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def mounts(service: str) -> dict[str, str]:
    """Path in the container -> what of this repository is there."""
    made = {}
    for volume in read("compose.yml")["services"][service]["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("."):
            made[target] = source
    return made


def test_each_file_that_is_mounted_is_there() -> None:
    compose = read("compose.yml")
    named = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
        if not volume.startswith(".")
    }
    assert named == set(compose["volumes"])
    for service in compose["services"]:
        for source in mounts(service).values():
            assert (DEPLOY / source).is_file(), source
        assert re.fullmatch(r"[\w./-]+:v?\d[\w.]*", compose["services"][service]["image"])  # pinned
        assert compose["services"][service]["network_mode"] == "host"


def test_prometheus_scrapes_the_default_addresses() -> None:
    targets = {}
    for job in read("monitoring/prometheus.yml")["scrape_configs"]:
        ((targets[job["job_name"]],),) = (group["targets"] for group in job["static_configs"])
    settings = load(None, env={})
    assert targets == {
        "moonpool-proxy": settings.proxy.listen,
        "moonpool-node": settings.node.http,
        "moonpool-master": settings.master.http,
    }
    assert mounts("prometheus")["/etc/prometheus/prometheus.yml"] == "./monitoring/prometheus.yml"


def test_grafana_asks_that_prometheus_and_has_the_dashboard() -> None:
    services = read("compose.yml")["services"]
    (listen,) = (
        word.partition("=")[2]
        for word in services["prometheus"]["command"]
        if word.startswith("--web.listen-address=")
    )
    (source,) = read("monitoring/grafana_datasource.yml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", f"http://{listen}", True)
    (provider,) = read("monitoring/grafana_dashboards.yml")["providers"]
    found = mounts("grafana")
    (dashboard,) = (target for target, path in found.items() if path == "./grafana.json")
    assert Path(dashboard).parent == Path(provider["options"]["path"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    provisioned = {
        Path(target).parent.name: path for target, path in found.items() if "provisioning" in target
    }
    assert provisioned == {
        "datasources": "./monitoring/grafana_datasource.yml",
        "dashboards": "./monitoring/grafana_dashboards.yml",
    }
