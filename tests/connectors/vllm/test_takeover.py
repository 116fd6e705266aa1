"""The connector under the names of others: each of their options is translated, left out or refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.connector import Mooncake
from moonpool.connectors.vllm.settings import Settings
from moonpool.connectors.vllm.takeover import (
    LMCacheConnectorV1,
    MooncakeConnector,
    MooncakeStoreConnector,
    Takeover,
)
from moonpool.core.errors import ConfigError
from tests.connectors.vllm.conftest import KV_CONFIG, Line, make_prompt, tokens_of
from tests.connectors.vllm.processes import Engine


@pytest.mark.parametrize(
    ("connector", "extra", "expected"),
    [
        (MooncakeStoreConnector, {}, Settings(handover=False)),
        (
            MooncakeStoreConnector,
            {"save_decode_cache": True, "cache_prefix": "blue", "load_async": True, "lookup_rpc_port": 7},
            Settings(handover=False, save_decode=True, namespace="blue"),
        ),
        (MooncakeStoreConnector, {"cache_prefix": "", "handover": True}, Settings()),
        (MooncakeStoreConnector, {"store_tp_size": 4, "node": "n"}, Settings(handover=False, node="n")),
        (MooncakeConnector, {"num_workers": 10, "mooncake_protocol": "rdma"}, Settings()),
        (
            MooncakeConnector,
            {"mooncake_protocol": "tcp", "device_name": "mlx5_0"},
            Settings(handover_transports="loopback,shm,tcp"),
        ),
        (LMCacheConnectorV1, {"use_native": True, "lmcache.chunk_size": 256}, Settings(handover=False)),
        (Mooncake, {"save_decode": True}, Settings(save_decode=True)),
    ],
)
def test_options_of_others(connector: type[Mooncake], extra: dict[str, Any], expected: Settings) -> None:
    assert connector.read_options(extra) == expected


@pytest.mark.parametrize(
    ("connector", "extra", "sentence"),
    [
        (MooncakeStoreConnector, {"load_async": False}, "load_async cannot be False: no load blocks"),
        (MooncakeStoreConnector, {"enable_lookup": False}, "has the kv_role kv_producer"),
        (MooncakeStoreConnector, {"custom_mem_pool": "NVLINK"}, "the KV cache is where vLLM puts it"),
        (MooncakeConnector, {"mooncake_protocol": "ascend"}, "must be rdma or tcp, not 'ascend'"),
        (MooncakeConnector, {"bootstrap_server_address": "h:1"}, "set bootstrap_port"),
        (MooncakeConnector, {"bootstrap_prt": 1}, "did you mean 'bootstrap_port'"),
        (LMCacheConnectorV1, {"lmcach.chunk_size": 1}, "unknown key"),
    ],
)
def test_options_that_ask_for_what_there_is_not(
    connector: type[Takeover], extra: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as refused:
        connector.read_options(extra)
    assert sentence in str(refused.value)


def test_what_means_nothing_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=compat.logger("takeover").name):
        MooncakeStoreConnector.read_options({"lookup_async": True, "preferred_segment": "x"})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("of MooncakeStoreConnector these mean nothing here: lookup_async, preferred_segment")


@pytest.mark.engine
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_script_of_another_store(line: Line, vllm_python: str, models: list[Path], tmp_path: Path) -> None:
    prompt = make_prompt(9_300, 300)
    expected = line.expected([prompt])
    assert tokens_of(line.first.call("generate", prompts=[prompt])) == expected
    line.first.call("drain")
    config = KV_CONFIG | {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_module_path": "moonpool.connectors.vllm.takeover",
        "kv_connector_extra_config": {"load_async": True, "lookup_async": True, "compute_if_faster": False},
    }
    engine = Engine(vllm_python, models[0], line.node.runtime, tmp_path / "log", kv_transfer_config=config)
    try:
        answer = engine.call("generate", prompts=[prompt])
        assert tokens_of(answer) == expected
        assert answer["outputs"][0]["pool"]["pool_tokens"] == 288
    finally:
        engine.close()
