"""Tenants that cannot ask about each other: the same prompt of two of them shares no block, and neither
counts of cached tokens nor /query tell one what the other has asked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from moonpool.disagg_proxy.tenant_salts import salt_of, told_salt

from .client_rows import ROWS
from .fleet_bed import Fleet, fleet, play

MORE = '\n[[clients]]\nname = "a2"\nkey = "key-of-a2"\ntenant = "first"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clients.toml"
    path.write_text(ROWS + MORE)
    return path


async def cached(there: Fleet, name: str, prompt: list[int], **more: Any) -> tuple[int, int]:
    """Of a prompt with the key of a row: tokens from the cache, and tokens that the proxy expected there."""
    await there.settle()
    await there.hear()
    headers = {"Authorization": f"Bearer key-of-{name}", "X-Moonpool-Decision": "1"}
    body = {"model": "mock", "prompt": prompt, "max_tokens": 2, **more}
    async with there.session.post(there.url + "/v1/completions", json=body, headers=headers) as answer:
        content = await answer.json()
        assert answer.status == 200, content
        decision = json.loads(answer.headers["X-Moonpool-Decision"])
    details = content["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0, decision["own_tokens"]


async def longest(there: Fleet, name: str, ids: list[int]) -> int:
    headers = {"Authorization": f"Bearer key-of-{name}"}
    body = {"model": "mock", "token_ids": ids, "block_size": 16}
    async with there.session.post(there.url + "/query", json=body, headers=headers) as answer:
        content = await answer.json()
        assert answer.status == 200, content
    return max(row["longest_matched"] for row in content["default"].values())


@pytest.mark.parametrize("share", [False, True])
def test_tenants_find_the_blocks_of_others_only_where_they_share(
    file: Path, rng: random.Random, share: bool
) -> None:
    prompt = [rng.randrange(1000) for _ in range(400)]

    async def scenario() -> None:
        rows: dict[str, Any] = {"clients_file": str(file), "tenants_share": share, "discovery": ("http",)}
        async with fleet("both", events=True, **rows) as there:
            assert await cached(there, "a", prompt) == (0, 0)
            tokens, expected = await cached(there, "a2", prompt)
            assert tokens > 300
            assert expected > 300
            assert await longest(there, "a2", prompt) >= tokens
            assert (await longest(there, "b", prompt) > 0) == share
            assert await cached(there, "b", prompt) == ((tokens, expected) if share else (0, 0))
            # A client's own salt separates within its tenant, and reaches no other one.
            assert (await cached(there, "a", prompt, cache_salt="mine"))[0] == 0
            assert (await cached(there, "a2", prompt, cache_salt="mine"))[0] == tokens
            for guess in ("mine", salt_of("first"), told_salt(salt_of("first"), "mine")):
                reached = (await cached(there, "b", prompt, cache_salt=guess))[0]
                assert reached == (tokens if share and guess == "mine" else 0)

    play(scenario)
