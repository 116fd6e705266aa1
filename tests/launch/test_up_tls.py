"""`moonpool up` and a proxy inside TLS: when it counts as ready."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonpool.core.config import config, sections
from moonpool.launch import up_plan
from tests.disagg_proxy.harness import MockEngine, with_deadline
from tests.disagg_proxy.tls_files import Files


@pytest.mark.parametrize("asks_clients", [False, True], ids=["on", "mutual"])
@with_deadline
async def test_a_proxy_inside_tls_is_ready_when_it_serves(
    tmp_path: Path, runtime: Path, asks_clients: bool
) -> None:
    """Where each client needs a certificate no page can be asked for: that it listens must do."""
    files = Files(tmp_path / "proxy")
    given = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca if asks_clients else ""}
    arguments: dict[str, object] = {
        "up.engine": [sections.Engine(engine="mock")],
        "node.http": "off",
        "proxy.listen": "127.0.0.1:0",
        **{f"proxy.{name}": value for name, value in given.items()},
    }
    plan = up_plan.plan(config.load(env={}, arguments=arguments), env={"PATH": os.environ["PATH"]})
    proxy = next(spec for spec in plan.specs if spec.kind == "proxy")
    assert proxy.url.startswith("https://127.0.0.1:")
    page = MockEngine("page")  # in place of the proxy: it answers /health
    page.port = int(proxy.url.rsplit(":", 1)[1])
    page.tls = files.server(client_ca=files.ca if asks_clients else "")
    try:
        assert not await proxy.ready()
        await page.start()
        assert await proxy.ready()
    finally:
        await page.stop()
        plan.ports.release()
