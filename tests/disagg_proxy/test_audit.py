"""What the audit log tells of a proxy: who registered what, who was refused, when it ends."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.service.audit import key_digest
from moonpool.disagg_proxy import audit, server
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import ProxySettings

from .client_rows import ROWS, shown
from .harness import QUIET, Bed, FakeClock, bed, until, with_deadline

HTTP: dict[str, Any] = {"discovery": ("http",), "policy": "conductor", "tokenizer": ("none",)}
ENGINE = {"instance_id": "x", "url": "http://127.0.0.1:9", "role": "both"}


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    path = tmp_path / "clients.toml"
    path.write_text(ROWS)
    return path


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What was recorded since the last call, without what differs from run to run."""
    found = [json.loads(each.getMessage()) for each in caplog.records if each.name == "moonpool.audit"]
    caplog.clear()
    for each in found:
        for name in ("pid", "request"):
            each.pop(name, None)
    return found


async def post(b: Bed, path: str, body: object, head: str = "") -> int:
    return (await b.ask("POST", path, json.dumps(body).encode(), head)).status


@with_deadline
async def test_registrations_and_refused_keys(clients: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moonpool.audit")
    by = {"client": "engines"}
    async with bed(0, clients_file=str(clients), **HTTP) as b:
        for _ in range(2):  # the second only renews it
            assert await post(b, "/register", {**ENGINE, "ttl_s": 60}, shown("engines")) == 200
        assert events(caplog) == [
            {"event": "engine_joined", "engine": "x", "url": ENGINE["url"], "role": "both"},
            {
                "event": "engine_registered",
                "instance": "x",
                "tenant": "default",
                "url": ENGINE["url"],
                "role": "both",
                **by,
            },
        ]
        assert await post(b, "/register", {**ENGINE, "url": "http://192.0.2.1:9"}, shown("engines")) == 400
        assert await post(b, "/unregister", {"instance_id": "y"}, shown("engines")) == 404
        outside, unknown = events(caplog)
        assert (outside["event"], outside["status"]) == ("registration_refused", 400)
        assert outside["client"] == "engines"
        assert outside["why"].startswith("192.0.2.1 is outside of the networks")
        assert (unknown["event"], unknown["status"]) == ("registration_refused", 404)
        assert await post(b, "/unregister", {"instance_id": "x"}, shown("engines")) == 200
        removed, unregistered = events(caplog)
        assert (removed["event"], removed["engine"]) == ("engine_removed", "x")
        assert unregistered == {"event": "engine_unregistered", "instances": "x|default|0", **by}
        assert await post(b, "/register", ENGINE, shown("a")) == 401
        assert await post(b, "/register", ENGINE, "Authorization: Bearer of-a-stranger\r\n") == 401
        assert (await b.ask("GET", "/engines")).status == 401
        assert events(caplog) == [
            {"event": "key_refused", "path": "/register", "client": "a"},
            {"event": "key_refused", "path": "/register", "key": key_digest(b"of-a-stranger")},
            {"event": "key_refused", "path": "/engines"},
        ]


@with_deadline
async def test_a_key_that_is_withdrawn_meanwhile_and_the_end(
    clients: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a request that the data plane has admitted already."""
    caplog.set_level(logging.INFO, "moonpool.audit")
    async with bed(1, clients_file=str(clients), policy="least_load") as b:
        clients.write_text(ROWS.replace("key-of-b", "another"))
        assert b.proxy._keys.clients is not None
        assert b.proxy._keys.clients.reload()
        assert (await b.ask("POST", "/v1/completions", b"{}", shown("b"))).status == 401
        await b.proxy.drain()
        assert events(caplog) == [
            {"event": "key_refused", "path": "/v1/completions", "key": key_digest(b"key-of-b")},
            {"event": "drain", "why": "it was asked to stop"},
        ]


@with_deadline
async def test_refusals_of_the_data_plane_are_summed_up(
    clients: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses keys by the head of a request."""
    monkeypatch.setattr(server, "_OBSERVE_EVERY_S", 0.01)
    caplog.set_level(logging.INFO, "moonpool.audit")
    clock = FakeClock()
    async with bed(1, clients_file=str(clients), clock=clock) as b:
        for _ in range(3):
            assert (await b.ask("POST", "/v1/completions", b"{}", shown("stranger"))).status == 401
        clock.now += audit.SUMMARY_EVERY_S
        await until(lambda: any(each.name == "moonpool.audit" for each in caplog.records))
        (summed,) = events(caplog)
        assert (summed["event"], summed["reason"], summed["count"]) == ("keys_refused", "invalid_api_key", 3)


@with_deadline
async def test_a_take_over_is_told_by_both(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moonpool.audit")
    async with bed(1) as b:
        settings = ProxySettings(port=b.port, take_over=True, engines=(b.engines[0].spec,), health=QUIET)
        successor = Proxy(settings)
        try:
            await successor.open()
            await until(b.proxy.replaced.is_set)
            await b.proxy.drain()
        finally:
            await successor.close()
        assert events(caplog) == [
            {"event": "take_over", "address": f"127.0.0.1:{b.port}"},
            {"event": "drain", "why": "another proxy has taken over"},
        ]
