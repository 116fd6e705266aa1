"""What other projects do with `mooncake`, call by call, in processes of their own:
``callers.py NAME give|take``.

The giver prints what the taker must know, the taker gets it as a line on stdin, and each prints "right" when
every byte is. The calls, their order, their arguments and what is made of the answers are those of the
projects' sources, as docs/callers.md lists them; the memory is ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import urllib.request
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

SIZE = 1 << 20
MASTER = os.environ.get("CALLERS_MASTER", "")
PAGES = os.environ.get("CALLERS_PAGES", "")


class Memory:
    def __init__(self, seed: int | None, size: int = SIZE) -> None:
        self.array = np.zeros(size, np.uint8)
        if seed is not None:
            self.array[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.ptr = int(self.array.ctypes.data)

    def check(self, seed: int) -> None:
        assert (self.array == Memory(seed, len(self.array)).array).all()


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def hear() -> Any:
    return json.loads(sys.stdin.readline())


def engine(protocol: str = "rdma", device: str = "") -> tuple[Any, str]:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, device) == 0
    return made, f"127.0.0.1:{made.get_rpc_port()}"


def store(segment: int, buffer: int = 16 << 20, protocol: str = "tcp") -> Any:
    made = MooncakeDistributedStore()
    assert made.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer, protocol, "", MASTER) == 0
    return made


# checkpoint-engine 0.4.2, p2p_store.py: named tensors of one rank, read by another


def checkpoint_engine_give() -> None:
    made, session = engine("rdma", "mlx5_0")
    tensors = [Memory(1), Memory(2, 4096)]
    assert made.batch_register_memory([t.ptr for t in tensors], [len(t.array) for t in tensors]) == 0
    say([session, [t.ptr for t in tensors]])
    hear()
    assert made.batch_unregister_memory([t.ptr for t in tensors]) == 0


def checkpoint_engine_take() -> None:
    session, remote = hear()
    made, _ = engine("rdma", "mlx5_0")
    here = [Memory(None), Memory(None, 4096)]
    assert made.batch_register_memory([t.ptr for t in here], [len(t.array) for t in here]) == 0
    assert made.batch_transfer_sync_read(session, [t.ptr for t in here], remote, [SIZE, 4096]) == 0
    here[0].check(1)
    here[1].check(2)


# LMDeploy 0.18.0, disagg/backend/mooncake.py: the decode engine reads blocks of the prefill engine's cache


def lmdeploy_give() -> None:
    made, session = engine("rdma", "erdma_0")
    cache = Memory(3)
    assert made.register_memory(cache.ptr, SIZE) == 0
    say([session, cache.ptr])
    hear()


def lmdeploy_take() -> None:
    session, remote = hear()
    made, _ = engine("rdma", "erdma_0")
    cache = Memory(None)
    assert made.register_memory(cache.ptr, SIZE) == 0
    for at in range(0, SIZE, SIZE // 16):
        assert made.transfer_sync_read(session, cache.ptr + at, remote + at, SIZE // 16) == 0
    cache.check(3)


# LMDeploy 0.18.0, kv_connector/mooncake/store: blocks of rows in several tensors, saved and loaded


def _rows(memory: Memory, block: int) -> tuple[list[int], list[int]]:
    """The rows of a block: a quarter of each half of the memory, as if K and V lay apart."""
    return [memory.ptr + half * SIZE // 2 + block * SIZE // 8 for half in (0, 1)], [SIZE // 8] * 2


def lmdeploy_store_give() -> None:
    made = store(32 << 20)
    cache = Memory(4)
    assert made.register_buffer(cache.ptr, SIZE) == 0
    keys = [f"lmdeploy/{block}" for block in range(4)]
    assert list(made.batch_is_exist(keys)) == [0] * 4
    rows = [_rows(cache, block) for block in range(4)]
    results = made.batch_put_from_multi_buffers(
        keys, [r[0] for r in rows], [r[1] for r in rows], ReplicateConfig()
    )
    assert list(results) == [0] * 4
    say(keys)
    hear()
    made.close()


def lmdeploy_store_take() -> None:
    keys = hear()
    made = store(0)
    cache = Memory(None)
    assert made.register_buffer(cache.ptr, SIZE) == 0
    assert list(made.batch_is_exist([*keys, "lmdeploy/none"])) == [1] * 4 + [0]
    rows = [_rows(cache, block) for block in range(4)]
    results = made.batch_get_into_multi_buffers(keys, [r[0] for r in rows], [r[1] for r in rows])
    assert list(results) == [SIZE // 4] * 4
    assert made.unregister_buffer(cache.ptr) == 0
    assert made.close() in (0, None)
    cache.check(4)


# vLLM-Omni 0.30.0, omni_connectors: objects between stages by the store, and by the engine


def vllm_omni_give() -> None:
    made = store(64 << 20, 64 << 20)
    pin = ReplicateConfig()
    pin.with_soft_pin = True  # the wheel of 0.3.13 has lost it
    assert made.put("req@thinker_talker", Memory(5).array.tobytes(), pin) == 0
    sender, session = engine("tcp")
    pool = Memory(6)
    assert sender.register_memory(pool.ptr, SIZE) == 0
    say([session])
    receiver, remote = hear()
    pieces = [4096, SIZE - 4096]
    here, there = [pool.ptr, pool.ptr + 4096], [remote, remote + 4096]
    assert sender.batch_transfer_sync_write(receiver, here, there, pieces) == 0
    say("written")
    hear()
    assert sender.unregister_memory(pool.ptr) == 0


def vllm_omni_take() -> None:
    hear()
    made = store(0)
    assert made.get("req@thinker_talker") == Memory(5).array.tobytes()
    assert made.get("req@nobody") == b""
    receiver, session = engine("tcp")
    pool = Memory(None)
    assert receiver.register_memory(pool.ptr, SIZE) == 0
    say([session, pool.ptr])
    assert hear() == "written"
    pool.check(6)
    made.close()


# FlexKV 27623b5 and 11f4571: mooncakeEngineWrapper.py (notifies), external/mooncake_store_utils.py


def flexkv_give() -> None:
    port = hear()  # FlexKV's configuration says it
    made = TransferEngine()
    redis = "redis://127.0.0.1:6379"
    assert made.initialize_ext(f"127.0.0.1:{port}", redis, "tcp", "", "redis") == 0
    cache = Memory(7)
    assert made.register_memory(cache.ptr, SIZE) == 0
    say([f"127.0.0.1:{port}", cache.ptr])
    session, remote = hear()
    notify = TransferNotify(f"127.0.0.1:{port}", "task 1 ok")
    assert made.transfer_sync(session, cache.ptr, remote, SIZE, TransferOpcode.Write, notify) == 0
    failure = TransferNotify(f"127.0.0.1:{port}", "task 2 failed")
    assert made.transfer_sync(session, cache.ptr, remote, 0, TransferOpcode.Write, failure) == 0
    say("told")
    hear()
    assert made.unregister_memory(cache.ptr) == 0


def flexkv_take() -> None:
    session, remote = hear()
    made, own = engine("tcp")
    cache, pushed = Memory(None), Memory(None)
    assert made.register_memory(cache.ptr, SIZE) == 0
    assert made.register_memory(pushed.ptr, SIZE) == 0
    assert made.transfer_sync_read(session, cache.ptr, remote, SIZE) == 0
    cache.check(7)
    say([own, pushed.ptr])
    assert hear() == "told"
    heard: list[str] = []
    deadline = time.monotonic() + 5  # FlexKV's own
    while len(heard) < 2 and time.monotonic() < deadline:
        heard += [one.msg for one in made.get_notifies() if one.name == session]
    assert heard == ["task 1 ok", "task 2 failed"]
    pushed.check(7)


def flexkv_store_give() -> None:
    made = store(32 << 20)
    with urllib.request.urlopen(f"{PAGES}/get_all_segments", timeout=3) as page:
        assert page.read()
    assert made.put("flexkv_mooncake_store_warmup_key", bytes(4096)) == 0
    assert made.is_exist("flexkv_mooncake_store_warmup_key") == 1
    assert made.get("flexkv_mooncake_store_warmup_key") == bytes(4096)
    cache = Memory(8)
    assert made.register_buffer(cache.ptr, SIZE) == 0
    keys = [f"flexkv/{block}" for block in range(8)]
    each = SIZE // 8
    assert list(made.batch_is_exist(keys)) == [0] * 8
    results = made.batch_put_from(keys, [cache.ptr + at * each for at in range(8)], [each] * 8)
    assert list(results) == [0] * 8
    assert made.unregister_buffer(cache.ptr) == 0
    say(keys)
    hear()
    made.close()


def flexkv_store_take() -> None:
    keys = hear()
    query = store(0, 0, "rpc_only")  # a query-only client
    assert list(query.batch_is_exist([*keys, "flexkv/none"])) == [1] * 8 + [0]
    made = store(0)
    cache = Memory(None)
    assert made.register_buffer(cache.ptr, SIZE) == 0
    each = SIZE // 8
    sizes = list(made.batch_get_into(keys, [cache.ptr + at * each for at in range(8)], [each] * 8))
    assert sizes == [each] * 8
    cache.check(8)
    query.close()
    made.close()


# LightX2V 2473071, disagg/mooncake.py: the encoder writes into the transformer's memory


def lightx2v_give() -> None:
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "rdma",
        "device_name": "",
    }
    made = TransferEngine()
    made.initialize(*config.values())  # it does not look at the answer
    latents = Memory(9)
    assert made.register_memory(latents.ptr, SIZE) == 0
    say(None)
    session, remote = hear()
    assert made.transfer_sync_write(session, latents.ptr, remote, SIZE) >= 0
    say("written")
    hear()
    assert made.unregister_memory(latents.ptr) == 0


def lightx2v_take() -> None:
    hear()
    made, session = engine("rdma")
    latents = Memory(None)
    assert made.register_memory(latents.ptr, SIZE) == 0
    say([session, latents.ptr])
    assert hear() == "written"
    latents.check(9)


# TorchSpec 75c40a8, transfer/mooncake: hidden states, put from host buffers and deleted by force


def _torchspec_store(segment: int) -> Any:
    made = MooncakeDistributedStore()
    result = made.setup(
        local_hostname="127.0.0.1",
        metadata_server="P2PHANDSHAKE",
        global_segment_size=segment,
        local_buffer_size=16 << 20,
        protocol="tcp",
        rdma_devices="",
        master_server_addr=MASTER,
    )
    assert result in (None, 0)
    # How it tells an old release where no distribution of the original's name is installed.
    assert "force" in (made.batch_remove.__doc__ or "")
    return made


def torchspec_give() -> None:
    made = _torchspec_store(32 << 20)
    pin = ReplicateConfig()
    assert hasattr(pin, "with_hard_pin")
    pin.with_hard_pin = True
    buffer = Memory(10)
    assert made.register_buffer(buffer.ptr, SIZE) == 0
    assert list(made.batch_put_from(["_warmup"], [buffer.ptr], [4096])) == [0]
    assert list(made.batch_remove(["_warmup"], force=True)) == [0]
    keys, each = ["s_hs", "s_ids", "s_tgt", "s_lhs"], SIZE // 4
    results = made.batch_put_from(keys, [buffer.ptr + at * each for at in range(4)], [each] * 4, config=pin)
    assert all(result == 0 for result in results)
    say(keys)
    hear()
    assert list(made.batch_is_exist(keys)) == [0] * 4
    made.close()


def torchspec_take() -> None:
    keys = hear()
    made = _torchspec_store(0)
    assert made.is_exist(keys[0]) == 1
    expected, each = Memory(10).array.tobytes(), SIZE // 4
    for at, found in enumerate(made.batch_get_buffer(keys)):
        assert found is not None
        assert found.size() == each
        assert ctypes.string_at(found.ptr(), each) == expected[at * each : (at + 1) * each]
        del found
    direct = Memory(None)
    assert made.register_buffer(direct.ptr, SIZE) == 0
    assert (
        list(made.batch_get_into(keys, [direct.ptr + at * each for at in range(4)], [each] * 4)) == [each] * 4
    )
    direct.check(10)
    assert made.health_check() == 0 or made.health_check() == 1
    assert list(made.batch_remove(keys, force=True)) == [0] * 4
    made.close()


if __name__ == "__main__":
    globals()[f"{sys.argv[1]}_{sys.argv[2]}"]()
    say("right")
