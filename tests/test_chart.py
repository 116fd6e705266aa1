"""The chart, rendered by Helm's own code: the committed manifests are its rendering, and each value does what
it says."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from moonpool.core.config import config

pytest.importorskip("helm_python", reason="Helm's library has a wheel for x86-64 only")

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "chart"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKLOADS = ("Deployment", "DaemonSet")


@pytest.fixture
def manifests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("scripts.manifests")


def objects(manifests: ModuleType, values: dict[str, Any], **names: str) -> list[dict[str, Any]]:
    texts = manifests.render(values, **names).values()
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(made: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in made if each["kind"] in kinds}


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


def toml_of(made: list[dict[str, Any]]) -> dict[str, Any]:
    (text,) = (each["data"]["moonpool.toml"] for each in made if each["kind"] == "ConfigMap")
    return tomllib.loads(text)


def test_the_committed_manifests_are_the_rendering(manifests: ModuleType) -> None:
    for name, text in manifests.manifests().items():
        assert (manifests.MANIFESTS / name).read_text() == text, (
            "run `make manifests`, and commit what it wrote"
        )


def test_lint_finds_nothing_and_the_version_is_the_package_s() -> None:
    import helm_python

    report = helm_python.lint(str(CHART), strict=True)
    severe = [each for each in report["messages"] if each["severity"] not in (0, 1)]  # an icon is a wish
    assert severe == []
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == PROJECT["version"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nodes": {}}, "'nodes' not allowed"),
        ({"proxy": {"replicas": 0}}, "replicas': minimum"),
        ({"node": {"hostFolder": "run"}}, "hostFolder': 'run' does not match"),
        ({"settings": {"SSD": "/ssd"}}, "'SSD' does not match"),
        ({"settings": {"node.ssd": ["/ssd"]}}, "node.ssd': got array"),
    ],
)
def test_a_value_that_means_nothing_is_refused(
    manifests: ModuleType, values: dict[str, Any], told: str
) -> None:
    from helm_python import HelmError

    with pytest.raises(HelmError, match=told):
        manifests.render(values)


def test_a_release_of_another_name_names_its_own_things_only(manifests: ModuleType) -> None:
    made = objects(manifests, {}, name="other", namespace="elsewhere")
    names = {each["metadata"]["name"] for each in made}
    assert all(name.startswith("other") for name in names)
    settings = toml_of(made)
    hosts = {each.partition(":")[0] for each in settings["cluster"]["master"] + settings["proxy"]["peers"]}
    assert hosts <= of_kind(made, "Service").keys()
    (binding,) = of_kind(made, "RoleBinding").values()
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "other-proxy", "namespace": "elsewhere"}
    ]
    for workload in of_kind(made, *WORKLOADS).values():
        pod = pod_of(workload)
        assert pod["serviceAccountName"] in of_kind(made, "ServiceAccount")
        maps = {each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each}
        assert maps == of_kind(made, "ConfigMap").keys()


def folder_of(manifests: ModuleType, values: dict[str, Any], name: str) -> str:
    (node,) = of_kind(objects(manifests, values, name=name), "DaemonSet").values()
    (folder,) = (each["hostPath"]["path"] for each in pod_of(node)["volumes"] if "hostPath" in each)
    return str(folder)


def test_releases_share_no_folder_of_a_host(manifests: ModuleType) -> None:
    """A node whose folder another one serves in ends."""
    assert folder_of(manifests, {}, "moonpool") == "/run/moonpool"
    assert folder_of(manifests, {}, "other") == "/run/moonpool-other"
    assert folder_of(manifests, {"node": {"hostFolder": "/mnt/run"}}, "other") == "/mnt/run"
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert "`/run/moonpool-RELEASE`" in page
    assert f"hostPath: {{path: {folder_of(manifests, {}, 'moonpool')}, type" in page


def test_one_master_is_named_by_all_and_has_no_budget(manifests: ModuleType) -> None:
    made = objects(manifests, {"master": {"standby": False}, "proxy": {"replicas": 1}})
    masters = [name for name in of_kind(made, *WORKLOADS) if "master" in name]
    assert masters == ["moonpool-master-a"]
    assert toml_of(made)["cluster"]["master"] == ["moonpool-master-a:7700"]
    assert of_kind(made, "PodDisruptionBudget") == {}  # it would keep a drain of the host waiting for ever
    before = of_kind(objects(manifests, {}), *WORKLOADS)["moonpool-node"]["spec"]["template"]["metadata"]
    after = of_kind(made, *WORKLOADS)["moonpool-node"]["spec"]["template"]["metadata"]
    assert before["annotations"] != after["annotations"], "a pod keeps running with old settings"


def test_masters_tell_nodes_and_clients_the_addresses_of_the_list(manifests: ModuleType) -> None:
    """Else each pod's own address would be learned beside its service's."""
    made = objects(manifests, {}, name="other")
    told = []
    for name, workload in of_kind(made, *WORKLOADS).items():
        (container,) = pod_of(workload)["containers"]
        env = {each["name"]: each.get("value", "") for each in container["env"]}
        assert ("MOONPOOL_MASTER_ADVERTISE" in env) == ("master" in name)
        told += [env["MOONPOOL_MASTER_ADVERTISE"]] if "master" in name else []
    assert told == toml_of(made)["cluster"]["master"]


def test_settings_are_those_of_the_configuration(manifests: ModuleType) -> None:
    made = objects(manifests, {"settings": {"node.ssd": "/ssd:1TiB", "master.stop_delay_s": "7s"}})
    for workload in of_kind(made, *WORKLOADS).values():
        (container,) = pod_of(workload)["containers"]
        env = {each["name"]: each.get("value", "a secret that is long enough") for each in container["env"]}
        loaded = config.load(env=env)
        assert (loaded.node.ssd, loaded.master.stop_delay_s) == (["/ssd:1TiB"], 7.0)


def test_a_node_gets_an_ssd_of_the_host(manifests: ModuleType) -> None:
    volume = {"name": "ssd", "hostPath": {"path": "/mnt/nvme0", "type": "Directory"}}
    node = {"volumes": [volume], "volumeMounts": [{"name": "ssd", "mountPath": "/ssd"}]}
    pod = pod_of(of_kind(objects(manifests, {"node": node}), "DaemonSet")["moonpool-node"])
    assert volume in pod["volumes"]
    assert {"name": "ssd", "mountPath": "/ssd"} in pod["containers"][0]["volumeMounts"]


def test_the_monitors_reach_each_pod_and_have_the_alerts(manifests: ModuleType) -> None:
    assert not of_kind(objects(manifests, {}), "PodMonitor", "PrometheusRule")
    made = objects(manifests, {"monitor": {"enabled": True, "labels": {"release": "prometheus"}}})
    monitors = of_kind(made, "PodMonitor").values()
    (rule,) = of_kind(made, "PrometheusRule").values()
    assert all(each["metadata"]["labels"] == {"release": "prometheus"} for each in [*monitors, rule])
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())
    for workload in of_kind(made, *WORKLOADS).values():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        (monitor,) = (each for each in monitors if _selects(each, labels))
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (job,) = (each for each in endpoint["relabelings"] if each["targetLabel"] == "job")
        assert job["sourceLabels"] == ["__meta_kubernetes_pod_container_name"]
        (container,) = pod_of(workload)["containers"]
        assert endpoint["port"] in {each["name"] for each in container["ports"]}
        assert job["replacement"].replace("$1", container["name"]) in (
            "moonpool-master",
            "moonpool-node",
            "moonpool-proxy",
        )


def _selects(monitor: dict[str, Any], labels: dict[str, str]) -> bool:
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    return labels[selected["key"]] in selected["values"]


def test_tls_is_mounted_configured_and_probed(manifests: ModuleType, tmp_path: Path) -> None:
    values = {"tls": {"secret": "pool-tls"}, "proxy": {"tlsSecret": "front"}, "monitor": {"enabled": True}}
    made = objects(manifests, values)
    (text,) = (each["data"]["moonpool.toml"] for each in made if each["kind"] == "ConfigMap")
    (tmp_path / "moonpool.toml").write_text(text)
    loaded = config.load(tmp_path / "moonpool.toml", env={})
    assert (loaded.cluster.tls_control, loaded.cluster.tls_data) == ("on", "on")
    assert (loaded.cluster.tls_name, loaded.cluster.tls_data_name) == ("moonpool", "moonpool")
    files = {loaded.cluster.tls_cert, loaded.cluster.tls_key, loaded.cluster.tls_ca}
    assert files == {f"/etc/moonpool/tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
    for name, workload in of_kind(made, *WORKLOADS).items():
        pod = pod_of(workload)
        (container,) = pod["containers"]
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
        assert secrets[mounted["/etc/moonpool/tls"]] == {"secretName": "pool-tls", "defaultMode": 0o440}
        assert pod["securityContext"]["fsGroup"] == 1000  # root's files, of that group
        if name.endswith("-proxy"):
            assert loaded.proxy.tls_cert.startswith("/etc/moonpool/proxy-tls/")
            assert secrets[mounted["/etc/moonpool/proxy-tls"]]["secretName"] == "front"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    for monitor in of_kind(made, "PodMonitor").values():
        assert monitor["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"


def test_tls_of_the_pool_alone_leaves_the_proxies_in_plain(manifests: ModuleType) -> None:
    made = objects(manifests, {"tls": {"secret": "pool-tls"}})
    for name, workload in of_kind(made, *WORKLOADS).items():
        (container,) = pod_of(workload)["containers"]
        assert ("scheme" in container["readinessProbe"]["httpGet"]) == ("proxy" not in name)
    assert "tls_cert" not in toml_of(made)["proxy"]


def test_policies_can_be_left_out(manifests: ModuleType) -> None:
    assert of_kind(objects(manifests, {}), "NetworkPolicy")
    assert not of_kind(objects(manifests, {"networkPolicy": {"enabled": False}}), "NetworkPolicy")
