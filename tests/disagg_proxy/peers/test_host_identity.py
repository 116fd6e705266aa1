"""Whether two proxies mean one engine."""

from __future__ import annotations

import pytest

from moonpool.disagg_proxy.peers import host_identity
from moonpool.disagg_proxy.peers.host_identity import may_be_one, site_of

HERE, ELSEWHERE = "127.0.0.1:8000@here", "127.0.0.1:8000@elsewhere"


@pytest.mark.parametrize(
    ("mine", "theirs", "one"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000", True),
        ("10.0.0.1:8000", "10.0.0.2:8000", False),
        ("10.0.0.1:8000", "10.0.0.1:8001", False),
        ("[fd00::1]:8000", "[fd00:0::1]:8000", True),
        ("[fd00::1]:8000", "[fd00::2]:8000", False),
        ("[::ffff:10.0.0.1]:8000", "10.0.0.1:8000", True),
        ("[fe80::1%eth0]:8000", "[fe80::1%ens3]:8000", True),
        ("node1:8000", "node2:8000", False),
        ("node1:8000", "node1:8001", False),
        ("node1:8000", "Node1.cluster.local:8000", True),
        ("node1:8000", "node10.cluster.local:8000", False),
        ("node1:8000", "10.0.0.1:8000", True),  # cannot be told apart
        ("node1:8000", "10.0.0.1:9000", True),
        (HERE, HERE, True),
        (HERE, ELSEWHERE, False),
        (HERE, "localhost:8000@here", True),
        (HERE, "127.0.0.1:8001@here", False),
        (HERE, "10.0.0.1:8000", True),  # the same, if that is this machine
        (HERE, "node1:9000", True),
        ("", "10.0.0.1:8000", True),
        ("nonsense", "10.0.0.1:8000", True),
    ],
)
def test_one_engine_or_two(mine: str, theirs: str, one: bool) -> None:
    assert may_be_one(mine, theirs) is one
    assert may_be_one(theirs, mine) is one


def test_what_only_this_machine_reaches_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_identity, "_machine", lambda: "here")
    for host in ("127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1", "0.0.0.0"):
        assert site_of(host, 8000).endswith(":8000@here")
    assert site_of("10.0.0.1", 8000) == "10.0.0.1:8000"
    assert site_of("fd00::1", 8000) == "[fd00::1]:8000"
    monkeypatch.setattr(host_identity, "_machine", lambda: "")
    assert site_of("127.0.0.1", 8000) == ""


def test_a_machine_has_an_identity() -> None:
    assert len(host_identity._machine()) >= 32
