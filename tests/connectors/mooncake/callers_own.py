"""Other projects' own code over the drop-in, unchanged, with tensors of the CPU: ``callers_own.py NAME
give|take``, under a Python that has the project. They speak as callers.py does."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch

SIZE = 1 << 20
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the projects print is not for the other process


def say(value: Any) -> None:
    print(json.dumps(value), file=ANSWERS, flush=True)


def hear() -> Any:
    return json.loads(sys.stdin.readline())


def numbers(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


# checkpoint_engine.p2p_store.P2PStore; the device manager, which asks CUDA, is played


def _p2p_store() -> Any:
    from checkpoint_engine import p2p_store

    p2p_store.get_ip = lambda: "127.0.0.1"
    module = SimpleNamespace(device_count=lambda: 1)
    manager = SimpleNamespace(
        device_module=module, rdma_device=lambda rank: "mlx5_0", transfer_engine_protocol="rdma"
    )
    return p2p_store.P2PStore(manager)


def checkpoint_engine_give() -> None:
    store = _p2p_store()
    tensors = {"a": numbers(1), "b": numbers(2)}
    store.register_named_tensors(tensors)
    say([store.addr, [tensor.data_ptr() for tensor in tensors.values()]])
    hear()
    assert store.unregister_named_tensors(["a", "b"]) == 2


def checkpoint_engine_take() -> None:
    addr, remote = hear()
    store = _p2p_store()
    here = {"a": torch.zeros(SIZE, dtype=torch.uint8), "b": torch.zeros(SIZE, dtype=torch.uint8)}
    store.register_named_tensors(here)
    store.batch_transfer_sync_read(addr, [t.data_ptr() for t in here.values()], remote, [SIZE, SIZE])
    assert torch.equal(here["a"], numbers(1))
    assert torch.equal(here["b"], numbers(2))


# lmdeploy.pytorch.disagg: MooncakeBackend; its address, which it learns by asking for a way out, is played


def _backend(name: str, other: str, cache: torch.Tensor) -> Any:
    from lmdeploy.pytorch.disagg.backend import mooncake
    from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
    from lmdeploy.pytorch.disagg.conn.protocol import DistServeInitRequest, MigrationProtocol
    from lmdeploy.pytorch.disagg.messages import DistServeRegisterMRMessage

    mooncake.get_local_ip_by_remote = lambda: "127.0.0.1"
    backend = mooncake.MooncakeBackend()
    config = DistServeEngineConfig.model_construct(tp_size=1)
    backend.p2p_initialize(
        DistServeInitRequest.model_construct(
            local_engine_id=name,
            local_engine_config=config,
            remote_engine_id=other,
            remote_engine_config=config,
            protocol=MigrationProtocol.RDMA,
            rank=0,
        )
    )
    backend.register_memory_region(
        DistServeRegisterMRMessage(
            protocol=MigrationProtocol.RDMA,
            remote_engine_id=other,
            mr_key=0,
            addr=cache.data_ptr(),
            offset=cache.storage_offset(),
            length=SIZE,
        )
    )
    return backend


def lmdeploy_give() -> None:
    cache = numbers(3)
    backend = _backend("prefill", "decode", cache)
    say(backend.endpoint_info("decode", None))
    hear()
    hear()


def lmdeploy_take() -> None:
    from lmdeploy.pytorch.disagg.conn.protocol import DistServeKVTransferEndpointInfo, MigrationProtocol
    from lmdeploy.pytorch.disagg.messages import AssignmentInstruct, MigrationAssignment

    endpoint = hear()
    cache = torch.zeros(SIZE, dtype=torch.uint8)
    backend = _backend("decode", "prefill", cache)
    say(backend.endpoint_info("prefill", None))
    backend.p2p_connect(
        "prefill",
        DistServeKVTransferEndpointInfo(protocol=MigrationProtocol.RDMA, endpoint_info=json.dumps(endpoint)),
    )
    each = SIZE // 8
    blocks = [
        AssignmentInstruct(mr_key=0, target_offset=at * each, source_offset=at * each, length=each)
        for at in range(8)
    ]
    assignment = MigrationAssignment(
        protocol=MigrationProtocol.RDMA, remote_engine_id="prefill", batch=blocks
    )
    asyncio.run(backend.p2p_migrate(assignment))
    assert torch.equal(cache, numbers(3))


# vllm_omni: MooncakeStoreConnector and MooncakeTransferEngineConnector. What its packages import first is the
# vLLM that it was made for, and is left out, since another may be installed.


def _omni() -> None:
    found = importlib.util.find_spec("vllm_omni")
    assert found is not None
    place = next(iter(found.submodule_search_locations or ()))
    for name in ("vllm_omni", "vllm_omni.distributed", "vllm_omni.distributed.omni_connectors"):
        package = types.ModuleType(name)
        package.__path__ = [place + name.removeprefix("vllm_omni").replace(".", "/")]
        sys.modules[name] = package


def _omni_store(segment: int) -> Any:
    _omni()
    from vllm_omni.distributed.omni_connectors.connectors.mooncake_store_connector import (
        MooncakeStoreConnector,
    )

    return MooncakeStoreConnector(
        {
            "host": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master": os.environ["CALLERS_MASTER"],
            "segment": segment,
            "localbuf": 16 << 20,
        }
    )


def vllm_omni_give() -> None:
    connector = _omni_store(64 << 20)
    ok, size, _ = connector.put("0", "1", "request", {"hidden": numbers(4), "text": "hello"})
    assert ok
    assert size > SIZE
    say(None)
    hear()
    connector.close()


def vllm_omni_take() -> None:
    hear()
    connector = _omni_store(0)
    data, size = connector.get("0", "1", "request")
    assert size > SIZE
    assert data["text"] == "hello"
    assert torch.equal(torch.as_tensor(data["hidden"]), numbers(4))
    connector.close()


def _omni_engine(role: str) -> Any:
    _omni()
    from vllm_omni.distributed.omni_connectors.connectors import mooncake_transfer_engine_connector as module

    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign]  # needs CUDA
    return module.MooncakeTransferEngineConnector(
        {
            "host": "127.0.0.1",
            "zmq_port": 0 if role == "receiver" else _free_port(),
            "protocol": "tcp",
            "memory_pool_size": 8 << 20,
            "memory_pool_device": "cpu",
            "role": role,
        }
    )


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def vllm_omni_engine_give() -> None:
    connector = _omni_engine("sender")
    ok, _, metadata = connector.put("0", "1", "request", numbers(5))
    assert ok
    say(metadata)
    hear()
    connector.close()


def vllm_omni_engine_take() -> None:
    metadata = hear()
    connector = _omni_engine("receiver")
    buffer, size = connector.get("0", "1", "request", metadata)
    assert size == SIZE
    assert buffer.to_bytes() == numbers(5).numpy().tobytes()
    buffer.release()
    connector.close()


if __name__ == "__main__":
    globals()[f"{sys.argv[1]}_{sys.argv[2]}"]()
    say("right")
