"""Where a node listens, how others reach it, and what is refused before anything listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.core.config import config
from moonpool.core.errors import ConfigError
from moonpool.core.service import listen_addresses
from moonpool.core.service.addresses import Address
from moonpool.core.service.listen_addresses import (
    NodeAddresses,
    advertised_address,
    host_id,
    listen_address,
    node_addresses,
)

TOKEN = {"MOONPOOL_CLUSTER_TOKEN": "chosen by a person"}


def made(env: dict[str, str] | None = None, **arguments: object) -> config.Config:
    return config.load(
        env=env or {}, arguments={key.replace("__", "."): value for key, value in arguments.items()}
    )


@pytest.fixture
def busy() -> Iterator[Address]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield Address(*listener.getsockname())


def test_a_single_node_needs_no_settings(runtime: Path) -> None:
    found = node_addresses(made(node__listen="127.0.0.1:0", node__host_id="here"))
    assert found == NodeAddresses(("127.0.0.1:0",), "127.0.0.1:0", "here", "")
    assert node_addresses(made(node__listen="off", node__host_id="here")) == NodeAddresses(host_id="here")


def test_a_default_port_that_is_taken_gives_way_and_a_chosen_one_is_kept(
    runtime: Path, busy: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listen_address(made(node__http=str(busy)), "node.http") == busy
    monkeypatch.setattr(listen_addresses, "is_taken", lambda _: True)
    assert listen_address(made(), "node.http") == Address("127.0.0.1", 0)
    assert listen_address(made(), "node.listen") == Address("127.0.0.1", 0)
    assert node_addresses(made()).advertise == "127.0.0.1:0"
    monkeypatch.undo()
    assert listen_addresses.is_taken(busy)
    assert not listen_addresses.is_taken(Address("127.0.0.1", 0))


def test_an_address_for_all_is_advertised_as_one_of_this_host(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen_addresses, "_first_address", lambda: "10.0.0.7")
    monkeypatch.setattr(
        listen_addresses, "_source_towards", lambda _family, towards: f"source-to-{towards.host}"
    )
    assert advertised_address("10.0.0.8", None) == "10.0.0.8"
    assert advertised_address("0.0.0.0", None) == "10.0.0.7"
    assert advertised_address("0.0.0.0", Address("10.9.9.9", 7700)) == "source-to-10.9.9.9"
    assert advertised_address("0.0.0.0", Address("127.0.0.1", 7700)) == "10.0.0.7"
    found = node_addresses(made(TOKEN, node__listen="0.0.0.0:7710", cluster__master="127.0.0.1:7700"))
    assert found.advertise == "10.0.0.7:7710"
    assert found.master == "127.0.0.1:7700"
    given = made(TOKEN, node__listen="0.0.0.0:7710", node__advertise="[fd00::1]:9")
    assert node_addresses(given).advertise == "[fd00::1]:9"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("[::1]:7700", "[::1]:7700"),  # no list in JSON
        ("[::1]:7700, 127.0.0.1:7701", "[::1]:7700,127.0.0.1:7701"),
        ('["127.0.0.1:7700", "[::1]:7701"]', "127.0.0.1:7700,[::1]:7701"),
    ],
)
def test_masters_may_have_addresses_of_ipv6(text: str, addresses: str) -> None:
    assert listen_addresses.master_text(made(TOKEN, cluster__master=text)) == addresses
    assert listen_addresses.master_text(config.load(env={"MOONPOOL_CLUSTER_MASTER": text})) == addresses


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:1,127.0.0.1:2;127.0.0.1:3", " 127.0.0.1:1, 127.0.0.1:2 ; 127.0.0.1:3"],
)
def test_semicolons_stand_between_the_masters_of_two_ranges(text: str) -> None:
    wanted = "127.0.0.1:1,127.0.0.1:2;127.0.0.1:3"
    assert listen_addresses.master_text(made(cluster__master=text)) == wanted
    assert listen_addresses.master_text(config.load(env={"MOONPOOL_CLUSTER_MASTER": text})) == wanted
    assert node_addresses(made(cluster__master=text)).master == wanted


@pytest.mark.parametrize(("text", "found"), [("0/1", (0, 1)), ("3/4", (3, 4)), (" 15/16", (15, 16))])
def test_a_master_has_a_range(text: str, found: tuple[int, int]) -> None:
    assert listen_addresses.range_of_master(made(master__range=text)) == found


@pytest.mark.parametrize("text", ["", "1", "4/4", "0/0", "0/17", "-1/4", "a/4", "1/4/5"])
def test_what_is_no_range_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be INDEX/COUNT, from 0/1, which is all shards, to 15/16"):
        listen_addresses.range_of_master(made(master__range=text))


def test_the_source_of_a_route_is_an_address_of_this_host() -> None:
    assert listen_addresses._source_towards(socket.AF_INET, Address("127.0.0.1", 7700)) == "127.0.0.1"
    assert listen_addresses._source_towards(socket.AF_INET, Address("no.such.host.invalid", 7700)) == ""
    first = listen_addresses._first_address()
    if first:
        with socket.socket() as probe:
            probe.bind((first, 0))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"node__listen": "0.0.0.0:7710"},
            r"node.listen = 0.0.0.0:7710 can be reached from other hosts, which needs a cluster token: set "
            r"cluster.token_file or MOONPOOL_CLUSTER_TOKEN, or listen on 127.0.0.1:7710",
        ),
        (
            {"cluster__master": "10.0.0.1:7700"},
            r"cluster.master = 10.0.0.1:7700 is on another host, which needs a cluster token that both know: "
            r"set cluster.token_file or MOONPOOL_CLUSTER_TOKEN",
        ),
        ({"cluster__master": "10.0.0.1"}, "cluster.master = '10.0.0.1' is no address; write host:port"),
        (
            {"cluster__master": "127.0.0.1:1", "node__listen": "off"},
            "node.listen is off, and the other nodes of the master 127.0.0.1:1 must reach this one; give an",
        ),
        (
            {"cluster__master": "127.0.0.1:1;;127.0.0.1:2"},
            "has a range without a master; name one on each side",
        ),
        ({"cluster__master": "127.0.0.1:1;127.0.0.1:1"}, "names one master twice; each has one range"),
        (
            {"cluster__master": ";".join(f"127.0.0.1:{port}" for port in range(1, 18))},
            "cluster.master has 17 ranges of masters, and there are at most 16; put commas between",
        ),
        ({"node__advertise": "0.0.0.0:7710"}, "node.advertise = 0.0.0.0:7710 is no address to connect to"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    runtime: Path, arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        node_addresses(made(**arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["node.listen", "node.http", "master.http"])
def test_a_token_that_can_be_guessed_is_refused_beyond_loopback(runtime: Path, key: str) -> None:
    short = {"MOONPOOL_CLUSTER_TOKEN": "fifteen letters"}
    beyond, inside = ({key.replace(".", "__"): f"{host}:0"} for host in ("0.0.0.0", "127.0.0.1"))
    with pytest.raises(ConfigError, match=f"{key} = .* has 15 bytes, .* openssl rand -hex 32") as caught:
        listen_address(made(short, **beyond), key)
    assert "\n" not in str(caught.value)
    assert listen_address(made(short, **inside), key) == Address("127.0.0.1", 0)
    assert listen_address(made({"MOONPOOL_CLUSTER_TOKEN": "sixteen letters."}, **beyond), key) is not None


def test_a_loopback_address_is_no_use_to_a_cluster_of_several_hosts(runtime: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"node.listen = 127.0.0.1:7 cannot be reached by the other nodes of the master 10.0.0.1:7700; "
        r"listen on an address of this host, for example 0.0.0.0:7",
    ):
        node_addresses(made(TOKEN, node__listen="127.0.0.1:7", cluster__master="10.0.0.1:7700"))
    tunnelled = made(
        TOKEN,
        node__listen="127.0.0.1:7",
        node__advertise="tunnel:9",
        cluster__master="10.0.0.1:7700",
    )
    assert node_addresses(tunnelled).advertise == "tunnel:9"


def test_the_host_id_is_the_same_each_time_and_changes_with_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_id()
    assert before == host_id()
    assert len(before) == 16
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: "another" if self.name == "boot_id" else read(self))
    assert host_id() != before
