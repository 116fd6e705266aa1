"""No engine registers where the proxy itself listens: a request would come back to it, and again."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.own_addresses import OwnAddresses
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import ProxySettings
from tests.disagg_proxy.harness import Bed, bed, with_deadline
from tests.ports import held_run

HTTP: dict[str, Any] = {"discovery": ("http",), "policy": "conductor", "tokenizer": ("none",)}
REGISTRAR = "Authorization: Bearer of-a-registrar\r\n"


async def registered(b: Bed, url: str, head: str = "") -> tuple[int, bool]:
    """The status, and whether the proxy says that the address is its own."""
    answer = await b.ask("POST", "/register", json.dumps({"instance_id": "a", "url": url}).encode(), head)
    return answer.status, b"is an address of this proxy itself; register" in answer.body


@with_deadline
async def test_an_engine_at_the_proxys_address_is_refused() -> None:
    async with bed(0, **HTTP) as b:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            assert await registered(b, f"http://{host}:{b.port}") == (400, True), host
        assert b.proxy.engines == ()
        assert await registered(b, f"http://127.0.0.2:{b.port}") == (200, False)  # it does not listen there
        assert await registered(b, f"http://127.0.0.1:{b.port - 1}") == (200, False)


@with_deadline
async def test_a_proxy_at_all_addresses_is_at_each_of_the_host(tmp_path: Path) -> None:
    keys = tmp_path / "registrars"
    keys.write_text("of-a-registrar\n")
    more = {
        "host": "0.0.0.0",
        "discovery_keys_file": str(keys),
        "discovery_allow": ("127.0.0.0/8", "192.0.2.0/24"),
    }
    async with bed(0, **HTTP, **more) as b:
        for host in ("127.0.0.1", "127.9.8.7", "localhost"):
            assert await registered(b, f"http://{host}:{b.port}", REGISTRAR) == (400, True), host
        assert await registered(b, f"http://192.0.2.1:{b.port}", REGISTRAR) == (200, False)  # another host's


@with_deadline
async def test_a_sibling_is_no_engine() -> None:
    """Process 1 of 3: it has the socket that all share, and its own."""
    with held_run(3) as first, socket.socket() as shared, socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.bind(("127.0.0.1", 0))
        own.bind(("127.0.0.1", first + 1))
        settings = ProxySettings(
            processes=3, process_number=1, process_listen=f"127.0.0.1:{first + 1}", **HTTP
        )
        proxy = Proxy(settings, sockets=[shared.dup(), own.dup()])
        try:
            await proxy.open()
            b = Bed(proxy, [], "127.0.0.1", first + 1)
            ports = [shared.getsockname()[1], first, first + 1, first + 2]
            for port in ports:
                assert await registered(b, f"http://127.0.0.1:{port}") == (400, True), port
            for client in b.clients:
                client.leave()
        finally:
            await proxy.close()


def test_addresses_of_another_family_or_host_are_others() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this host has no IPv6")
    every = OwnAddresses([("::", 80)])
    every.require_other("127.0.0.1", 80)  # the proxy's sockets of IPv6 take no IPv4
    every.require_other("2001:db8::1", 80)
    with pytest.raises(ConfigError, match="::1 port 80 is an address of this proxy itself"):
        every.require_other("::1", 80)
