"""Engines that a file names, while a proxy runs: real files, real sockets."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.file_source import FileSource, parse
from tests.disagg_proxy.discovery.heard import Heard, heard
from tests.disagg_proxy.harness import MockEngine, bed, proxy_process, until, with_deadline

BODY = b'{"model":"m","prompt":"hello"}'


def looked_at(path: Path) -> AbstractAsyncContextManager[Heard]:
    return heard(FileSource(str(path), look_every_s=0.005))


def put(path: Path, text: str) -> None:
    """As a whole, as editors do."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def toml(*names: str) -> str:
    return "".join(f'[[engines]]\nname = "{name}"\nurl = "http://{name}:80"\n' for name in names)


def test_the_three_forms_say_the_same() -> None:
    row = {
        "name": "p0",
        "url": "http://10.0.0.1:8000",
        "role": "prefill",
        "bootstrap": 9001,
        "events": "tcp://10.0.0.1:5557",
        "replay": "tcp://10.0.0.1:5558",
        "model": "llama",
    }
    as_json = json.dumps({"engines": [row, {"url": "http://10.0.0.2:8000"}]})
    as_toml = "[[engines]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items())
    as_toml += '[[engines]]\nurl = "http://10.0.0.2:8000"\n'
    as_yaml = "engines:\n- url: http://10.0.0.1:8000\n"
    as_yaml += "".join(f"  {key}: {value}\n" for key, value in row.items() if key != "url")
    as_yaml += "- {url: 'http://10.0.0.2:8000'}\n"
    found = parse(".json", as_json.encode())
    assert found == parse(".toml", as_toml.encode()) == parse(".yaml", as_yaml.encode())
    assert found[0].spec.bootstrap_address == ("10.0.0.1", 9001)
    assert found[0].events is not None
    assert (found[0].events.replay, found[0].model) == ("tcp://10.0.0.1:5558", "llama")
    assert found[1].name == "10.0.0.2-8000"


@pytest.mark.parametrize(
    ("suffix", "text", "sentence"),
    [
        (".json", '{"engines": [\n{"url": }]}', "line 2: Expecting value"),
        (".toml", "[[engines]]\nurl = http", "at line 2"),
        (".yaml", "engines:\n- url: 'x\n", "line 3: found unexpected end of stream"),
        (
            ".toml",
            '[[engines]]\nurl = "http://a:1"\n[[engines]]\nurl = "ftp://b:1"',
            "line 4: .*http://host:port",
        ),
        (".toml", toml("a", "b", "a"), "line 9: two engines are called 'a'"),
        (".toml", '[[engines]]\nurl = "http://a:1"\nrle = "decode"', "line 3: .*unknown field `rle`"),
        (".toml", '[[engines]]\nurl = "http://a:1"\nrole = 3', "line 3: Expected `str`"),
        (
            ".toml",
            '[[engines]]\nurl = "http://a:1"\nrole = "chef"',
            "line 2: .*role is both, prefill or decode",
        ),
        (".toml", '[[engines]]\nurl = "http://a..b:1"', "line 2: .*looks like http://host:port"),
        (".toml", "", "missing required field `engines`"),
        (".json", "[" * 100_000, "nested without end|line 1"),
        (".ini", "", "its name ends in"),
        (
            ".toml",
            '[[engines]]\nurl = "http://a:1"\nreplay = "tcp://a:2"',
            "line 2: .*replay endpoint and no events",
        ),
        (".toml", '[[engines]]\nurl = "http://a:1"\nevents = "a:2"', "line 2: .*tcp://host:port"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(suffix: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(suffix, text.encode())


def test_a_file_that_is_no_text_says_so() -> None:
    with pytest.raises(ConfigError, match="line 2: it is no UTF-8"):
        parse(".toml", b"a = 1\n\xff\n")


@with_deadline
async def test_a_broken_or_missing_file_keeps_the_last_good_set(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    async with looked_at(path) as listener:
        await until(lambda: bool(listener.failures))
        assert "No such file" in listener.failures[0]
        put(path, toml("a", "b"))
        await until(lambda: listener.sets == [["a", "b"]])
        listener.failures.clear()
        put(path, toml("a") + "oh")
        await until(lambda: bool(listener.failures))
        assert "line 4" in listener.failures[0]
        put(path, toml("a", "b", "c"))
        await until(lambda: listener.sets[-1] == ["a", "b", "c"])
        path.unlink()
        listener.failures.clear()
        await until(lambda: bool(listener.failures))
        put(path, toml("a", "b", "c"))
        await until(lambda: len(listener.sets) == 3)  # it is there again, though it says the same


@with_deadline
async def test_a_change_in_the_same_moment_and_of_the_same_size_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(toml("a"))
    moment = path.stat().st_mtime_ns + 3600 * 10**9  # not long ago, however long this takes
    os.utime(path, ns=(moment, moment))
    async with looked_at(path) as listener:
        for name in "bcdefg":
            await until(lambda: bool(listener.sets))
            listener.sets.clear()
            with path.open("r+") as file:  # in place
                file.write(toml(name))
            os.utime(path, ns=(moment, moment))
            await until(lambda name=name: listener.sets[-1:] == [[name]])  # type: ignore[misc]


@with_deadline
async def test_a_proxy_follows_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    mocks = [MockEngine(name) for name in ("left", "right")]
    for mock in mocks:
        await mock.start()
    rows = [f"- {{name: {mock.name}, url: '{mock.spec.url}'}}\n" for mock in mocks]
    put(path, "engines:\n" + rows[0])
    async with bed(0, discovery=(f"file:{path}",), discovery_grace_s=0.3) as b:
        assert (await b.ask("POST", "/v1/completions", BODY)).engine == "left"  # it was there at the start
        put(path, "engines:\n" + rows[0] + rows[1])
        await until(lambda: sum(engine.liveness.healthy for engine in b.proxy.engines) == 2)
        assert {(await b.ask("POST", "/v1/completions", BODY)).engine for _ in range(4)} == {"left", "right"}
        put(path, "engines:\n" + rows[1])
        await until(lambda: [engine.name for engine in b.proxy.engines] == ["right"])
        put(path, "engines: [}")
        metric = f'moonpool_proxy_discovery_up{{source="file:{path}"}} 0.0'
        while metric not in (await b.ask("GET", "/metrics")).body.decode():
            await asyncio.sleep(0)
        health = json.loads((await b.ask("GET", "/health")).body)
        assert health["discovery"][0]["state"] == "lost"
        assert "line 1" in health["discovery"][0]["why"]
        assert (await b.ask("POST", "/v1/completions", BODY)).engine == "right"
    for mock in mocks:
        await mock.stop()


@with_deadline
async def test_a_proxy_says_at_its_start_where_its_engines_come_from(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(toml("a"))
    said = tmp_path / "said"
    with said.open("wb") as output:
        async with proxy_process(discovery=(f"file:{path}",), output=output) as proxy:
            client = await proxy.client()
            assert json.loads((await client.ask("GET", "/engines")).body)["engines"][0]["name"] == "a"
            client.leave()
    assert f"(round_robin over those of file:{path})" in said.read_text()
