"""Clients with rows: what each key may do, and whose tenant and priority its requests have."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.config.config import load
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy import process
from moonpool.disagg_proxy.clients import Clients, read_clients
from moonpool.disagg_proxy.conductor.policies.conductor import Conductor
from moonpool.disagg_proxy.from_config import proxy_settings
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.launch.snapshot import take

from .client_rows import ROWS, shown
from .harness import bed, with_deadline

CHAT = "/v1/chat/completions"
HTTP: dict[str, Any] = {"discovery": ("http",), "policy": "conductor", "tokenizer": ("none",)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clients.toml"
    path.write_text(ROWS)
    return path


@with_deadline
async def test_a_key_may_do_what_its_row_says_and_nothing_else(file: Path) -> None:
    engine = {"instance_id": "x", "url": "http://127.0.0.1:9"}
    query = {"model": "m", "token_ids": [1], "block_size": 4}
    async with bed(1, clients_file=str(file), **HTTP) as b:
        seen = {}
        for name in ("a", "b", "watcher", "engines", "stranger"):
            asked = await b.ask("POST", CHAT, b"{}", shown(name))
            queried = await b.ask("POST", "/query", json.dumps(query).encode(), shown(name))
            looked = [
                (await b.ask("GET", path, head=shown(name))).status for path in ("/engines", "/ui/data")
            ]
            told = await b.ask("POST", "/register", json.dumps(engine).encode(), shown(name))
            ended = await b.ask("POST", "/unregister", b'{"instance_id": "x"}', shown(name))
            seen[name] = [asked.status, queried.status, *looked, told.status, ended.status]
        assert seen == {
            "a": [200, 200, 401, 401, 401, 401],
            "b": [200, 200, 401, 401, 401, 401],
            "watcher": [401, 401, 200, 200, 401, 401],
            "engines": [401, 401, 401, 401, 200, 200],
            "stranger": [401] * 6,
        }
        assert [(await b.ask("GET", path)).status for path in ("/engines", "/health")] == [401, 200]


@with_deadline
async def test_a_session_is_the_tenants_own(file: Path) -> None:
    async with bed(1, clients_file=str(file), policy="conductor", tokenizer=("none",)) as b:
        policy = b.proxy._dispatcher.scheduler.policy
        assert isinstance(policy, Conductor)
        sessions = policy._sessions
        for name in ("a", "b"):
            head = shown(name) + "X-Moonpool-Session: talk\r\n"
            assert (await b.ask("POST", "/v1/completions", b'{"prompt":[1,2]}', head)).status == 200
        assert {each for each in ("first talk", "b talk", "talk") if sessions.find(each)} == {
            "first talk",
            "b talk",
        }


DIGEST_OF_A = hashlib.sha256(b"key-of-a").hexdigest()
BAD = {
    "[[clients]\n": "is no file of clients",
    "[[client]]\nname = 'a'\n": "is no file of clients",
    "clients = 3\n": "is no file of clients",
    "": "no row of .* may ask",
    ROWS + "[[clients]]\nname = 'a'\nkey = 'k'\n": "rows 1 and 5 of .* are both called 'a'",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'key-of-a'\n": r"rows 1 and 5 \(c\) of .* have the same key",
    ROWS + "[[clients]]\nkey = 'secret'\n": "row 5 of .* has no name",
    ROWS + "[[clients]]\nname = 'a b'\nkey = 'secret'\n": "row 5 of .* has no name",
    ROWS + "[[clients]]\nname = 'c'\n": r"row 5 \(c\) of .* has key or key_sha256",
    ROWS
    + f"[[clients]]\nname = 'c'\nkey = 'secret'\nkey_sha256 = '{64 * 'a'}'\n": r"row 5 \(c\) .* not both",
    ROWS + "[[clients]]\nname = 'c'\nkey_sha256 = 'secret'\n": r"row 5 \(c\) .*key_sha256",
    ROWS + f"[[clients]]\nname = 'c'\nkey_sha256 = '{DIGEST_OF_A}'\n": r"rows 1 and 5 \(c\) of .* same key",
    ROWS + "[[clients]]\nname = 'c'\nkey = ''\n": r"row 5 \(c\)",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'secret two'\n": r"row 5 \(c\)",
    ROWS
    + "[[clients]]\nname = 'c'\nkey = 'secret\\n'\n".replace("'secret\\n'", '"secret\\n"'): r"row 5 \(c\)",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'secret'\nmay = ['own']\n": r"row 5 \(c\) .* enum value 'own'",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'secret'\nmay = []\n": r"row 5 \(c\)",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'secret'\nmax_priority = 101\n": r"row 5 \(c\) .*max_priority",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'secret'\ntenants = 'x'\n": r"row 5 \(c\) .*`tenants`",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'secret'\ntenant = 'x y'\n": r"row 5 \(c\) .*tenant",
    ROWS + "[[clients]]\nname = 'c'\nkey = 'secret'\nmay = ['ask', 'register']\n": r"row 5 \(c\) .* its own",
    ROWS.replace("register", "look"): "no row of .* may register",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_refused_with_its_row_and_without_a_key(
    file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert process.run(ProxySettings(port=0, clients_file=str(file), **HTTP)) == 2
    said = capsys.readouterr().err
    with pytest.raises(AssertionError, match=BAD[text]):
        raise AssertionError(said)
    assert said.count("\n") == 1
    assert "secret" not in said


def test_a_file_of_clients_stands_in_place_of_files_of_keys(file: Path, tmp_path: Path) -> None:
    engines = (EngineSpec("a", "http://127.0.0.1:1"),)
    for other in ("api_keys_file", "discovery_keys_file"):
        with pytest.raises(ConfigError, match=f"leave {other} out"):
            ProxySettings(engines=engines, clients_file=str(file), **{other: "keys"})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_clients(str(tmp_path / "none"), registers=False)
    config = {"proxy.listen": "0.0.0.0:8080", "proxy.engines": ["http://127.0.0.1:1"], "proxy.pool": "none"}
    with pytest.raises(ConfigError, match="--clients-file"):
        proxy_settings(load(env={}, arguments=config))
    assert proxy_settings(load(env={}, arguments=config | {"proxy.clients_file": str(file)})).clients_file


@with_deadline
async def test_status_of_this_host_sends_a_key_that_may_look(file: Path) -> None:
    async with bed(1, clients_file=str(file)) as b:
        ours = {"proxy.listen": f"127.0.0.1:{b.port}", "proxy.clients_file": str(file), "node.http": "off"}
        seen = await asyncio.to_thread(take, load(env={}, arguments=ours), timeout_s=10.0)
        assert (seen.proxy_answers, [each.name for each in seen.engines]) == (True, ["engine-0"])


@with_deadline
@pytest.mark.parametrize("policy", ["conductor", "round_robin"])
async def test_a_reload_gives_and_takes_keys_and_a_bad_file_changes_nothing(
    file: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moonpool.proxy")
    async with bed(1, clients_file=str(file), policy=policy, tokenizer=("none",)) as b:

        async def statuses() -> list[int]:
            asked = [(await b.ask("POST", CHAT, b"{}", shown(name))).status for name in ("a", "b")]
            return [*asked, (await b.ask("GET", "/engines", head=shown("watcher"))).status]

        assert await statuses() == [200, 200, 200]
        file.write_text(ROWS + "[[clients]]\nname = 'c'\n")
        b.proxy.reload()
        assert "the clients stay as they were: proxy: row 5 (c)" in caplog.text
        assert await statuses() == [200, 200, 200]
        digest = hashlib.sha256(b"key-of-c").hexdigest()
        by_digest = ROWS.replace('key = "key-of-b"', f'key_sha256 = "{digest}"')
        file.write_text(by_digest.replace("key-of-watcher", "other"))
        b.proxy.reload()
        assert await statuses() == [200, 401, 401]
        assert (await b.ask("POST", CHAT, b"{}", shown("c"))).status == 200
        assert "key-of" not in caplog.text


def test_a_reload_raises_a_priority(file: Path) -> None:
    clients = Clients(str(file), registers=False)
    file.write_text(ROWS.replace("max_priority = 5", "max_priority = 50"))
    assert clients.reload()
    client = clients.find(b"bearer key-of-a ")
    assert client is not None
    assert (client.tenant_name, client.max_priority) == ("first", 50)
    assert clients.find(b"Basic key-of-a") is None
    assert clients.find(None) is None
