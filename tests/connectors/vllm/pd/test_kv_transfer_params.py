"""kv_transfer_params, as proxies carry them: JSON, in a client's hands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from moonpool.connectors.vllm.pd.kv_transfer_params import (
    Meeting,
    Offer,
    Prefill,
    Unusable,
    answer_of,
    blocks_for,
    parse_decode,
    parse_prefill,
    signature,
)

TOKEN = b"the cluster's"
OFFER = Offer(
    engine_id="engine-1",
    ranks=("10.0.0.1:4001", "10.0.0.1:4002"),
    lease=(1 << 53) - 1,
    slot=4095,
    blocks=((1, 2, 3), (4, 5, 6)),
    tokens=96,
    fingerprint=bytes(range(32)),
    prompt=bytes(range(32, 64)),
    tp_size=2,
)


def test_an_answer_survives_json() -> None:
    params = json.loads(json.dumps(answer_of(OFFER, TOKEN, request_id="r1")))
    assert parse_decode(params, TOKEN) == OFFER
    assert parse_prefill(params) is None


def test_the_names_that_existing_proxies_speak() -> None:
    params = answer_of(OFFER, TOKEN, request_id="r1")
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_engine_id"] == "engine-1"
    assert params["remote_request_id"] == "r1"
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.1", 4001)
    assert params["remote_block_ids"] == [[1, 2, 3], [4, 5, 6]]
    assert params["remote_num_tokens"] == 96
    assert params["tp_size"] == 2


def test_what_prefill_is_asked() -> None:
    assert parse_prefill(None) is None
    assert parse_prefill({}) is None
    assert parse_prefill({"do_remote_decode": False, "transfer_id": "x"}) is None
    nulls = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    assert parse_prefill({"do_remote_decode": True, "do_remote_prefill": False, **nulls}) == Prefill("")
    assert parse_prefill({"do_remote_decode": True, "transfer_id": "x"}) == Prefill("x")
    for bad in ("", 7, "x" * 300, ["x"]):
        with pytest.raises(Unusable, match="transfer_id must be a text"):
            parse_prefill({"do_remote_decode": True, "transfer_id": bad})


def test_the_concurrent_form() -> None:
    params = {
        "do_remote_prefill": True,
        "transfer_id": "xfer-1",
        "remote_engine_id": "e",
        "remote_bootstrap_addr": "http://127.0.0.1:8998",
    }
    assert parse_decode(params, TOKEN) == Meeting("e", "http://127.0.0.1:8998", "xfer-1")
    answered = {**params, "moonpool": {"pool_tokens": 0, "local_tokens": 4, "load_errors": 0}}
    assert parse_decode(answered, TOKEN) == Meeting("e", "http://127.0.0.1:8998", "xfer-1")
    offered = answer_of(OFFER, TOKEN, request_id="r1")
    assert parse_decode({**params, **offered}, TOKEN) == OFFER
    for key in ("remote_engine_id", "remote_bootstrap_addr"):
        with pytest.raises(Unusable, match=key):
            parse_decode({name: value for name, value in params.items() if name != key}, TOKEN)
    for elsewhere in (
        "file:///etc/passwd",
        "http://intranet/admin?x=",
        "http://a@b:1",
        "http://a:1#",
        "http:///",
    ):
        with pytest.raises(Unusable, match="remote_bootstrap_addr"):
            parse_decode({**params, "remote_bootstrap_addr": elsewhere}, TOKEN)
    slash = parse_decode({**params, "remote_bootstrap_addr": "http://h:1/"}, TOKEN)
    assert slash == Meeting("e", "http://h:1/", "xfer-1")


def of_another_offer() -> str:
    other = answer_of(dataclasses.replace(OFFER, lease=7), TOKEN, request_id="r1")
    return str(other["moonpool"]["handover"]["size_signature"])


@pytest.mark.parametrize(
    "change",
    [
        lambda params: params.update(remote_engine_id="another"),
        lambda params: params.update(remote_num_tokens=97),
        lambda params: params["remote_block_ids"][0].reverse(),
        lambda params: params["remote_block_ids"].reverse(),
        lambda params: params["moonpool"]["handover"].update(ranks=["10.6.6.6:1", "10.0.0.1:4002"]),
        lambda params: params["moonpool"]["handover"].update(lease=7),
        lambda params: params["moonpool"]["handover"].update(slot=7),
        lambda params: params["moonpool"]["handover"].update(prompt="00" * 32),
        lambda params: params["moonpool"]["handover"].update(fingerprint="00" * 32),
        lambda params: params["moonpool"]["handover"].update(signature="00" * 32),
        lambda params: params["moonpool"]["handover"].pop("signature"),
        lambda params: params["moonpool"]["handover"].update(tp_size=1),
        lambda params: params["moonpool"]["handover"].pop("size_signature"),
        lambda params: params["moonpool"]["handover"].update(size_signature=of_another_offer()),
    ],
)
def test_a_changed_offer_is_not_believed(change: Callable[[dict[str, Any]], object]) -> None:
    params = answer_of(OFFER, TOKEN, request_id="r1")
    change(params)
    with pytest.raises(Unusable, match="signature does not fit"):
        parse_decode(params, TOKEN)


def test_another_token() -> None:
    params = answer_of(OFFER, TOKEN, request_id="r1")
    with pytest.raises(Unusable, match="another cluster token"):
        parse_decode(params, b"other")


def test_the_release_before() -> None:
    """It does not tell its tensor-parallel size, and signs the rest; it reads what we tell it as well."""
    params = answer_of(OFFER, TOKEN, request_id="r1")
    del params["moonpool"]["handover"]["tp_size"]
    del params["moonpool"]["handover"]["size_signature"]
    assert parse_decode(params, TOKEN) == dataclasses.replace(OFFER, tp_size=0)
    signed = dataclasses.replace(OFFER, tp_size=0)
    assert signature(OFFER, TOKEN) == signature(signed, TOKEN)


def test_what_only_other_connectors_read_may_be_changed() -> None:
    """Proxies that put another host there, say."""
    params = answer_of(OFFER, TOKEN, request_id="r1")
    params |= {"remote_host": "elsewhere", "remote_port": 1, "remote_request_id": "x", "tp_size": 1}
    assert parse_decode(params, TOKEN) == OFFER


def test_other_connectors_and_versions() -> None:
    params = answer_of(OFFER, TOKEN, request_id="r1")
    with pytest.raises(Unusable, match="not made by this connector"):
        parse_decode({key: value for key, value in params.items() if key != "moonpool"}, TOKEN)
    params["moonpool"]["handover"]["version"] = 2
    sentence = "this decode engine speaks version 1 of hand-over offers, the prefill engine version 2"
    with pytest.raises(Unusable, match=f"{sentence}, none in common; upgrade this decode engine"):
        parse_decode(params, TOKEN)


GARBAGE: list[Any] = [None, True, -1, 1 << 60, 1.5, "", "x" * 2000, [], [[]], [[-1]], [["a"]], {}, {"a": 1}]


def test_garbage_raises_nothing_else(rng: random.Random) -> None:
    for _ in range(1000):
        params = answer_of(OFFER, TOKEN, request_id="r1")
        place = rng.choice([params, params["moonpool"], params["moonpool"]["handover"]])
        place[rng.choice(list(place))] = rng.choice(GARBAGE)
        with contextlib.suppress(Unusable):
            parse_decode(params, TOKEN)
            parse_prefill(params)


def test_blocks() -> None:
    """Decode computes the last token itself."""
    assert [blocks_for(tokens, 4) for tokens in (1, 2, 4, 5, 6, 9, 10)] == [0, 1, 1, 1, 2, 2, 3]
