"""What cannot be meant is refused with one sentence."""

from __future__ import annotations

import pytest

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings, parse_engines

ONE = (EngineSpec("a", "http://127.0.0.1:8000"),)


def test_names_are_given_or_made() -> None:
    specs = parse_engines(["http://a:1", "left=http://b:2/", "http://[::1]:3"])
    assert [(spec.name, spec.address) for spec in specs] == [
        ("engine-0", ("a", 1)),
        ("left", ("b", 2)),
        ("engine-2", ("::1", 3)),
    ]
    assert [spec.known_as for spec in specs] == ["a:1", "left", "::1:3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("localhost:8000", "looks like http://host:port"),
        ("ftp://a:1", "looks like http://host:port"),
        ("http://a:1/v1", "give the root of the engine, http://a:1"),
        ("http://a:99999", "is no URL"),
        ("http://", "looks like"),
        ("a b=http://a:1", "name has 1 to 64"),
        ("=http://a:1", "name has 1 to 64"),
    ],
)
def test_bad_engines(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_engines([text])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ProxySettings(), "at least one engine"),
        (lambda: ProxySettings(engines=ONE + ONE), "two engines are called 'a'"),
        (
            lambda: ProxySettings(engines=(*ONE, EngineSpec("b", "http://127.0.0.1:8000/", "decode"))),
            "proxy: 127.0.0.1:8000 is given more than once",
        ),
        (lambda: ProxySettings(engines=ONE, port=70000), "a port is"),
        (lambda: ProxySettings(engines=ONE, policy="x"), "no policy 'x'"),
        (lambda: ProxySettings(engines=ONE, health=HealthChecks(path="health")), "health path"),
    ],
)
def test_bad_settings(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("name", ["a", "node"])
def test_a_stream_of_the_pool_has_a_name_of_its_own(name: str) -> None:
    pool = EventSource("node", "tcp://h:1", pool=True)
    other = EventSource(name, "tcp://h:2", pool=True)
    with pytest.raises(ConfigError, match="name"):
        ProxySettings(engines=(EngineSpec("a", "http://h:1"),), events=(pool, other))
