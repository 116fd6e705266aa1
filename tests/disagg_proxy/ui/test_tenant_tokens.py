"""Reuse by tenant: the sums are those of all prompts, and have a bounded number of rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from moonpool.disagg_proxy.ui.history import History
from moonpool.disagg_proxy.ui.tenant_tokens import OTHER, TENANTS_MAX
from tests.disagg_proxy.client_rows import ROWS, shown
from tests.disagg_proxy.harness import Bed, bed, with_deadline

from .made import finished


def test_a_thousand_tenants_have_a_bounded_number_of_rows(rng: random.Random) -> None:
    history = History(lambda: 0.0, dict)
    for number in range(2_000):
        tokens = rng.randrange(2_000)
        made = finished(tokens=tokens, own=(rng.randrange(3_000), 0, 0), pool=rng.randrange(3_000))
        history.on_finish(made._replace(asked=made.asked._replace(tenant=f"t{number % 1_000}")))
        history.gather(100.0)
    sums = history.tenants.sums
    assert len(sums) == TENANTS_MAX + 1
    assert {"t0", f"t{TENANTS_MAX - 1}", OTHER} <= sums.keys()
    total = history.total
    assert sum(each.own for each in sums.values()) == total.own > 0
    assert sum(each.pool for each in sums.values()) == total.pool > 0
    assert sum(each.own + each.pool + each.computed for each in sums.values()) == total.tokens


async def prompt_tokens(b: Bed, name: str) -> dict[tuple[str, str], float]:
    """Values of a metric by tenant and source."""
    page = (await b.ask("GET", "/metrics")).body.decode()
    return {
        (sample.labels.get("tenant", ""), sample.labels["source"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"moonpool_proxy_{name}"
    }


@with_deadline
async def test_a_tenant_is_that_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    file.write_text(ROWS)
    settings: dict[str, Any] = {"policy": "conductor", "tokenizer": ("none",)}
    async with bed(1, clients_file=str(file), **settings) as b:
        for name, length in (("a", 100), ("b", 30), ("b", 7)):
            head = shown(name) + "X-Moonpool-Tenant: forged\r\n"
            body = b'{"prompt":[%b]}' % b",".join([b"7"] * length)
            assert (await b.ask("POST", "/v1/completions", body, head)).status == 200
        rows = await prompt_tokens(b, "tenant_prompt_tokens_total")
        assert {tenant for tenant, _ in rows} == {"first", "b"}
        assert sum(value for (tenant, _), value in rows.items() if tenant == "first") == 100
        assert sum(value for (tenant, _), value in rows.items() if tenant == "b") == 37
        whole = await prompt_tokens(b, "prompt_tokens_total")
        for source in ("own", "pool", "computed"):
            assert whole["", source] == rows["first", source] + rows["b", source]
