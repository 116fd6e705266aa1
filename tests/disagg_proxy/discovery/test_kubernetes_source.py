"""Engines that are pods, of a small API server over real HTTP. (No cluster is to be had here.)"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.kubernetes_source import KubernetesSource, parse
from tests.disagg_proxy.discovery.fake_kubernetes import Kubernetes, kubernetes, pod
from tests.disagg_proxy.discovery.heard import heard
from tests.disagg_proxy.harness import MockEngine, bed, until, with_deadline


def source(
    k: Kubernetes, more: str = "", account: Path = Path("/nowhere"), **options: Any
) -> KubernetesSource:
    return KubernetesSource(f"prod/app=vllm?api={k.url}{more}", {}, account, **{"retry_s": 0.001, **options})


@with_deadline
async def test_pods_come_change_and_go() -> None:
    async with kubernetes() as k:
        k.put(pod("a"))
        k.put(pod("other", labels={"app": "web"}))
        k.put(pod("pending", "", phase="Pending"))
        async with heard(source(k)) as h:
            await until(lambda: h.sets == [["a"]])
            assert h.last[0].spec.url == "http://10.0.0.1:8000"
            k.put(pod("b", "fd00::2"))
            await until(lambda: h.sets[-1] == ["a", "b"])
            assert h.last[1].spec.url == "http://[fd00::2]:8000"
            k.put(pod("pending", "10.0.0.7"))
            await until(lambda: h.sets[-1] == ["a", "b", "pending"])
            k.put(pod("a", "10.0.0.9"))  # a pod of a set has its name again, elsewhere
            await until(lambda: h.last[0].spec.url == "http://10.0.0.9:8000")
            k.put(pod("b", "fd00::2", deletionTimestamp="2026-11-21T00:00:00Z"))
            await until(lambda: h.sets[-1] == ["a", "pending"])
            assert h.ended[-1] == {"b"}
            k.delete("b")
            k.delete("pending")
            await until(lambda: h.sets[-1] == ["a"])
            assert set().union(*h.ended) == {"b", "pending"}
            k.put(pod("a", "10.0.0.9", phase="Failed"))
            await until(lambda: h.sets[-1] == [])
            assert not h.ended[-1]  # it may be started again
            assert not h.failures


@with_deadline
async def test_pods_of_one_name_in_two_namespaces_are_two_engines() -> None:
    async with kubernetes("*") as k:
        k.put(pod("vllm-0", "10.0.0.1", namespace="blue"))
        k.put(pod("vllm-0", "10.0.0.2", namespace="green"))
        made = KubernetesSource(f"*/app=vllm?api={k.url}", {}, Path("/nowhere"), retry_s=0.001)
        async with heard(made) as h:
            await until(lambda: h.sets == [["blue.vllm-0", "green.vllm-0"]])
            k.put(pod("vllm-0", "10.0.0.1", namespace="blue", resourceVersion="7"))  # its status changed
            k.delete("blue/vllm-0")
            await until(lambda: h.sets[-1] == ["green.vllm-0"])
            assert len(h.sets) == 2
            assert h.ended[-1] == {"blue.vllm-0"}
            assert h.last[0].spec.url == "http://10.0.0.2:8000"


@with_deadline
async def test_options_labels_and_annotations_say_what_a_pod_is() -> None:
    async with kubernetes() as k:
        k.put(pod("plain"))
        labels = {"app": "vllm", "moonpool.io/role": "prefill", "moonpool.io/port": "1"}
        told = {"moonpool.io/port": "9000", "moonpool.io/bootstrap": "8999", "moonpool.io/model": "llama"}
        told["moonpool.io/scheme"] = "https"
        k.put(pod("told", "10.0.0.2", labels=labels, annotations=told))
        k.put(pod("wrong", "10.0.0.3", annotations={"moonpool.io/port": "http"}))
        k.put(pod("odd", "10.0.0.4", annotations={"moonpool.io/role": "chef"}))
        k.put(pod("strange", "10.0.0.5", annotations={"moonpool.io/scheme": "ftp"}))
        async with heard(source(k, "&port=8100&role=decode&events=5557&replay=5558")) as h:
            await until(lambda: bool(h.sets))
            plain, other = h.last
            assert (plain.spec.url, plain.spec.role) == ("http://10.0.0.1:8100", "decode")
            assert plain.events is not None
            assert (plain.events.endpoint, plain.events.replay) == (
                "tcp://10.0.0.1:5557",
                "tcp://10.0.0.1:5558",
            )
            assert (other.spec.url, other.spec.role, other.model) == (
                "https://10.0.0.2:9000",
                "prefill",
                "llama",
            )
            assert other.spec.bootstrap_address == ("10.0.0.2", 8999)


@with_deadline
async def test_a_watch_goes_on_where_it_ended() -> None:
    async with kubernetes() as k:
        k.put(pod("a"))
        k.watch_s = 0.1
        async with heard(source(k)) as h:
            await until(lambda: k.watches >= 3)
            k.put(pod("b", "10.0.0.2"))
            await until(lambda: h.sets[-1] == ["a", "b"])
            assert (k.lists, h.failures) == (1, [])


@with_deadline
async def test_a_version_that_is_too_old_is_read_anew() -> None:
    async with kubernetes() as k:
        k.put(pod("a"))
        async with heard(source(k)) as h:
            await until(lambda: k.watches == 1)
            k.pods["b"] = pod("b", "10.0.0.2")  # nobody is told
            k.compact()
            await until(lambda: h.sets[-1] == ["a", "b"])
            k.bookmark()
            await until(lambda: k.watches >= 2)


@with_deadline
async def test_who_is_being_deleted_when_all_is_read_anew_has_ended() -> None:
    async with kubernetes() as k:
        k.put(pod("a"))
        k.put(pod("b", "10.0.0.2"))
        async with heard(source(k)) as h:
            await until(lambda: k.watches == 1)
            k.pods["b"] = pod("b", "10.0.0.2", deletionTimestamp="2026-11-21T00:00:00Z")  # nobody is told
            k.compact()
            await until(lambda: h.sets[-1] == ["a"])
            assert h.ended[-1] == {"b"}


@pytest.mark.parametrize("where", ["watch", "line", "list"])
@with_deadline
async def test_a_server_that_always_forgets_is_left_alone_for_a_while(where: str) -> None:
    """As real ones do for a while after they have started."""
    async with kubernetes() as k:
        k.put(pod("a"))
        k.forgets = where
        async with heard(source(k, retry_s=10.0)) as h:
            await until(lambda: bool(h.failures))
            assert "(410)" in h.failures[0]
            assert k.lists <= 2
            assert h.sets == ([] if where == "list" else [["a"], ["a"]])


@with_deadline
async def test_changes_that_come_fast_are_told_together_and_what_changes_nothing_is_not() -> None:
    async with kubernetes() as k:
        for number in range(200):
            k.put(pod(f"p{number:03d}", f"10.0.0.{number}"))
        async with heard(source(k)) as h:
            await until(lambda: k.watches == 1)
            for number in range(200):
                k.put(pod(f"p{number:03d}", f"10.0.0.{number}", annotations={"restarts": "1"}))
            for number in range(200):
                k.put(pod(f"p{number:03d}", f"10.0.1.{number}"))
            await until(lambda: h.last[-1].spec.url == "http://10.0.1.199:8000")
            assert len(h.sets) < 20
            told = len(h.sets)
            k.put(pod("p000", "10.0.1.0", annotations={"restarts": "2"}))
            k.put(pod("z"))
            await until(lambda: h.sets[-1][-1] == "z")
            assert len(h.sets) == told + 1


@with_deadline
async def test_many_pods_come_in_pages() -> None:
    async with kubernetes() as k:
        for number in range(1200):
            k.put(pod(f"p{number:04d}", f"10.0.{number // 250}.{number % 250}"))
        async with heard(source(k)) as h:
            await until(lambda: bool(h.sets))
            assert (len(h.sets[0]), k.lists) == (1200, 3)


@with_deadline
async def test_a_token_is_read_anew_and_a_refusal_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    async with kubernetes() as k:
        k.token = "second"
        async with heard(source(k, account=tmp_path)) as h:
            await until(lambda: bool(h.failures))
            assert "needs to get, list and watch pods of the namespace prod" in h.failures[0]
            (tmp_path / "token").write_text("second\n")
            await until(lambda: bool(h.sets))


@with_deadline
async def test_a_server_that_is_away_ill_or_silent_is_asked_again() -> None:
    async with kubernetes() as k:
        k.put(pod("a"))
        k.status = 500
        async with heard(source(k, silent_s=0.2)) as h:
            await until(lambda: bool(h.failures))
            assert "it answered 500: status 500" in h.failures[0]
            k.status = 0
            await until(lambda: h.sets == [["a"]])
            await until(lambda: k.lists >= 3)  # the watch was silent
            known = len(h.failures)
            k.status = 503
            k.cut()
            await until(lambda: len(h.failures) > known)
            k.status = 0
            k.put(pod("b", "10.0.0.2"))
            await until(lambda: h.sets[-1] == ["a", "b"])


@with_deadline
async def test_a_proxy_follows_pods_and_outlives_their_server() -> None:
    mock = MockEngine("vllm-0")
    await mock.start()
    async with kubernetes() as k:
        k.put(pod("vllm-0", "127.0.0.1", annotations={"moonpool.io/port": str(mock.port)}))
        name = f"kubernetes:prod/app=vllm?api={k.url}"
        async with bed(0, discovery=(name,), discovery_grace_s=0.1) as b:
            assert (await b.ask("POST", "/v1/completions", b"{}")).engine == "vllm-0"
            k.status = 503
            k.cut()
            while json.loads((await b.ask("GET", "/health")).body)["discovery"][0]["state"] != "lost":
                await asyncio.sleep(0)
            assert (await b.ask("POST", "/v1/completions", b"{}")).engine == "vllm-0"
            k.status = 0
            k.delete("vllm-0")
            await until(lambda: b.proxy.engines == ())  # at once, or after the next list's grace
    await mock.stop()


def test_names_of_sources_are_checked(tmp_path: Path) -> None:
    assert parse("prod/app=vllm") == ("app=vllm", "prod", {})
    assert parse("app=vllm,tier in (a,b)?port=1") == ("app=vllm,tier in (a,b)", "", {"port": "1"})
    assert parse("app.kubernetes.io/name=vllm") == ("app.kubernetes.io/name=vllm", "", {})
    assert parse("*/app.kubernetes.io/name=vllm") == ("app.kubernetes.io/name=vllm", "*", {})
    for text in ("prod/", "?port=1", "prod/app=vllm?prt=1"):
        with pytest.raises(ConfigError, match=r"kubernetes:\[NAMESPACE/\]LABEL=VALUE"):
            parse(text)
    with pytest.raises(ConfigError, match="no pod of a Kubernetes cluster"):
        KubernetesSource("app=vllm", {})
    (tmp_path / "namespace").write_text("mine")
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    made = KubernetesSource("app=vllm", inside, tmp_path)
    assert (made._api, made._path) == ("https://10.0.0.1:6443", "/api/v1/namespaces/mine/pods")
