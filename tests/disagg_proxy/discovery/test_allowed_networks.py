"""Where engines may register, and that a name means one address for good."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool.core.config.config import load
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy import process
from moonpool.disagg_proxy.discovery import host_resolver
from moonpool.disagg_proxy.discovery.allowed_networks import AllowedNetworks
from moonpool.disagg_proxy.discovery.host_resolver import HostResolver
from moonpool.disagg_proxy.discovery.registration import Registration
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.launch.snapshot import take
from tests.disagg_proxy.harness import Bed, MockEngine, bed, until, with_deadline

HTTP: dict[str, Any] = {"discovery": ("http",), "policy": "conductor", "tokenizer": ("none",)}
CLIENT, REGISTRAR = "Authorization: Bearer of-a-client\r\n", "Authorization: Bearer of-a-registrar\r\n"


@pytest.fixture
def keyed(tmp_path: Path) -> dict[str, Any]:
    """Settings of a proxy with clients and registrars of their own."""
    clients, registrars = tmp_path / "clients", tmp_path / "registrars"
    clients.write_text("of-a-client\n")
    registrars.write_text("of-a-registrar\n")
    return {**HTTP, "api_keys_file": str(clients), "discovery_keys_file": str(registrars)}


async def register(b: Bed, head: str = "", **told: object) -> tuple[int, str]:
    answer = await b.ask("POST", "/register", json.dumps(told).encode(), head)
    return answer.status, answer.body.decode()


def told(**more: object) -> Registration:
    return msgspec.convert({"instance_id": "a", **more}, Registration)


@with_deadline
async def test_a_clients_key_brings_in_no_engine(keyed: dict[str, Any]) -> None:
    """S1: a tenant's own server got other tenants' prompts."""
    async with bed(1, **keyed) as b:
        rogue = MockEngine("rogue")
        await rogue.start()
        b.engines.append(rogue)
        status, _ = await register(b, CLIENT, instance_id="rogue", url=rogue.spec.url, modelname="m")
        assert status == 401
        status, _ = await register(b, REGISTRAR, instance_id="rogue", url=rogue.spec.url, modelname="m")
        assert status == 200
        gone = await b.ask("POST", "/unregister", b'{"instance_id": "rogue"}', CLIENT)
        assert gone.status == 401


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"api_keys_file": "clients"}, "--discovery-keys-file"),
        ({"host": "10.0.0.1"}, "--discovery-keys-file"),
        ({"host": "10.0.0.1", "discovery_keys_file": "keys"}, "--discovery-allow"),
        ({"discovery_allow": ("10.0.0.0/33",)}, "takes networks such as 10.0.0.0/8"),
        ({"discovery_allow": ("10.1.0.0/8",)}, "takes networks such as 10.0.0.0/8"),
    ],
)
def test_a_registry_that_would_let_strangers_in_does_not_start(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ProxySettings(discovery=("http",), **more)
    with pytest.raises(ConfigError, match="--discovery http alone"):
        ProxySettings(engines=(EngineSpec("a", "http://h:1"),), discovery_allow=("10.0.0.0/8",))


def test_a_key_is_a_clients_or_a_registrars(
    keyed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(keyed["discovery_keys_file"]).write_text("of-a-registrar\nof-a-client\n")
    assert process.run(ProxySettings(port=0, **keyed)) == 2
    said = capsys.readouterr().err
    assert "have a key in common" in said
    assert "of-a-client" not in said.replace(keyed["api_keys_file"], "")


@with_deadline
async def test_only_who_has_a_key_sees_where_engines_are(keyed: dict[str, Any]) -> None:
    async with bed(1, **keyed) as b:
        for path in ("/engines", "/ui/data"):
            assert (await b.ask("GET", path)).status == 401
            assert (await b.ask("HEAD", path)).status == 401
            for head in (CLIENT, REGISTRAR):
                assert (await b.ask("GET", path, head=head)).status == 200
        for path in ("/health", "/metrics", "/ui"):
            assert (await b.ask("GET", path)).status == 200
    async with bed(1) as b:
        assert (await b.ask("GET", "/engines")).status == 200


@with_deadline
async def test_status_of_this_host_sends_a_key_of_its_own_proxy(keyed: dict[str, Any]) -> None:
    async with bed(1, **keyed) as b:
        listen = f"127.0.0.1:{b.port}"
        ours = {"proxy.listen": listen, "proxy.api_keys_file": keyed["api_keys_file"]}
        config = load(env={}, arguments={"node.http": "off", **ours})
        seen = await asyncio.to_thread(take, config, timeout_s=10.0)
        assert (seen.proxy_answers, [each.name for each in seen.engines]) == (True, ["engine-0"])
        strange = await asyncio.to_thread(take, config, proxy_url=f"http://{listen}", timeout_s=10.0)
        assert not strange.proxy_answers  # an address that somebody typed gets no key


@with_deadline
async def test_no_engine_registers_outside_of_the_networks() -> None:
    """S1: any host and port was asked for /health, /v1/models, /server_info and /query."""
    async with bed(0, discovery_allow=("127.0.0.0/8", "169.254.0.0/16", "10.0.0.0/8"), **HTTP) as b:
        for hosts in (
            {"url": "http://192.0.2.1:80"},
            {"url": "http://169.254.169.254"},  # also where the operator's network has it
            {"url": "http://[::ffff:169.254.169.254]"},
            {"url": "http://[fe80::1]:80"},
            {"url": "http://0.0.0.0:8000"},
            {"url": "http://0x7f.1:1", "endpoint": "tcp://192.0.2.1:1"},
            {"endpoint": "tcp://192.0.2.1:5557"},
            {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://192.0.2.1:5558"},
            {"url": "http://127.0.0.1:1", "role": "prefill", "bootstrap": "192.0.2.1:8998"},
        ):
            status, said = await register(b, instance_id="a", **hosts)
            assert (status, "outside of the networks" in said) == (400, True), (hosts, said)
        for wrong in ("tcp://127.0.0.1;192.0.2.1:1", "tcp://127.0.0.1:1;192.0.2.1:1"):
            assert (await register(b, instance_id="a", endpoint=wrong))[0] == 400
        assert b.proxy.engines == ()
        status, said = await register(b, instance_id="a", url="http://10.1.2.3:8000")
        assert status == 200, said


@with_deadline
async def test_without_networks_engines_of_this_host_alone_register() -> None:
    async with bed(0, **HTTP) as b:
        assert (await register(b, instance_id="a", url="http://127.0.0.1:9"))[0] == 200
        assert (await register(b, instance_id="b", url="http://[::ffff:127.0.0.1]:8"))[0] == 200
        assert (await register(b, instance_id="c", url="http://10.0.0.1:9"))[0] == 400


@with_deadline
async def test_a_name_is_looked_up_once_and_its_address_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the name means another host by the time that the engine is asked."""
    meant = ["127.0.0.1"]

    async def resolve(host: str) -> list[str]:
        assert host == "engine.example"
        return list(meant)

    monkeypatch.setattr(host_resolver, "_resolve", resolve)
    async with bed(0, **HTTP) as b:
        mock = MockEngine("a")
        await mock.start()
        b.engines.append(mock)
        url = f"http://engine.example:{mock.port}"
        assert (await register(b, instance_id="a", url=url))[0] == 200
        assert b.proxy.engines[0].url == mock.spec.url
        await until(lambda: b.proxy.engines[0].liveness.healthy)
        meant[:] = ["192.0.2.1"]
        status, said = await register(b, instance_id="a", url=url)
        assert (status, "engine.example (192.0.2.1) is outside" in said) == (400, True)
        assert (await b.ask("POST", "/v1/completions", b"{}")).engine == "a"


@with_deadline
async def test_of_several_addresses_an_allowed_one_is_taken_and_kept() -> None:
    meant: list[str] = ["10.0.0.9", "192.0.2.1", "10.0.0.5", "fe80::1"]

    async def resolve(host: str) -> list[str]:
        return meant

    made = HostResolver(AllowedNetworks(["10.0.0.0/8"]), resolve)
    first = await made.resolve(
        told(
            url="http://h", endpoint="tcp://h:1", replay_endpoint="tcp://h:2", role="prefill", bootstrap="h:3"
        ),
        None,
    )
    assert first == told(
        url="http://10.0.0.5:80",
        endpoint="tcp://10.0.0.5:1",
        replay_endpoint="tcp://10.0.0.5:2",
        role="prefill",
        bootstrap="10.0.0.5:3",
    )
    meant.insert(0, "10.0.0.1")
    assert await made.resolve(told(url="http://h"), first) == told(url="http://10.0.0.5:80")
    meant[:] = ["10.0.0.1"]
    assert await made.resolve(told(url="http://h"), first) == told(url="http://10.0.0.1:80")
    secure = told(url="https://h")
    assert await made.resolve(secure, None) == told(url="https://10.0.0.1:443")
    AllowedNetworks(["10.0.0.0/8"]).require_allowed(first.hosts())
    with pytest.raises(ConfigError, match="is a name"):
        AllowedNetworks(["10.0.0.0/8"]).require_allowed(told(url="http://h").hosts())


@with_deadline
async def test_a_name_that_has_no_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def silent(host: str) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(host_resolver, "RESOLVE_S", 0.01)
    for resolve in (unknown, silent):
        with pytest.raises(ConfigError, match="has no address"):
            await HostResolver(AllowedNetworks(), resolve).resolve(told(url="http://h:1"), None)


@with_deadline
async def test_a_file_of_registrations_brings_in_no_engine_from_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that an older proxy wrote, with names, or that somebody else has changed."""
    rows = [
        {"told": {"instance_id": name, "url": url}, "made": 1}
        for name, url in (
            ("far", "http://192.0.2.1:8000"),
            ("named", "http://localhost:8000"),
            ("near", "http://127.0.0.1:9"),
        )
    ]
    file = tmp_path / "registered.json"
    file.write_text(json.dumps({"registrations": rows}))
    async with bed(0, discovery_registry_file=str(file), **HTTP) as b:
        assert [engine.name for engine in b.proxy.engines] == ["near"]
    assert "far|default|0 is left out" in caplog.text
    assert "named|default|0 is left out" in caplog.text
